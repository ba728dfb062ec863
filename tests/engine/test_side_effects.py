"""Side effects of a step: it edits gradients, the batch or outputs, or switches modes.

It can also freeze parameters, or use a graph that is older than the attempt.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import IncompleteBatchError, cut
from elastic_mbs.errors import BatchError, GradientsChangedError, UsageError
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import (
    FailOn,
    cross_entropy,
    elastic,
    grads,
    mlp,
    off_by,
    pairs,
    there,
    through,
    whole_gradient,
)
from tests.helpers.strikes import every_operation


@pytest.mark.parametrize("then", ["goes on", "runs out of memory"])
@pytest.mark.parametrize("edit", ["clip", "zero_grad", "backward"])
def test_gradients_edited_inside_the_block_after_backward_are_refused(
    model: nn.Module, edit: str, then: str
) -> None:
    """An edit moves versions of gradients as commits do, but must not pass for commits."""
    edits: dict[str, Callable[[], object]] = {
        "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
        "zero_grad": model.zero_grad,
        "backward": lambda: next(model.parameters()).square().sum().backward(),
    }
    mbs = elastic(model, micro_batch_size=4)
    for known in range(3):
        for _ in range(known):
            mbs.backward(cross_entropy(model), pairs(8))
            model.zero_grad()
        for last in (4, 8):
            with pytest.raises(GradientsChangedError):
                for micro in mbs.micro_batches(pairs(8)):
                    with micro:
                        micro.backward(cross_entropy(model)(micro.data))
                        if micro.stop == last:
                            edits[edit]()
                            FailOn(*[1] * (then == "runs out of memory"))()
            assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_term_made_before_the_loop_keeps_its_graph_after_a_failure() -> None:
    """A failed attempt loses its own graph; a term from before the loop keeps its graph."""
    model, wanted = mlp(), list[Tensor | None]()

    def ones(batch: Any) -> Tensor:
        return torch.ones(len(batch[1]))

    mbs = elastic(model, micro_batch_size=4, count={"main": ones, "regular": ones})
    for fails in (False, False, True):
        model.zero_grad()
        regular, hook = torch.stack([p.sum() for p in model.parameters()]).sum(), FailOn(1)
        for micro in mbs.micro_batches(pairs(8)):
            with micro:
                scores = model(micro.data[0])
                if fails:
                    scores.register_hook(lambda grad, hook=hook: hook())
                micro.backward(
                    {"main": functional.cross_entropy(scores, micro.data[1]), "regular": regular}
                )
        wanted = wanted or grads(model)
    assert off_by(model, wanted) <= 1e-12


ERRORS: list[Any] = [torch.OutOfMemoryError("CUDA out of memory."), ValueError("of the user's own")]
SWITCHES: dict[str, tuple[Callable[[nn.Module], bool], Callable[[nn.Module, bool], object]]] = {
    "training": (lambda model: model.training, nn.Module.train),
    "gradients": (
        lambda model: torch.is_grad_enabled(),
        lambda model, on: torch.set_grad_enabled(on),
    ),
}


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize(("read", "switch"), SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("error", ERRORS, ids=["replayed", "passed on"])
def test_a_switch_turned_off_for_a_while_is_on_after_a_failure(
    error: Exception, read: Any, switch: Any, first: int
) -> None:
    """A step saves a switch, turns it off, and restores it at its end.

    A failure in between must not make the replay read "off" as the saved state.
    """
    model, fail = (
        nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.1)).double(),
        FailOn(first, error=lambda: error),
    )

    def loss_fn(batch: Any) -> Tensor:
        was = read(model)
        switch(model, False)
        fail()
        switch(model, was)
        return cross_entropy(model)(batch)

    with suppress(ValueError):
        elastic(model, micro_batch_size=4).backward(loss_fn, pairs(8))
    assert read(model)


@pytest.mark.parametrize("error", ERRORS, ids=["replayed", "passed on"])
def test_a_restart_or_an_error_restores_the_modes_of_the_calls_start(
    error: Exception,
) -> None:
    """A restarted batch runs its first piece in the mode of the call's start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    mbs, fail, seen = (
        elastic(model, micro_batch_size=4),
        FailOn(2, error=lambda: error),
        list[bool](),
    )

    def loss_fn(batch: Any) -> Tensor:
        seen.append(model[1].training)
        hidden = model[:2](batch[0])
        model[1].eval()
        hidden.register_hook(lambda grad: fail())  # after the last layer's commit
        loss: Tensor = functional.cross_entropy(model[2](hidden), batch[1])
        return loss

    with suppress(ValueError):
        mbs.backward(loss_fn, pairs(8))
    replayed = mbs.last_result is not None
    assert seen == [True, False, *([True, False, False, False] if replayed else [])]
    assert model[1].training is not replayed


