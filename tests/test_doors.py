"""Three doors, one engine: what they share, and what each of them is for."""

from __future__ import annotations

import functools
import gc
import json
import random
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import elastic_mbs
from elastic_mbs import (
    ElasticMBS,
    Event,
    MemoryBudget,
    MicroBatchFloorError,
    StepResult,
    UsageError,
    VerifyReport,
    Warned,
    count_tokens,
    elastic_step,
)
from elastic_mbs.join import PerPiece
from elastic_mbs.memory import NoSensor
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import FailOn, Pair, cross_entropy, elastic, grads, loop, mlp, off_by, pairs, whole_gradient

DOORS = [1, 2, 3]
QUIET: dict[str, Any] = {"sensor": NoSensor("no"), "monitor_interval": 0, "wait_for_memory": 0, "seed": 0}


def _through(door: int, model: nn.Module, batch: Pair, **options: Any) -> StepResult:
    if door == 2:

        @elastic_step(model, **{**QUIET, **options})
        def step(b: Pair) -> Tensor:
            loss: Tensor = cross_entropy(model)(b)
            return loss

        return step(batch)
    mbs = ElasticMBS(model, **{**QUIET, **options})
    return mbs.backward(cross_entropy(model), batch) if door == 1 else loop(mbs, cross_entropy(model), batch)


# ---------------------------------------------------------------------- the same through all of them


@pytest.mark.parametrize("fault", [0, 3, 9, 13, 17, 21, 27, 33])
def test_all_doors_give_the_same_gradients_losses_and_partitions(fault: int) -> None:
    batch, seen = pairs(), []
    for door in DOORS:
        model = mlp()
        with InjectOOM(at=[fault]):
            result = _through(door, model, batch, micro_batch_size=4)
        seen.append((grads(model), float(result), result.partition, result.ooms, result.replayed_samples, result.micro_batch_size))
        assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12
    assert seen[0][1:] == seen[1][1:] == seen[2][1:]
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0][0], others[0], strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("returns", ["loss", "tuple", "triple", "object", "dict"])
@pytest.mark.parametrize("door", [1, 3])
def test_losses_and_outputs_are_told_apart(door: int, returns: str) -> None:
    model, batch = mlp(), pairs()

    @dataclass
    class Output:
        loss: Tensor
        logits: Tensor

    def loss_fn(b: Pair) -> Any:
        logits = model(b[0])
        loss = functional.cross_entropy(logits, b[1])
        kinds = {
            "loss": loss,
            "tuple": (loss, logits),
            "triple": (loss, logits, b[1]),
            "object": Output(loss, logits),
            "dict": {"loss": loss, "logits": logits},
        }
        return kinds[returns]

    mbs = elastic(model, micro_batch_size=2)
    outputs = (mbs.backward(loss_fn, batch) if door == 1 else loop(mbs, loss_fn, batch)).outputs
    with torch.no_grad():
        wanted = model(batch[0])
    got = {
        "loss": lambda: wanted,
        "tuple": lambda: outputs,
        "triple": lambda: outputs[0],
        "object": lambda: outputs.logits,
        "dict": lambda: outputs["logits"],
    }[returns]()
    assert torch.allclose(got, wanted, rtol=1e-12)
    assert (outputs is None) == (returns == "loss")
    if returns == "triple":
        assert torch.equal(outputs[1], batch[1])


# ---------------------------------------------------------------------- door 2: the decorator


