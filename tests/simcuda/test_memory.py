"""The allocator, streams, devices and steps of an optimizer, as they are on CUDA."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, Event, MemoryOptions, OutOfMemory, Policy, Resized
from elastic_mbs.errors import OptimizerStepError
from elastic_mbs.memory import Headroom
from stress.limits import Child, run_children
from stress.limits.simcuda import Simulation, control
from stress.reference.state import same_state
from tests.helpers.room import MEBI, Pair, Wide, batch_on, by_hand, loss_of, wide
from tests.helpers.steps import cross_entropy, elastic, mlp, off_by, pairs, whole_gradient

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def small(device: torch.device = DEVICE) -> tuple[nn.Module, Pair]:
    return mlp().to(device), (pairs()[0].to(device), pairs()[1].to(device))


def test_a_size_with_which_the_allocator_thrashes_shrinks_after_two_calls(
    simulation: Simulation,
) -> None:
    # No call fails, but each has to give back its cached blocks: it needs one that is a little
    # larger than the last one.
    model, batch = small()
    events: list[Event] = []
    torch.cuda.empty_cache()
    simulation.foreign(simulation.free() - 500 * MEBI)

    sizes = iter(range(300, 500, 10))

    def loss_fn(piece: Pair) -> Tensor:
        torch.empty(next(sizes) * MEBI, dtype=torch.uint8, device=DEVICE)
        return cross_entropy(model)(piece)

    with elastic(model, micro_batch_size=8, on_event=events.append) as mbs:
        for _ in range(3):  # the retries of the first are not known to be its own
            mbs.backward(loss_fn, batch)
    moves = [
        (event.before, event.after, event.reason) for event in events if isinstance(event, Resized)
    ]
    assert not any(isinstance(event, OutOfMemory) for event in events)
    assert moves == [(8, 4, "thrash")]


def expand(line: Callable[[object], None]) -> None:
    model, batch = wide(DEVICE), batch_on(DEVICE, 256)
    reference = by_hand(model, batch, ((0, 256),))
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    torch.cuda.empty_cache()
    step = torch.cuda.max_memory_reserved(DEVICE) - torch.cuda.memory_reserved(DEVICE)
    simulation = Simulation()
    simulation.foreign(simulation.free() - int(0.4 * step))
    with elastic(model, micro_batch_size=256) as mbs:
        result = mbs.backward(lambda piece: loss_of(model, piece), batch)
    assert result.ooms
    assert off_by(model, reference) <= 1e-12


def test_an_oom_of_expandable_segments_is_recovered_from_exactly(
    apart: Callable[..., None],
) -> None:
    apart(expand, PYTORCH_ALLOC_CONF="expandable_segments:True")


def keep_pace(line: Callable[[object], None]) -> None:
    """Train on a slow device: the host runs ahead of it, as in a loop written by hand."""
    simulation = Simulation()
    model, (x, y) = small()
    partition = ((0, 4), (4, 8))
    batches = {
        "device": (x, y),
        "host": (x.cpu(), y.cpu()),
        "pinned": (x.cpu().pin_memory(), y.cpu().pin_memory()),
    }
    with ElasticMBS(
        model,
        micro_batch_size=4,
        policy=Policy(max_micro_batch_size=4),
        on_event=lambda event: None,
    ) as mbs:
        for place, batch in batches.items():

            def waits(run: Callable[[], object]) -> int:
                model.zero_grad()
                torch.cuda.synchronize()
                before = simulation.waits()
                run()
                found = simulation.waits() - before
                assert not torch.cuda.current_stream().query()  # nobody has waited for the end
                return found

            def loop(batch: Pair = batch) -> None:
                for start, stop in partition:
                    piece = (
                        batch[0][start:stop].to(DEVICE, non_blocking=True),
                        batch[1][start:stop].to(DEVICE, non_blocking=True),
                    )
                    (cross_entropy(model)(piece) * 0.5).backward()

            for _ in range(3):
                result = mbs.backward(cross_entropy(model), batch)
            assert result.partition == partition
            mine = waits(lambda batch=batch: mbs.backward(cross_entropy(model), batch))  # type: ignore[misc]
            assert mine == waits(loop), place
        torch.cuda.synchronize()
        mbs.backward(cross_entropy(model), batches["device"])
        state: Any = mbs.state_dict()["controller"]
    [[_, seconds]] = state["tracks"][0]["time"]
    assert seconds >= 15 * 2e-3  # of the device: the host was done with it in a fraction of that


def test_a_settled_call_waits_no_more_often_than_a_loop_by_hand(
    apart: Callable[..., None],
) -> None:
    apart(keep_pace, SIMCUDA_LAG_US=2000)


def use_the_second(line: Callable[[object], None]) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    simulation = Simulation()
    model, batch = wide(second), batch_on(second, 256)
    reference = by_hand(model, batch, ((0, 256),))
    torch.cuda.empty_cache()
    step = torch.cuda.max_memory_reserved(second) - torch.cuda.memory_reserved(second)
    simulation.foreign(simulation.free(1) - int(0.4 * step), device=1)
    untouched = simulation.free(0)
    with ElasticMBS(model, micro_batch_size=256, memory=MemoryOptions(monitor_interval=0)) as mbs:
        result = mbs.backward(
            lambda piece: loss_of(model, piece), batch_on(torch.device("cpu"), 256)
        )
        found = mbs.headroom
        assert isinstance(found, Headroom)
        assert found.free == simulation.free(1)
    assert result.ooms
    assert off_by(model, reference) <= 1e-12
    assert torch.cuda.memory_reserved(first) == 0
    assert simulation.free(0) == untouched
    assert torch.cuda.current_device() == 0


def test_a_model_on_the_second_device_recovers_there_and_leaves_the_first_alone(
    apart: Callable[..., None],
) -> None:
    apart(use_the_second, SIMCUDA_DEVICES=2)


def use_both(line: Callable[[object], None]) -> None:
    first, second = nn.Linear(6, 4).double().to("cuda:0"), nn.Linear(4, 1).double().to("cuda:1")

    def loss_fn(piece: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden = first(piece.to("cuda:0"))
        last = second(hidden.to("cuda:1"))
        return last.square().mean(), [hidden, last]

    x = pairs()[0]
    with elastic(nn.Sequential(first, second), micro_batch_size=4) as mbs:
        outputs = mbs.backward(loss_fn, x).outputs
    with torch.no_grad():
        expected = first(x.to("cuda:0"))
        assert torch.equal(outputs[0], expected.cpu())
        assert torch.equal(outputs[1], second(expected.to("cuda:1")).cpu())


def test_outputs_of_two_devices_come_to_the_host(apart: Callable[..., None]) -> None:
    apart(use_both, SIMCUDA_DEVICES=2)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_release_gives_back_what_the_allocator_has_cached(
    simulation: Simulation, gradients: bool
) -> None:
    model, batch = wide(DEVICE), batch_on(DEVICE, 256)
    torch.cuda.empty_cache()
    with elastic(model, micro_batch_size=64, outputs="device") as mbs:
        mbs.backward(lambda piece: (loss_of(model, piece), model.first(piece[0])), batch)
        outputs = sum(each.nbytes for each in [mbs.last_result.outputs])  # type: ignore[union-attr]
        reserved, free = torch.cuda.memory_reserved(DEVICE), simulation.free()
        cached = reserved - torch.cuda.memory_allocated(DEVICE)
        grads = sum(leaf.nbytes for leaf in model.parameters())
        freed = mbs.release(gradients=gradients)
        assert cached > 64 * MEBI
        assert freed >= 0.95 * (cached + outputs + (grads if gradients else 0))
        assert freed == reserved - torch.cuda.memory_reserved(DEVICE)
        assert freed == simulation.free() - free  # another process can have them
        reference = by_hand(model, batch, ((0, 256),))
        mbs.backward(lambda piece: loss_of(model, piece), batch)
    assert off_by(model, reference) <= 1e-12


def share(line: Any, seed: int) -> None:
    """Train as one of two on a device that has room for one and a half."""
    torch.manual_seed(seed)
    host = torch.device("cpu")
    model, batch = Wide(16384).double(), batch_on(host, 128, seed)
    reference = [
        None if grad is None else grad.to(DEVICE)
        for grad in whole_gradient(model, lambda twin: loss_of(twin, batch))
    ]
    model.to(DEVICE)
    policy = Policy(patience=1, jitter=0.5, cooldown=0.05, min_gain=0.0, seed=seed)
    with ElasticMBS(
        model, micro_batch_size=128, policy=policy, memory=MemoryOptions(monitor_interval=0.02)
    ) as mbs:
        for _ in range(12):
            model.zero_grad()
            mbs.backward(lambda piece: loss_of(model, piece), batch)
            assert off_by(model, reference) <= 1e-12
            time.sleep(0.02)
    line(torch.cuda.memory_stats(DEVICE)["num_ooms"])


def test_two_that_train_on_one_device_both_have_the_exact_gradient(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name, value in {
        "FILE": tmp_path / "devices",
        "TOTAL": 160 * MEBI,
        "CONTEXT": 16 * MEBI,
        "CUBLAS": MEBI,
    }.items():
        monkeypatch.setenv(f"SIMCUDA_{name}", str(value))
    children = [Child("simcuda", share, {"seed": seed}, deadline=120) for seed in (1, 2)]
    ooms = [found for _, found in run_children(children)]
    assert len(ooms) == 2
    assert sum(ooms)


@pytest.mark.parametrize("error", [control.OUT_OF_MEMORY, control.CUBLAS_ALLOC_FAILED])
def test_an_evaluation_survives_an_error_below_the_allocator_wherever_it_strikes(
    simulation: Simulation, error: int
) -> None:
    model, batch = small()
    with torch.no_grad():
        expected = model(batch[0])
    for after in range(60):
        with elastic(model, micro_batch_size=8) as mbs:
            simulation.fail_operation(error, after=after)
            outputs = mbs.evaluate(lambda piece: model(piece[0]), batch, outputs="device")
            simulation.fail_operation(0)
            assert torch.allclose(outputs, expected, rtol=1e-12, atol=0)
            if not mbs.stats.ooms:
                break
    assert 2 <= after < 59


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_a_step_struck_by_the_driver_is_whole_or_can_be_repeated(
    simulation: Simulation, kind: str, scaled: bool
) -> None:
    struck = 0
    for after in range(200):
        model, batch = small()
        twin = copy.deepcopy(model)
        mine, other = (
            torch.optim.AdamW(each.parameters(), lr=0.1, **{kind: True})  # type: ignore[arg-type]
            for each in (model, twin)
        )
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if scaled else None
        events: list[Event] = []
        with elastic(model, micro_batch_size=8, scaler=scaler, on_event=events.append) as mbs:
            mbs.backward(cross_entropy(model), batch)
            events.clear()
            simulation.fail_operation(control.OUT_OF_MEMORY, after=after)
            try:
                mbs.optimizer_step(mine)
            except OptimizerStepError as error:
                assert "CUDA error: out of memory" in str(error)
                assert all(map(torch.equal, model.parameters(), twin.parameters()))
                assert not mine.state
                struck += 1
                mbs.optimizer_step(mine)
        simulation.fail_operation(0)
        cross_entropy(twin)(batch).backward()
        other.step()
        assert all(map(torch.equal, model.parameters(), twin.parameters())), after
        assert same_state(mine.state_dict()["state"], other.state_dict()["state"]), after
        struck += len(events)
        if struck <= after:
            break
    assert struck >= 3