def test_a_replayed_piece_restores_the_modes_of_its_own_start() -> None:
    """A step that switches the mode for good runs only the first piece in the old mode."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    mbs, fail, seen = elastic(model, micro_batch_size=4), FailOn(2), list[bool]()

    def loss_fn(batch: Any) -> Tensor:
        seen.append(model[1].training)
        hidden = model(batch[0])
        model[1].eval()
        fail()
        return functional.cross_entropy(hidden, batch[1])

    mbs.backward(loss_fn, pairs(8))
    assert seen == [True, False, False, False]


def test_a_whole_tensor_of_the_batch_that_is_edited_in_place_is_seen_once() -> None:
    """Pieces share a whole tensor, so later pieces would see the edit of the first."""
    model, (x, y) = mlp(), pairs(8)

    def weighted(of: nn.Module) -> Any:
        def loss_fn(batch: Any) -> Tensor:
            batch["w"].mul_(2)
            each: Tensor = (
                functional.cross_entropy(of(batch["x"]), batch["y"], reduction="none")
                * batch["w"][batch["y"]]
            )
            return each.mean()

        return loss_fn

    def batch() -> dict[str, Tensor]:
        return {"x": x, "y": y, "w": torch.ones(4, dtype=torch.float64)}

    wanted = whole_gradient(model, lambda twin: weighted(twin)(batch()))
    mbs, loss_fn = elastic(model, micro_batch_size=4, dims=cut.whole("w")), weighted(model)
    for _ in range(2):
        with pytest.raises(BatchError, match="work on a copy"):
            mbs.backward(loss_fn, batch())
    assert all(parameter.grad is None for parameter in model.parameters())
    elastic(model, micro_batch_size=8, dims=cut.whole("w")).backward(loss_fn, batch())
    assert off_by(model, wanted) <= 1e-12


def test_outputs_in_one_reused_buffer_are_refused_or_have_every_row() -> None:
    """Outputs on the device are kept as views of the buffer, and the next piece overwrites them."""
    model, buffer, x = (
        nn.Linear(2, 2).double(),
        torch.zeros(8, 2, dtype=torch.float64),
        torch.randn(8, 2, dtype=torch.float64),
    )

    def fn(rows: Tensor) -> Tensor:
        return buffer[: len(rows)].copy_(model(rows))

    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(UsageError, match=r"output\.clone\(\)"):
        mbs.evaluate(fn, x, outputs="device")
    assert torch.equal(mbs.evaluate(fn, x), model(x))


def test_outputs_are_given_once(model: nn.Sequential) -> None:
    """Outputs given to `keep` are not replaced by the outputs of `backward`.

    A second `keep` is refused.
    """
    mbs = elastic(model, micro_batch_size=4)
    for micro in mbs.micro_batches(pairs(8)):
        with micro:
            micro.keep(micro.data[0])
            micro.backward({"loss": cross_entropy(model)(micro.data)})
    assert torch.equal(there(mbs.last_result).outputs, pairs(8)[0])
    with pytest.raises(UsageError, match="has outputs already"):
        for micro in mbs.micro_batches(pairs(8)):
            with micro:
                micro.keep(micro.data[0])
                micro.keep(micro.data[1])


class Bank(nn.Linear):
    """A layer that keeps its inputs, and counts them, until the loss has taken them."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.taken: list[Tensor] = []
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.taken.append(x)
        self.count += 1
        return super().forward(x)


def hung_on_torchs_own() -> tuple[nn.Module, Any]:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model.taken, model.count = [], 0
    model[0].register_forward_hook(lambda module, given, out: model.taken.append(out))
    return model, model


def with_a_parametrization() -> tuple[nn.Module, Any]:
    bank: Any = nn.utils.parametrizations.weight_norm(Bank().double())
    return nn.Sequential(nn.Linear(3, 3).double(), nn.Tanh(), bank), bank