@pytest.mark.no_oom_injection
def test_the_decorator_passes_other_arguments_and_keeps_the_functions_name() -> None:
    model, seen = mlp(), []

    @elastic_step(model, micro_batch_size=4, **QUIET)
    def train_step(batch: Pair, factor: float, *rest: object, flag: bool = False, **more: object) -> Tensor:
        """Its own words."""
        seen.append((len(batch[0]), factor, rest, flag, more))
        loss: Tensor = cross_entropy(model)(batch) * factor
        return loss

    result = train_step(pairs(), 2.0, "a", flag=True, other=3)
    assert seen == [(4, 2.0, ("a",), True, {"other": 3})] * 2
    assert float(result) == pytest.approx(2 * cross_entropy(model)(pairs()).item())
    assert (train_step.__name__, train_step.__doc__) == ("train_step", "Its own words.")  # type: ignore[attr-defined]  # functools.wraps
    assert isinstance(train_step.mbs, ElasticMBS)
    assert train_step.mbs.last_result is result


@pytest.mark.parametrize("door", [1, 2])
def test_arguments_of_any_name_reach_the_step_function(door: int) -> None:
    """`loss_fn`, `batch` and `self` are names of the engine's own parameters, and may be the user's too."""
    model = mlp()

    def step(piece: Pair, loss_fn: int, batch: int, self: int, fn: int) -> Tensor:
        assert (loss_fn, batch, self, fn) == (1, 2, 3, 4)
        loss: Tensor = cross_entropy(model)(piece)
        return loss

    if door == 1:
        elastic(model, micro_batch_size=4).backward(step, pairs(), loss_fn=1, batch=2, self=3, fn=4)
    else:
        elastic_step(model, micro_batch_size=4, **QUIET)(functools.partial(step, batch=2))(pairs(), loss_fn=1, self=3, fn=4)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(pairs()))) <= 1e-12


class _Trainer:
    def __init__(self, seed: int) -> None:
        self.model = mlp(seed=seed)
        self.fail = FailOn(1)

    @elastic_step(lambda self: self.model, micro_batch_size=4, **QUIET)
    def train_step(self, batch: Pair, factor: float = 1.0) -> Tensor:
        """Its own words."""
        self.fail()
        loss: Tensor = cross_entropy(self.model)(batch) * factor
        return loss


@pytest.mark.no_oom_injection
def test_the_decorator_on_a_method_gives_each_instance_its_own_runtime() -> None:
    batch = pairs()
    first, second = _Trainer(1), _Trainer(2)
    for trainer in (first, second):
        result = trainer.train_step(batch, factor=3.0)
        assert result.ooms == 1
        assert off_by(trainer.model, whole_gradient(trainer.model, lambda net: cross_entropy(net)(batch) * 3.0)) <= 1e-12
    assert _Trainer.train_step.mbs(first) is not _Trainer.train_step.mbs(second)
    assert _Trainer.train_step.mbs(first) is _Trainer.train_step.mbs(first)
    assert _Trainer.train_step.mbs(first).stats.ooms == 1
    assert _Trainer.train_step.__doc__ == "Its own words."


def test_instances_with_a_decorated_method_are_freed() -> None:
    trainer = _Trainer(1)
    trainer.train_step(pairs())
    gone: list[weakref.ref[Any]] = [weakref.ref(trainer), weakref.ref(trainer.model)]
    del trainer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


class _OwnModel(nn.Module):
    """As a LightningModule: the model is the instance itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    @elastic_step(lambda self: self, micro_batch_size=4, **QUIET)
    def train_step(self, batch: Pair) -> Tensor:
        loss: Tensor = cross_entropy(self.net)(batch)
        return loss


def test_instances_that_are_their_own_model_are_freed() -> None:
    model = _OwnModel()
    model.train_step(pairs())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@dataclass
class _DataTrainer:
    """Dataclasses compare by value, so they have no hash."""

    model: nn.Module

    @elastic_step(lambda self: self.model, micro_batch_size=4, **QUIET)
    def train_step(self, batch: Pair) -> Tensor:
        loss: Tensor = cross_entropy(self.model)(batch)
        return loss


class _EqualTrainer(_Trainer):
    """All are equal, and yet each has its own model."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _EqualTrainer)

    def __hash__(self) -> int:
        return 1


