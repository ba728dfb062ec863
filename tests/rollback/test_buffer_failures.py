"""Failures while buffers are copied or put back: a rollback afterwards is right."""

import copy
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import MemoryBudget, ReplayUnsafeError
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import FailOn, Pair, assert_as_by_hand, cross_entropy, elastic, pairs
from tests.helpers.strikes import AtLine, Everywhere, every_operation, until_clean


class Codebook(nn.Module):
    """A module that changes buffers in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: Tensor
        for name in ("counted", "replaced", "silent", "mask"):
            self.register_buffer(name, torch.zeros(6, dtype=torch.float64))
        self.register_buffer("transposed", torch.zeros(3, 2, dtype=torch.float64).t())
        self.register_buffer("learned", torch.zeros(1, dtype=torch.float64, requires_grad=True))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.get_buffer("counted").add_(1)
        self.get_buffer("transposed").add_(1)
        self.get_buffer("learned").detach().add_(1)
        self.replaced = self.replaced + x.detach().mean(0)
        if self.training:
            self.get_buffer("silent").data.add_(1)
        return x + self.replaced


class Normalised(nn.Module):
    """Running statistics that a user wrote: a new tensor each time, and a count beside it.

    They were once taken for torch's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running_mean: Tensor
        self.register_buffer("running_mean", torch.zeros(6, dtype=torch.float64))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.running_mean = 0.5 * self.running_mean + 0.5 * x.detach().mean(0) * self.seen
        return x - self.running_mean


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(6, 6)),
        nn.BatchNorm1d(6),
        Codebook(),
        Normalised(),
        nn.Linear(6, 4),
    ).double()


def state(model: nn.Sequential) -> list[object]:
    return [
        model[2].seen,
        model[3].seen,
        *((name, buffer.tolist()) for name, buffer in model.named_buffers()),
    ]


class Run:
    """A call by hand, with a failing attempt at its second piece."""

    def __init__(self, *, known: bool) -> None:
        self.model, self.x, self.copies = net(), pairs(8)[0], BufferCopies()
        self.modules = list(self.model.modules())
        if known:
            self.first_piece()
        self.start = state(self.model)

    def first_piece(self) -> list[object]:
        """Run the first piece; return the state after it."""
        self.copies.begin_call(self.modules, "f")
        self.model(self.x)
        self.copies.end_clean_piece()
        return state(self.model)

    def check(self, *, to_call_start: bool, wanted: list[object]) -> None:
        self.model(-self.x)
        assert self.copies.restore(to_call_start=to_call_start) is None
        assert state(self.model) == wanted


@pytest.mark.parametrize("known", [False, True])
def test_a_snapshot_that_runs_out_of_memory_leaves_the_rollback_right(
    known: bool,
) -> None:
    # After a failure between two copies, a rollback put the other buffers back to the call's start
    # without an error.
    for strike in until_clean(lambda n: Everywhere(at=[n]), least=4):
        run = Run(known=known)
        with strike, suppress(torch.OutOfMemoryError):
            run.copies.begin_call(run.modules, "f")
        assert run.copies.restore(to_call_start=False) is None
        assert state(run.model) == run.start
        run.copies.begin_call(run.modules, "f")
        run.check(to_call_start=False, wanted=run.start)
    for strike in until_clean(lambda n: Everywhere(at=[n]), least=4):
        run = Run(known=known)
        between = run.first_piece()
        with strike, suppress(torch.OutOfMemoryError):
            run.copies.begin_piece()
        if strike.hits:
            assert run.copies.restore(to_call_start=False) is None
            assert state(run.model) == between
            run.copies.begin_piece()
        run.check(to_call_start=False, wanted=between)
        run.check(to_call_start=True, wanted=run.start)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("to_call_start", [False, True])
def test_a_rollback_takes_no_memory_and_can_be_repeated_after_a_failure(
    known: bool, to_call_start: bool
) -> None:
    for strike in until_clean(lambda n: Everywhere(at=[n]), least=6):
        run = Run(known=known)
        between = run.first_piece()
        run.copies.begin_piece()
        run.model(-run.x)
        with strike, suppress(torch.OutOfMemoryError):
            run.copies.restore(to_call_start=to_call_start)
        with InjectOOM(always_from=1):
            assert run.copies.restore(to_call_start=to_call_start) is None
        assert state(run.model) == (run.start if to_call_start else between)