@pytest.mark.parametrize("make", [hung_on_torchs_own, with_a_parametrization])
def test_what_a_piece_fills_and_the_loss_empties_is_empty_after_a_failure(
    make: Callable[[], tuple[nn.Module, Any]],
) -> None:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)

    def trained(faults: tuple[int, ...]) -> tuple[float, list[Tensor], int]:
        torch.manual_seed(0)
        model, holder = make()

        def loss_fn(x: Tensor) -> Tensor:
            out: Tensor = model(x).square().mean() * (1 + holder.count)
            out = out + sum(each.square().mean() for each in holder.taken)
            holder.taken.clear()
            holder.count = 0
            return out

        with elastic(model) as mbs:
            for _ in range(2):  # the third call knows which state changes
                mbs.backward(loss_fn, x)
                model.zero_grad()
            with InjectOOM(at=faults) as inject:
                loss = float(mbs.backward(loss_fn, x))
        return loss, [there(each.grad).clone() for each in model.parameters()], inject.count

    loss, gradients, operations = trained(())
    assert operations > 10
    for place in range(1, operations + 1):
        again, found, _ = trained((place,))
        assert again == pytest.approx(loss, rel=1e-12)
        for one, other in zip(gradients, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_statistics_that_begin_to_move_go_back_with_a_failed_piece() -> None:
    """The module stays in one mode, and eager batch norm does not raise versions of buffers.

    The buffers have to be put back all the same.
    """

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trains = False
            self.register_buffer("running_mean", torch.zeros(4, dtype=torch.float64))
            self.register_buffer("running_var", torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            mean, var = self.buffers()
            return functional.batch_norm(x, mean, var, training=self.trains)

    norm, fail = Norm(), FailOn(7)
    model = nn.Sequential(nn.Linear(6, 4).double(), norm)

    def loss_fn(batch: Any) -> Tensor:
        scores = model(batch[0])
        fail()
        loss: Tensor = functional.cross_entropy(scores, batch[1])
        return loss

    mbs = elastic(model, micro_batch_size=4)
    for norm.trains in (False, False, False, True):
        model.zero_grad()
        mbs.backward(loss_fn, pairs(8))
    twin = Norm()
    twin.trains = True
    for start, stop in there(mbs.last_result).partition:
        twin(model[0](pairs(8)[0][start:stop]))
    torch.testing.assert_close(norm.running_mean, twin.running_mean, rtol=1e-12, atol=0)


# ---------------------------------------------------------------------- frozen parameters


ZEROS = torch.zeros(8, 3, dtype=torch.float64)


def two_networks(*, thawed: bool) -> tuple[nn.ModuleList, Callable[[Tensor], Tensor]]:
    """Return a generator with its judge, and the generator's loss, which freezes the judge.

    With `thawed`, the loss function makes the judge trainable again.
    """
    torch.manual_seed(0)
    generator = nn.Linear(3, 6).double()
    judge = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss_fn(noise: Tensor) -> Tensor:
        judge.requires_grad_(False)
        loss = functional.softplus(-judge(generator(noise))).mean()
        if thawed:
            judge.requires_grad_(True)
        return loss

    return nn.ModuleList([generator, judge]), loss_fn


@pytest.mark.parametrize("known", [0, 3], ids=["first call", "known"])
@pytest.mark.parametrize("thawed", [True, False])
def test_freezing_for_a_while_is_exact_wherever_memory_runs_out(
    door: int, known: int, thawed: bool
) -> None:
    noise = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(inject: InjectOOM) -> tuple[nn.ModuleList, tuple[tuple[int, int], ...]]:
        networks, loss_fn = two_networks(thawed=thawed)
        mbs = elastic(networks, micro_batch_size=4, min_micro_batch_size=4)
        for _ in range(known):
            through(door, mbs, loss_fn, noise)
            networks.zero_grad()
            networks[1].requires_grad_(True)
        with inject:
            result = through(door, mbs, loss_fn, noise)
        assert all(parameter.requires_grad is thawed for parameter in networks[1].parameters())
        assert all(parameter.grad is None for parameter in networks[1].parameters())
        return networks, result.partition

    clean, pieces = run(InjectOOM())
    for inject in every_operation(stride=3):
        networks, partition = run(inject)
        assert partition == pieces
        assert off_by(networks, grads(clean)) <= 1e-12
        for ours, wanted in zip(networks.buffers(), clean.buffers(), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("quantised", [False, True])
def test_an_error_of_the_user_passes_and_leaves_nothing_frozen(door: int, quantised: bool) -> None:
    """A parameter that has become integers cannot be thawed.

    The refusal of torch must not hide the user's error.
    """
    networks, _ = two_networks(thawed=True)

    def loss_fn(noise: Tensor) -> Tensor:
        networks.requires_grad_(False)
        networks[0].weight.data = networks[0].weight.data.to(
            torch.int8 if quantised else torch.float64
        )
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        through(door, elastic(networks, micro_batch_size=4), loss_fn, ZEROS)
    assert [parameter.requires_grad for parameter in networks.parameters()] == [
        not quantised,
        *[True] * 7,
    ]


def test_a_freeze_after_a_loop_left_early_stays() -> None:
    networks, loss_fn = two_networks(thawed=True)
    mbs = elastic(networks, micro_batch_size=4)
    for micro in mbs.micro_batches(ZEROS):
        with micro:
            micro.backward(loss_fn(micro.data))
        break
    networks[0].requires_grad_(False)
    with pytest.raises(IncompleteBatchError):
        mbs.backward(loss_fn, ZEROS)
    assert not networks[0].weight.requires_grad


class Counting(nn.Module):
    """A model that counts the samples that it has seen."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("training", [True, False])
def test_buffers_of_a_piece_stay_if_the_next_fails_before_its_snapshot(
    monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    model, fails = Counting(), FailOn(3)
    mbs, batch = elastic(model, micro_batch_size=2), torch.randn(8, 3)

    def call() -> None:
        mbs.backward(lambda x: model(x).square().mean(), batch) if training else mbs.evaluate(
            model, batch
        )

    call()
    begin = BufferCopies.begin_piece

    def begin_piece(copies: BufferCopies) -> None:
        fails()
        begin(copies)

    monkeypatch.setattr(BufferCopies, "begin_piece", begin_piece)
    call()
    assert model.seen == 16