@pytest.mark.parametrize("make", [lambda: _DataTrainer(mlp()), lambda: _EqualTrainer(3)])
def test_instances_without_a_hash_or_equal_ones_have_their_own_runtime(make: Any) -> None:
    batch = pairs()
    first, second = make(), make()
    for trainer in (first, second):
        trainer.train_step(batch)
        assert off_by(trainer.model, whole_gradient(trainer.model, lambda net: cross_entropy(net)(batch))) <= 1e-12
    assert type(first).train_step.mbs(first) is not type(first).train_step.mbs(second)


def test_a_sequence_of_modules_is_one_step() -> None:
    encoder, decoder = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
    batch = pairs()
    both = nn.Sequential(encoder, decoder)
    wanted = whole_gradient(both, lambda net: cross_entropy(net)(batch))
    for n in (0, 4, 9, 13, 19):
        both.zero_grad()
        step = elastic_step([encoder, decoder], micro_batch_size=4, **QUIET)(cross_entropy(both))
        with InjectOOM(at=[n]):
            step(batch)
        assert off_by(both, wanted) <= 1e-12


def test_functools_partial_and_callable_objects_are_step_functions() -> None:
    model, batch = mlp(), pairs()

    def scaled(b: Pair, factor: float) -> Tensor:
        loss: Tensor = cross_entropy(model)(b) * factor
        return loss

    class Step:
        def __call__(self, b: Pair) -> Tensor:
            return scaled(b, 2.0)

    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch) * 2)
    for fn in (functools.partial(scaled, factor=2.0), Step()):
        model.zero_grad()
        elastic(model, micro_batch_size=2).backward(fn, batch)
        assert off_by(model, wanted) <= 1e-12


# ---------------------------------------------------------------------- enabled=False


@pytest.mark.parametrize("door", DOORS)
def test_disabled_runs_the_batch_whole_and_catches_nothing(door: int) -> None:
    model, batch = mlp(), pairs()
    oom = torch.OutOfMemoryError("CUDA out of memory.")
    result = _through(door, model, batch, micro_batch_size=2, enabled=False)
    assert result.partition == ((0, 8),)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) == 0
    assert float(result) == cross_entropy(model)(batch).item()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _through(door, _Raising(oom), batch, enabled=False)
    assert caught.value is oom
    assert getattr(oom, "__notes__", []) == []


class _Raising(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


def test_disabled_leaves_no_hooks_no_thread_and_no_guard() -> None:
    import threading

    model, batch = mlp(), pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    threads = threading.active_count()
    with ElasticMBS(model, enabled=False) as mbs:
        assert threading.active_count() == threads

        def loss_fn(b: Pair) -> Tensor:
            optimizer.step()
            cross_entropy(model)(b).backward()
            loss: Tensor = cross_entropy(model)(b)
            return loss

        mbs.backward(loss_fn, batch)
        assert not [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]


def test_disabled_still_gives_outputs_totals_callbacks_and_uses_scaler_and_backward() -> None:
    model, batch, log = mlp(), pairs(), []
    mbs = elastic(model, enabled=False, scaler=torch.amp.GradScaler("cpu", init_scale=4.0), reduction="sum")
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.on_commit(lambda: log.append("committed"))
            assert micro.total == 8
            assert (micro.start, micro.stop, len(micro)) == (0, 8, 8)
            assert micro.data is batch
            micro.backward((cross_entropy(model)(micro.data), batch[0]))
    assert log == ["committed"]
    assert mbs.last_result is not None
    assert torch.equal(mbs.last_result.outputs, batch[0])
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch) * 4)
    assert off_by(model, wanted) <= 1e-12
    model.zero_grad()
    calls: list[Tensor] = []
    elastic(model, enabled=False, backward=calls.append).backward(cross_entropy(model), batch)
    assert len(calls) == 1
    assert torch.equal(elastic(model, enabled=False).eval(model, batch[0]), model(batch[0]).detach())