@pytest.mark.parametrize("known", [False, True])
def test_an_interrupt_at_any_line_leaves_the_rollback_right(known: bool) -> None:
    for strike in until_clean(
        lambda n: AtLine(n, "rollback/buffers.py", "rollback/places.py", "rollback/attributes.py"),
        stride=23,
        least=50,
    ):
        run, begun = Run(known=known), False
        with strike, suppress(KeyboardInterrupt):
            run.copies.begin_call(run.modules, "f")
            begun = True
            run.model(run.x)
            run.copies.end_clean_piece()
            run.copies.begin_piece()
            run.model(run.x)
            run.copies.restore(to_call_start=False)
        if begun:
            run.copies.restore(to_call_start=True)
        assert state(run.model) == run.start, strike.hits
        between = run.first_piece()
        run.copies.begin_piece()
        run.check(to_call_start=False, wanted=between)
        run.check(to_call_start=True, wanted=run.start)


@pytest.mark.parametrize("calls", [1, 2])
def test_buffers_are_those_of_committed_pieces_wherever_memory_runs_out(calls: int) -> None:
    batch = pairs(8)
    for inject in every_operation(stride=5, least=40):
        model = net()
        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
        loss_fn = cross_entropy(model)
        mbs.evaluate(model.eval(), batch[0])  # does not show the changes of training mode
        model.train()
        for _ in range(calls - 1):
            mbs.backward(loss_fn, batch)
        model.zero_grad()
        twin = net()
        twin.load_state_dict(model.state_dict())
        twin[2].seen, twin[3].seen = model[2].seen, model[3].seen
        with inject:
            result = mbs.backward(loss_fn, batch)
        assert_as_by_hand(model, twin, result, batch[0])


class Replacing(nn.Module):
    """A module whose forward replaces a BatchNorm's running mean, or the memory under it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        norm = self.net[1]
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_mean is not None
        if self.way == "tensor":
            norm.running_mean = norm.running_mean + 1
        elif self.way == "memory":
            norm.running_mean.data = norm.running_mean + 1
        return out


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("way", ["tensor", "memory"])
def test_running_statistics_that_a_forward_replaces_are_put_back(way: str, early: bool) -> None:
    batch = pairs(16)
    for at in range(3, 100, 6):
        torch.manual_seed(0)
        model = Replacing(way if early else "not yet").double()
        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
        loss_fn = cross_entropy(model)
        for _ in range(2):
            mbs.backward(loss_fn, batch)
        model.way = way
        for _ in range(2):
            model.zero_grad()
            twin = copy.deepcopy(model)
            with InjectOOM(at=[at]):
                result = mbs.backward(loss_fn, batch)
            assert_as_by_hand(model, twin, result, batch[0])


def test_statistics_are_put_back_when_a_step_begins_to_train_batch_norm() -> None:
    # The calls begin in eval mode. A forward of BatchNorm raises the version of the count alone.
    batch, recovered = pairs(12), 0
    for at in range(1, 50, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double().eval()
        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
        begun = [False]

        def loss_fn(
            piece: Pair, model: nn.Module = model, begun: list[bool] = begun
        ) -> torch.Tensor:
            model.train(begun[0])
            return cross_entropy(model)(piece)

        for _ in range(3):
            mbs.backward(loss_fn, batch)
        model.zero_grad()
        begun[0], twin = True, copy.deepcopy(model)
        try:
            with InjectOOM(at=[at]):
                result = mbs.backward(loss_fn, batch)
        except ReplayUnsafeError:
            continue
        recovered += result.ooms
        assert_as_by_hand(model, twin.train(), result, batch[0])
    assert recovered


class Table(nn.Module):
    """A layer beside a large buffer, which it changes or not."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.moves = nn.Linear(8, 8), moves
        self.register_buffer("table", torch.zeros(100_000, 8))

    def forward(self, x: Tensor) -> Tensor:
        table = self.get_buffer("table")
        if self.moves:
            table.add_(1.0)
        out: Tensor = self.layer(x) + table[: x.shape[1]].clone()
        return out


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("room", [1.2, 2.0, 2.05, 3.0, 3.05])
@pytest.mark.parametrize("moves", [False, True])
def test_a_buffer_needs_no_more_room_than_in_a_plain_loop(moves: bool, room: float) -> None:
    # Copies that the device had no room for ended training, in the first call or at the floor.
    model, x = Table(moves=moves), torch.randn(64, 16, 8)
    table, fail = model.get_buffer("table"), FailOn(3)

    def loss_fn(piece: Tensor) -> Tensor:
        loss: Tensor = model(piece).square().mean()
        fail()
        return loss

    with MemoryBudget(int(table.nbytes * room), track=(model, x)) as budget:
        mbs, pieces = elastic(model), 0
        for _ in range(4):
            result = mbs.backward(loss_fn, x)
            pieces += len(result.partition)
            model.zero_grad()
        assert budget.peak <= table.nbytes * room
    assert fail.count > 3
    assert table.unique().tolist() == [float(pieces * moves)]
