"""`backward_embeddings` with all options and ways in, its events, and its ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import (
    CallDone,
    ElasticMBS,
    Event,
    MicroBatchFloorError,
    OutOfMemory,
    Policy,
)
from elastic_mbs.errors import LossError, MisuseError, ReplayUnsafeError
from elastic_mbs.testing import InjectOOM
from stress.reference.state import error_of
from tests.helpers.contrast import Contrast, samples
from tests.helpers.steps import FailOn, elastic, grads, mlp, off_by
from tests.helpers.strikes import every_operation

EXACT = 1e-12


@pytest.mark.parametrize("by", ["scaler", "backward", "wide", "noise", "disabled"])
def test_options_and_other_doors_give_the_same_gradient(by: str) -> None:
    case, x = Contrast(), samples(8)
    wanted = case.by_hand(x)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ways: dict[str, dict[str, Any]] = {
        "scaler": {"scaler": scaler},
        "backward": {"backward": torch.autograd.backward},
        "wide": {"accumulate_dtype": torch.float64},
        "noise": {"noise_scale": 5},
        "disabled": {"enabled": False},
    }
    options = ways.get(by, {})
    result = elastic(case.model, micro_batch_size=3, **options).backward_embeddings(
        case.embed, case.over, x
    )
    if by == "scaler":
        scaler.unscale_(torch.optim.SGD(case.leaves, 0.1))
    assert off_by(case.leaves, wanted) <= EXACT
    assert float(result) == pytest.approx(case.over(case.embed(x)).item(), rel=EXACT), (
        "the loss is not scaled"
    )
    assert result.noise_scale is None, (
        "a piece has no loss of its own, so its gradient says nothing of the noise"
    )


class Late(Contrast):
    """A case that uses the temperature, and a module outside the model, from some call on."""

    def __init__(self, *, with_tail: bool) -> None:
        super().__init__(nn.Dropout(0.2))
        self.tail = nn.Linear(4, 4).double()
        self.with_tail = with_tail
        self.late = False

    @property
    def leaves(self) -> list[Tensor]:
        return [*super().leaves, *self.tail.parameters()]

    def embed(self, x: Tensor) -> Tensor:
        z = super().embed(x)
        return self.tail(z) if self.late and self.with_tail else z

    def over(self, z: Tensor) -> Tensor:
        return super().over(z) if self.late else (z @ z.T).tril(-1).exp().mean()


@pytest.mark.parametrize("there", [(), ("temperature",), ("tail",)])
@pytest.mark.parametrize("with_tail", [False, True])
def test_a_late_leaf_is_exact_or_refused(there: tuple[str, ...], with_tail: bool) -> None:
    x, exact, refused = samples(8), 0, 0
    for first in range(2, 200, 7):
        case = Late(with_tail=with_tail)
        mbs = elastic(case.model, micro_batch_size=3)
        for _ in range(2):
            mbs.backward_embeddings(case.embed, case.over, x)
        case.zero()
        case.late = True
        full = [case.temperature] if "temperature" in there else []
        full += case.tail.parameters() if "tail" in there else []
        for leaf in full:
            leaf.grad = torch.ones_like(leaf)
        before = torch.get_rng_state()
        try:
            with InjectOOM(at=[first, first + 9]) as inject:
                result = mbs.backward_embeddings(case.embed, case.over, x)
        except ReplayUnsafeError:
            assert all(leaf.grad is not None for leaf in full), "the user's gradient is lost"
            refused += 1
            continue
        found = grads(case.leaves)
        case.zero()
        for leaf in full:
            leaf.grad = torch.ones_like(leaf)
        torch.set_rng_state(before)
        case.over(
            torch.cat([case.embed(x[start:stop]) for start, stop in result.partition])
        ).backward()
        assert error_of(found, grads(case.leaves)) <= EXACT
        exact += 1
        if not inject.hits:
            break
    assert exact
    assert bool(refused) == (with_tail and "tail" in there)


@pytest.mark.no_oom_injection
def test_a_scaler_is_used_once_whatever_fails() -> None:
    """The scaler is applied to the loss over the embeddings, and nowhere else."""
    x = samples(8)
    for inject in every_operation(stride=11):
        case, scaler = Contrast(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        wanted = case.by_hand(x)
        with inject:
            elastic(case.model, micro_batch_size=4, scaler=scaler).backward_embeddings(
                case.embed, case.over, x
            )
        scaler.unscale_(torch.optim.SGD(case.leaves, 0.1))
        assert off_by(case.leaves, wanted) <= EXACT, inject.hits


def test_a_gradient_that_half_precision_would_lose_is_scaled_in_the_loss() -> None:
    model, x = mlp(), samples(8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    def over(z: Tensor) -> Tensor:
        return (z.float() @ z.float().T).mean() * 1e-9

    over(model(x)).backward()
    wanted = grads(model)
    model.zero_grad()
    elastic(model, micro_batch_size=3, scaler=scaler).backward_embeddings(
        lambda b: model(b).half(), over, x
    )
    scaler.unscale_(torch.optim.SGD(model.parameters(), 0.1))
    assert off_by(model, wanted) < 1e-2


# ---------------------------------------------------------------------- events and ends


@pytest.mark.no_oom_injection
def test_a_call_is_reported_once_with_its_failures() -> None:
    case, x, events = Contrast(nn.Dropout(0.4)), samples(8), list[Event]()
    mbs = elastic(
        case.model, micro_batch_size=4, on_event=events.append, count=lambda b: [1, 2] * 4
    )
    result = mbs.backward_embeddings(
        case.embed_failing(FailOn(4)), lambda z: (case.over(z), {"z": z, "total": mbs.total}), x
    )
    mbs.close()
    done = [event for event in events if isinstance(event, CallDone)]
    assert [(each.samples, each.pieces, each.ooms, each.replayed_samples) for each in done] == [
        (8, 4, 1, 16)
    ]
    assert done[0].loss == pytest.approx(float(result), rel=EXACT)
    assert [(each.phase, each.mode) for each in events if isinstance(each, OutOfMemory)] == [
        ("forward", "step")
    ]
    assert (mbs.stats.calls, mbs.stats.samples, mbs.stats.pieces, mbs.stats.ooms) == (1, 8, 4, 1)
    assert result is mbs.last_result
    assert result.outputs["z"].shape == (8, 4)
    assert not result.outputs["z"].requires_grad
    assert result.outputs["total"] == 8, (
        "the counts of a mean over samples mean nothing to a loss over embeddings"
    )
    assert (
        elastic(case.model, outputs=None)
        .backward_embeddings(case.embed, lambda z: (case.over(z), z), x)
        .outputs
        is None
    )


@pytest.mark.no_oom_injection
def test_the_size_grows_back_and_serves_both_passes() -> None:
    case, x = Contrast(nn.Dropout(0.1)), samples(8)
    mbs = ElasticMBS(case.model, micro_batch_size=8, policy=Policy(patience=1, jitter=0.0))
    with InjectOOM(at=[1]):
        assert mbs.backward_embeddings(case.embed, case.over, x).micro_batch_size == 4
    assert list(mbs.stats.sizes) == [4]
    assert [key for key in mbs.size_models if "embed" in key] == list(mbs.size_models), (
        "one track, of the function that embeds"
    )


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("layers", [(), (nn.Dropout(0.4),)], ids=["split", "bound"])
def test_a_second_pass_that_never_fits_ends_soon(layers: tuple[nn.Module, ...]) -> None:
    case, x = Contrast(*layers), samples(8)

    def embed(b: Tensor) -> Tensor:
        z = case.embed(b)
        if torch.is_grad_enabled():
            z.register_hook(lambda grad: FailOn(1)())  # after the first commits
        return z

    with pytest.raises(MicroBatchFloorError, match="a micro-batch of 1"):
        elastic(case.model, micro_batch_size=4).backward_embeddings(embed, case.over, x)
    assert len(case.sizes) < 60
    assert off_by(case.leaves, [None] * len(case.leaves)) == 0


# ---------------------------------------------------------------------- once, where it fits


@pytest.mark.no_oom_injection
def test_a_batch_that_fits_is_embedded_once_and_twice_only_after_a_failure() -> None:
    case, x = Contrast(nn.Dropout(0.3)), samples(8)
    mbs = elastic(case.model)
    for _ in range(2):
        mbs.backward_embeddings(case.embed, case.over, x)
        assert case.sizes == [8, -8]
        case.zero()
    for number, inject in enumerate(every_operation(stride=7)):
        fresh = Contrast(nn.Dropout(0.3), nn.BatchNorm1d(4))
        mbs, full = elastic(fresh.model), number % 2 == 1
        if full:
            for leaf in fresh.leaves:
                leaf.grad = torch.full_like(leaf, 3.0)
        torch.manual_seed(7)
        with inject:
            result = mbs.backward_embeddings(fresh.embed, fresh.over, x)
        found = [leaf.grad - 3.0 * full for leaf in fresh.leaves if leaf.grad is not None]
        twin = Contrast(nn.Dropout(0.3), nn.BatchNorm1d(4))
        torch.manual_seed(7)
        wanted = twin.by_hand(x, result.partition)
        assert error_of(list(found), wanted) <= 1e-11, inject.hits
        buffers = zip(fresh.model.buffers(), twin.model.buffers(), strict=True)
        assert all(torch.allclose(a, b, rtol=EXACT) for a, b in buffers)
        if not inject.hits:
            assert len(result.partition) == 1


class Hidden:
    """A generator that cannot be found: it is among too many other things."""

    def __init__(self) -> None:
        self.many: list[Any] = [None] * 200 + [torch.Generator().manual_seed(3)]

    def draw(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=like.dtype, generator=self.many[-1])


@pytest.mark.parametrize("piece", [0, 1])
@pytest.mark.parametrize("found", [False, True])
def test_a_generator_that_draws_from_the_second_call_on_is_found_or_noticed(
    found: bool, piece: int
) -> None:
    # Only the first piece of the first call was compared.
    case, x, hidden, own, late = Contrast(), samples(8), Hidden(), torch.Generator(), [False]

    def embed(rows: Tensor) -> Tensor:
        if late[0] and torch.equal(rows, x[4 * piece : 4 * piece + 4]):
            noise = torch.randn(rows.shape, dtype=rows.dtype, generator=own)
            rows = rows + (noise if found else hidden.draw(rows))
        return case.embed(rows)

    mbs = elastic(case.model, micro_batch_size=4)
    mbs.backward_embeddings(embed, case.over, x)
    case.zero()
    late[0] = True
    before = own.get_state()
    if not found:
        with pytest.raises(ReplayUnsafeError, match="gave other embeddings"):
            mbs.backward_embeddings(embed, case.over, x)
        assert all(leaf.grad is None for leaf in case.leaves)
        return
    mbs.backward_embeddings(embed, case.over, x)
    got = grads(case.leaves)
    case.zero()
    own.set_state(before)
    case.over(torch.cat([embed(x[:4]), embed(x[4:])])).backward()
    assert error_of(got, grads(case.leaves)) <= EXACT


@pytest.mark.parametrize("size", [4, 8])
def test_a_loss_that_moves_state_of_its_own_is_refused_whether_the_batch_is_split(
    size: int,
) -> None:
    case, x = Contrast(), samples(8)
    queue = nn.Module()
    queue.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def over(z: Tensor) -> Tensor:
        queue.get_buffer("seen").add_(1)
        return case.over(z)

    with pytest.raises(MisuseError, match="changed a buffer"):
        elastic(case.model, micro_batch_size=size).backward_embeddings(case.embed, over, x)
    assert queue.get_buffer("seen") == 0
    assert all(leaf.grad is None for leaf in case.leaves)


@pytest.mark.parametrize("size", [4, 8])
def test_a_loss_that_does_not_depend_on_the_embeddings_is_refused(size: int) -> None:
    case = Contrast()
    mbs = elastic(case.model, micro_batch_size=size)
    with pytest.raises(LossError, match="does not depend on the embeddings"):
        mbs.backward_embeddings(case.embed, lambda z: case.temperature.square(), samples(8))
    case.model.requires_grad_(False)
    with pytest.raises(LossError, match="are its parameters frozen"):
        elastic(case.model, micro_batch_size=size).backward_embeddings(
            case.embed, case.over, samples(8)
        )


class Criterion(nn.Module):
    """A loss with state of every kind: a schedule, a centre, a list, a table edited in place."""

    def __init__(self, case: Contrast, *, edits: bool = True) -> None:
        super().__init__()
        self.case, self.edits = case, edits
        self.step, self.log = 0, list[int]()
        self.centre = torch.zeros(4, dtype=torch.float64)
        self.table = torch.zeros(4, dtype=torch.float64)

    def forward(self, z: Tensor) -> Tensor:
        """Return the loss, and move the state."""
        self.step += 1
        self.log.append(self.step)
        loss = self.case.over((z - self.centre - self.table) * (1 + self.step))
        self.centre = self.centre * 0.9 + z.detach().mean(0) * 0.1
        if self.edits:
            self.table.add_(z.detach().mean(0))
        return loss

    def is_as(self, other: Criterion) -> bool:
        """Return whether the state is that of another one."""
        return (
            [self.step, self.log] == [other.step, other.log]
            and torch.allclose(self.centre, other.centre, rtol=EXACT)
            and torch.allclose(self.table, other.table, rtol=EXACT)
        )


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_state_that_the_loss_moves_is_as_by_hand_whether_the_batch_is_split(
    size: int, given: bool
) -> None:
    case, hand, x = Contrast(), Contrast(), samples(8)
    loss_fn, by_hand = Criterion(case), Criterion(hand)
    model = nn.ModuleList([case.model, loss_fn]) if given else case.model
    mbs = elastic(model, micro_batch_size=size)
    for _ in range(3):
        case.zero()
        hand.zero()
        result = mbs.backward_embeddings(case.embed, loss_fn, x)
        wanted = by_hand(hand.embed(x))
        wanted.backward()
        assert float(result) == pytest.approx(wanted.item(), rel=EXACT)
        assert off_by(case.leaves, grads(hand.leaves)) <= EXACT
        assert loss_fn.is_as(by_hand)


@pytest.mark.no_oom_injection
def test_state_that_the_loss_moves_is_moved_once_whatever_fails() -> None:
    x = samples(8)
    for inject in every_operation(stride=5):
        case, hand = Contrast(), Contrast()
        loss_fn, by_hand = Criterion(case, edits=False), Criterion(hand, edits=False)
        with inject:
            elastic(case.model).backward_embeddings(case.embed, loss_fn, x)
        by_hand(hand.embed(x)).backward()
        assert off_by(case.leaves, grads(hand.leaves)) <= EXACT, inject.hits
        assert loss_fn.is_as(by_hand), inject.hits


@pytest.mark.parametrize("edits", [True, False])
def test_a_loss_that_runs_again_begins_with_the_state_that_it_had(edits: bool) -> None:
    case, x, fails = Contrast(), samples(8), FailOn(1)
    loss_fn = Criterion(case, edits=edits)

    def over(z: Tensor) -> Tensor:
        loss: Tensor = loss_fn(z)
        fails()
        return loss

    mbs = elastic(case.model, micro_batch_size=4)
    if edits:
        with pytest.raises(ReplayUnsafeError, match=r"Criterion\.table in place"):
            mbs.backward_embeddings(case.embed, over, x)
        assert loss_fn.is_as(Criterion(case))
        return
    mbs.backward_embeddings(case.embed, over, x)
    assert [loss_fn.step, loss_fn.log] == [1, [1]]


@pytest.mark.parametrize("size", [3, 4, 8])
def test_outputs_that_need_no_gradient_are_handed_on_without_one(size: int) -> None:
    case, x = Contrast(), samples(8)
    weights = torch.rand(8, dtype=torch.float64)

    def embed(piece: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return piece[1], case.embed(piece[0])

    def over(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        each, z = found
        scale = torch.from_numpy(each.numpy() * 2)
        return case.over(z * scale[:, None]), each.sum()

    wanted = over(embed((x, weights)))[0]
    wanted.backward()
    gradient = grads(case.leaves)
    case.zero()
    mbs = elastic(case.model, micro_batch_size=size)
    result = mbs.backward_embeddings(embed, over, (x, weights))
    assert float(result) == pytest.approx(wanted.item(), rel=EXACT)
    assert off_by(case.leaves, gradient) <= EXACT
    assert torch.allclose(result.outputs, weights.sum(), rtol=EXACT)


def test_an_output_with_a_graph_in_later_pieces_alone_is_refused() -> None:
    case, x = Contrast(), samples(8)

    def embed(piece: Tensor) -> tuple[Tensor, Tensor]:
        z = case.embed(piece)
        return z, z.detach() if torch.equal(piece[0], x[0]) else z * 2

    with pytest.raises(LossError, match="without one for the first piece"):
        elastic(case.model, micro_batch_size=4).backward_embeddings(
            embed, lambda found: case.over(found[0] + found[1]), x
        )
    assert all(leaf.grad is None for leaf in case.leaves)