def test_disabled_knows_the_total_inside_the_step_function() -> None:
    """A `loss_fn` that normalises by itself has to work with the switch off too."""
    model, batch = mlp(), pairs()
    mbs = elastic(model, enabled=False, reduction="sum")
    mbs.backward(lambda b: functional.cross_entropy(model(b[0]), b[1], reduction="sum") / mbs.total, batch)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12


class _Unknown:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def test_disabled_takes_batches_that_could_not_be_cut() -> None:
    """With nothing to cut there is nothing to refuse."""
    model, batch = mlp(), pairs()
    elastic(model, enabled=False).backward(lambda b: cross_entropy(model)((b.x, b.y)), _Unknown(*batch))
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12


# ---------------------------------------------------------------------- lifetime, state, statistics


@pytest.mark.parametrize("door", [1, 3])
def test_works_without_a_with_block_and_after_it(door: int) -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, micro_batch_size=4)
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    for use in ("without", "inside", "after", "inside again"):
        model.zero_grad()
        with InjectOOM(at=[17]):
            if use.startswith("inside"):
                with mbs:
                    loop(mbs, cross_entropy(model), batch) if door == 3 else mbs.backward(cross_entropy(model), batch)
            else:
                loop(mbs, cross_entropy(model), batch) if door == 3 else mbs.backward(cross_entropy(model), batch)
        assert off_by(model, wanted) <= 1e-12
    with mbs:
        pass
    assert not [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]


@pytest.mark.no_oom_injection
def test_what_was_learned_survives_a_round_trip_through_json() -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, micro_batch_size=8)
    fail = FailOn(1)

    def loss_fn(b: Pair) -> Tensor:
        fail()
        loss: Tensor = cross_entropy(model)(b)
        return loss

    assert mbs.backward(loss_fn, batch).micro_batch_size == 4
    state = json.loads(json.dumps(mbs.state_dict()))
    fresh = elastic(model, micro_batch_size=8)
    fresh.load_state_dict(state)
    assert _without_clock(fresh.state_dict()) == _without_clock(mbs.state_dict()) == _without_clock(state)
    result = fresh.backward(loss_fn, batch)
    assert (result.micro_batch_size, result.ooms) == (4, 0)


def _without_clock(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in track.items() if key != "cooldown_left"} for track in state["controller"]["tracks"]]


@pytest.mark.no_oom_injection
def test_statistics_and_the_last_result_tell_what_happened() -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, micro_batch_size=4)
    assert mbs.last_result is None
    fail = FailOn(3)

    def loss_fn(b: Pair) -> Tensor:
        fail()
        loss: Tensor = cross_entropy(model)(b)
        return loss

    first = mbs.backward(loss_fn, batch)
    assert mbs.last_result is first
    second = loop(mbs, loss_fn, batch)
    assert mbs.last_result is second
    stats = mbs.stats
    assert (stats.calls, stats.samples, stats.pieces, stats.ooms, stats.replayed_samples) == (2, 16, 2 + 4, 1, 4)
    assert stats.sizes == {4: 1, 2: 1}
    stats.sizes.clear()
    assert mbs.stats.sizes == {4: 1, 2: 1}, "a copy"


def test_events_of_two_runtimes_are_told_apart_by_name() -> None:
    events = list[Event]()
    for name in ("generator", "critic"):
        model = mlp()
        with InjectOOM(at=[12]):
            elastic(model, micro_batch_size=4, name=name, on_event=events.append).backward(cross_entropy(model), pairs())
    assert [event.name for event in events if type(event).__name__ == "OutOfMemory"] == ["generator", "critic"]


@pytest.mark.no_oom_injection
def test_the_budget_around_a_runtime_is_found_by_itself() -> None:
    model, batch = mlp(width=64), pairs(64)
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    with MemoryBudget("1GiB", track=(model, batch)) as budget:
        budget.limit = budget.live + 60_000
        with ElasticMBS(model, wait_for_memory=0) as mbs:
            result = mbs.backward(cross_entropy(model), batch)
            assert isinstance(mbs._parts.monitor.poll(), elastic_mbs.Headroom)
    assert budget.ooms == result.ooms
    assert off_by(model, wanted) <= 1e-12
    assert result.micro_batch_size < 64


# ---------------------------------------------------------------------- eval


@pytest.mark.parametrize("fault", [0, 1, 2, 4, 5])
def test_eval_joins_outputs_without_gradients_and_survives_out_of_memory(fault: int) -> None:
    model, batch = mlp(), pairs()
    model.eval()
    with torch.no_grad():
        wanted = model(batch[0])
    modes: list[bool] = []

    def fn(b: Pair, factor: float, *, shift: float) -> dict[str, Any]:
        modes.append(torch.is_grad_enabled())
        return {"logits": model(b[0]) * factor + shift, "size": len(b[0]), "first": b[1][:1]}

    mbs = elastic(model, micro_batch_size=4)
    with InjectOOM(at=[fault]):
        outputs = mbs.eval(fn, batch, 2.0, shift=1.0)
    assert torch.allclose(outputs["logits"], wanted * 2 + 1, rtol=1e-12)
    assert not outputs["logits"].requires_grad
    assert modes == [False] * len(modes)
    assert sum(outputs["size"]) == 8
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())
    assert mbs.last_result is None


def test_failures_in_eval_are_in_the_statistics() -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, micro_batch_size=4)
    with InjectOOM(at=[2]):
        mbs.eval(lambda b: model(b[0]), batch)
    assert mbs.stats.ooms == 1


def test_eval_of_a_piece_that_gives_nothing_gives_nothing() -> None:
    assert elastic(mlp(), micro_batch_size=4).eval(lambda b: None, pairs()) is None


def test_what_eval_gives_does_not_depend_on_the_split() -> None:
    model, batch = mlp(), pairs(8)

    def fn(b: Pair) -> dict[str, Any]:
        logits = model(b[0])
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, b[1]), "hits": (logits.argmax(1) == b[1]).sum(), "rows": b[1].tolist()}

    whole, split = (elastic(model, micro_batch_size=size, grow=False).eval(fn, batch) for size in (8, 3))
    assert torch.allclose(whole["logits"], split["logits"], rtol=1e-12)
    assert whole["rows"] == split["rows"]
    assert [type(whole[key]) for key in ("loss", "hits")] == [type(split[key]) for key in ("loss", "hits")] == [PerPiece, PerPiece]
    assert torch.allclose(whole["loss"].mean(), split["loss"].mean(), rtol=1e-12)
    assert whole["hits"].sum() == split["hits"].sum()


@pytest.mark.no_oom_injection
def test_outputs_of_eval_that_would_fill_the_device_fit_on_the_host() -> None:
    model, batch = mlp(), torch.ones(64, 6, dtype=torch.float64)

    def fn(b: Tensor) -> Tensor:
        logits: Tensor = model(b)
        return logits.repeat(1, 256)  # 8 KiB a sample, 512 KiB in all

    with MemoryBudget("1MiB", track=(model, batch)) as budget:
        mbs = elastic(model, micro_batch_size=4, grow=False)
        budget.limit = budget.live + 160 * 2**10
        outputs = mbs.eval(fn, batch, to="cpu")
        assert outputs.shape == (64, 1024)
        assert mbs.stats.ooms == 0
        with pytest.raises(MicroBatchFloorError):
            mbs.eval(fn, batch)
        budget.limit = budget.live + 700 * 2**10  # the pieces fit, and what they are joined to does not
        with pytest.raises(MicroBatchFloorError, match=r'no room to join the outputs on the device \(to="cpu" keeps them on the host\)'):
            mbs.eval(fn, batch)
    for bad in (None, "gpu"):
        with pytest.raises(UsageError, match="cpu"):
            mbs.eval(fn, batch, to=bad)  # type: ignore[arg-type]  # the mistake


@pytest.mark.no_oom_injection
def test_evaluation_fits_more_than_training_and_has_sizes_of_its_own() -> None:
    model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))), torch.ones(64, 64)
    with MemoryBudget("4MiB", track=(model, batch)) as budget:
        mbs = ElasticMBS(model, monitor_interval=0)
        budget.limit = budget.live + 330 * 2**10
        trained = mbs.backward(lambda b: model(b).pow(2).mean(), batch)
        mbs.eval(lambda b: model(b).mean(1), batch)
        mbs.eval(lambda b: model(b).mean(1), batch)
        sizes = {key.mode: track.size for key, track in mbs._parts.controller._tracks.items()}
    assert max(stop - start for start, stop in trained.partition) < 64  # the whole batch does not fit with its graph
    assert sizes["eval"] > sizes["train"]


# ---------------------------------------------------------------------- verify


def _tokens() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()
    labels = torch.randint(0, 11, (8, 5))
    for row, keep in enumerate((5, 1, 2, 4, 3, 2, 2, 5)):
        labels[row, keep:] = -100
    return model, {"input_ids": torch.randint(0, 11, (8, 5)), "labels": labels}


def _language(model: nn.Module) -> Any:
    return lambda b: functional.cross_entropy(model(b["input_ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100)


def _says(report: VerifyReport, *words: str) -> bool:
    return any(all(word in finding for word in words) for finding in report.findings)


def test_verify_is_content_with_what_is_right() -> None:
    model, batch = _tokens()
    report = elastic(model, count=count_tokens("labels")).verify(_language(model), batch)
    assert report.ok
    assert report.findings == ()
    assert report.whole == pytest.approx(report.split, rel=1e-12)
    assert str(report).startswith("ok: loss")
    report.raise_if_wrong()
    plain = mlp()
    assert elastic(plain).verify(cross_entropy(plain), pairs()).ok
    assert elastic(plain, reduction="sum").verify(lambda b: functional.cross_entropy(plain(b[0]), b[1], reduction="sum"), pairs()).ok


def test_verify_names_a_missing_count() -> None:
    model, batch = _tokens()
    report = elastic(model).verify(_language(model), batch)
    assert not report.ok
    assert _says(report, "count=count_tokens('labels')")
    with pytest.raises(UsageError, match="WRONG"):
        report.raise_if_wrong()


def test_verify_names_a_sum_where_a_mean_was_said_and_the_reverse() -> None:
    model = mlp()
    report = elastic(model).verify(lambda b: functional.cross_entropy(model(b[0]), b[1], reduction="sum"), pairs())
    assert not report.ok
    assert _says(report, "is a sum", "reduction='sum'")
    report = elastic(model, reduction="sum").verify(cross_entropy(model), pairs())
    assert not report.ok
    assert _says(report, "is a mean", "reduction='mean'")


def test_verify_names_a_regulariser_under_a_sum() -> None:
    model = mlp()

    def loss_fn(b: Pair) -> Tensor:
        regulariser = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        return functional.cross_entropy(model(b[0]), b[1], reduction="sum") + 0.1 * regulariser

    report = elastic(model, reduction="sum").verify(loss_fn, pairs())
    assert not report.ok
    size = 0.1 * sum(p.square().sum().item() for p in model.parameters())
    assert _says(report, f"{size:.6g}", "once per piece")


def test_verify_names_a_loss_that_compares_samples() -> None:
    model = mlp()

    def contrastive(b: Pair) -> Tensor:
        features = functional.normalize(model(b[0]), dim=1)
        return functional.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)))

    report = elastic(model).verify(contrastive, pairs())
    assert not report.ok
    assert _says(report, "compares samples", "contrastive")


def test_verify_names_randomness_that_is_not_rolled_back() -> None:
    model, own = mlp(), random.Random(0)

    def loss_fn(b: Pair) -> Tensor:
        loss: Tensor = cross_entropy(model)(b) * own.random()
        return loss

    assert _says(elastic(model).verify(loss_fn, pairs()), "generators=")
    model_with_own = elastic(model, generators=[own]).verify(loss_fn, pairs())
    assert model_with_own.ok


def test_verify_mentions_batch_norm_without_calling_it_wrong() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    report = elastic(model).verify(cross_entropy(model), pairs())
    assert report.ok
    assert _says(report, "BatchNorm")


def test_verify_names_the_loss_among_several() -> None:
    model = mlp()

    def losses(b: Pair) -> dict[str, Tensor]:
        return {"good": cross_entropy(model)(b), "bad": functional.cross_entropy(model(b[0]), b[1], reduction="sum")}

    report = elastic(model, count={"good": None, "bad": None}).verify(losses, pairs())
    assert not report.ok
    assert _says(report, "'bad'", "sum")
    assert not _says(report, "'good'")


def test_verify_works_for_a_loss_that_reads_the_total() -> None:
    model = mlp()
    mbs = elastic(model, reduction="sum")
    report = mbs.verify(lambda b: functional.cross_entropy(model(b[0]), b[1], reduction="sum") / mbs.total, pairs())
    assert report.ok


@pytest.mark.no_oom_injection
def test_verify_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    model[1].eval()
    batch = pairs()

    def loss_fn(b: Pair) -> Tensor:
        model.get_buffer("1.running_mean").add_(1.0)
        noise = torch.rand(()) + random.random() + np.random.rand()  # the legacy stream is what is rolled back
        loss: Tensor = cross_entropy(model)(b) + 0 * noise
        return loss

    before = [p.clone() for p in model.parameters()], [b.clone() for b in model.buffers()]
    modes = [module.training for module in model.modules()]
    streams = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    mbs = elastic(model, micro_batch_size=4)
    mbs.verify(loss_fn, batch)
    assert all(torch.equal(a, b) for a, b in zip([*before[0], *before[1]], [*model.parameters(), *model.buffers()], strict=True))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1:] == (random.getstate(), repr(np.random.get_state()))
    assert all(p.grad is None for p in model.parameters())
    assert mbs.stats.calls == 0
    model.zero_grad()
    assert mbs.backward(cross_entropy(model), batch).partition == ((0, 4), (4, 8))


def test_verify_puts_everything_back_when_the_loss_fails() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    model.train()

    def loss_fn(b: Pair) -> Tensor:
        model.get_buffer("0.running_mean").add_(1.0)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        elastic(model).verify(loss_fn, pairs())
    assert model.training
    assert all(module.training for module in model.modules())
    assert not bool(model.get_buffer("0.running_mean").any())


def test_labels_to_be_ignored_without_a_count_are_warned_of_once() -> None:
    model, batch = _tokens()
    events = list[Event]()
    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    for _ in range(3):
        mbs.backward(_language(model), batch)
    warnings = [event for event in events if isinstance(event, Warned)]
    assert len(warnings) == 1
    assert "count=count_tokens('labels')" in warnings[0].message
    events.clear()
    elastic(model, micro_batch_size=4, on_event=events.append, count=count_tokens("labels")).backward(_language(model), batch)
    assert not [event for event in events if isinstance(event, Warned)]


def test_everything_in_the_design_is_public() -> None:
    for name in (
        "ElasticMBS",
        "elastic_step",
        "StepResult",
        "MemoryBudget",
        "count_tokens",
        "register_splitter",
        "whole",
        "Headroom",
        "Unavailable",
        "MemorySensor",
    ):
        assert hasattr(elastic_mbs, name)
        assert name in elastic_mbs.__all__
    assert [name for name in elastic_mbs.__all__ if not hasattr(elastic_mbs, name)] == []
