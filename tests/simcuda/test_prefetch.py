"""A batch in pinned memory: the next piece is copied while this one computes, exactly.

The simulated CUDA lets such a copy arrive no earlier than the streams and events demand, so that a
stream that does not wait computes with something else.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import Event, OutOfMemory, cut, register_splitter
from elastic_mbs.batch import transfer
from elastic_mbs.batch.containers import splitters
from elastic_mbs.dispatch import VersionedMode, run
from elastic_mbs.engine import edits
from elastic_mbs.testing import InjectOOM
from stress.limits.simcuda import Simulation, control
from tests.helpers.room import MEBI, Room
from tests.helpers.steps import (
    Pair,
    cross_entropy,
    elastic,
    loop,
    mlp,
    off_by,
    pairs,
    through,
    whole_gradient,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take batches for large ones: of a small one the first call makes copies, none is ahead."""
    monkeypatch.setattr(edits, "SMALL", 0)
    monkeypatch.setattr(transfer, "SMALL", 0)


def pinned(n: int = 8) -> Pair:
    x, y = pairs(n)
    return x.pin_memory(), y.pin_memory()


def on_device() -> tuple[nn.Module, list[Tensor | None]]:
    """Return a model, and the whole gradient of `pairs()`."""
    model, batch = mlp(), pairs()
    return model.to(DEVICE), [
        None if grad is None else grad.to(DEVICE)
        for grad in whole_gradient(mlp(), lambda twin: cross_entropy(twin)(batch))
    ]


class Queued(VersionedMode):
    """A log of the work put into each stream, in order.

    An entry is "copy" or "product", the stream, and the number of waits of one stream for another
    that had been queued by then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.main = torch.cuda.current_stream()
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name
        copies = (
            name in {"aten::copy_", "aten::_to_copy"}
            and args[1 if name == "aten::copy_" else 0].device.type == "cpu"
        )
        kind = "product" if name == "aten::addmm" else "copy" if copies else ""
        if kind:
            stream = "main" if torch.cuda.current_stream() == self.main else "side"
            self.seen.append((kind, stream, Simulation().calls("cudaStreamWaitEvent")))
        return run(func, args, kwargs)


def see_the_order(line: Callable[[object], None]) -> None:
    transfer.SMALL = 0  # in a process of its own
    model, wanted = on_device()
    batch, simulation = pinned(), Simulation()
    mbs = elastic(model, micro_batch_size=2)
    for _ in range(2):
        mbs.backward(cross_entropy(model), batch)
    model.zero_grad()
    torch.cuda.synchronize()
    start, waits = simulation.calls("cudaStreamWaitEvent"), simulation.waits()
    with Queued() as queued:
        mbs.backward(cross_entropy(model), batch)
    assert simulation.waits() == waits
    assert not torch.cuda.current_stream().query()  # the device is behind all of it
    seen = [(kind, stream, asked - start) for kind, stream, asked in queued.seen]
    first, products = [("copy", "main", 0)] * 2, 2
    expected = list(first)
    for i in range(4):  # of 2 samples each
        if i < 3:
            expected += [("copy", "side", 2 * i + 1)] * 2  # it has waited for the memory
        # it has waited for its own piece's copies
        expected += [("product", "main", min(2 * i + 1, 6))] * products
    assert seen == expected
    assert off_by(model, wanted) <= 1e-12


def test_the_next_piece_is_copied_ahead_and_the_host_does_not_wait(
    apart: Callable[..., None],
) -> None:
    apart(see_the_order, SIMCUDA_LAG_US=2000)


class Samples:
    """A type of the user's."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def as_pair(piece: Any) -> Pair:
    if isinstance(piece, Samples):
        return piece.x, piece.y
    if isinstance(piece, dict):
        # an edit of one, which is a copy, must not reach the other
        assert piece["scale"] is not piece["again"]
        return piece["x"].T.contiguous() * piece["scale"], piece["y"]
    return (torch.stack(piece[0]), torch.stack(piece[1])) if isinstance(piece[0], list) else piece


BATCHES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensors": lambda x, y: (x, y),
    "labels on the device": lambda x, y: (x, y.to(DEVICE)),
    "not all pinned": lambda x, y: (x, y.clone()),
    "rows of a wider tensor": lambda x, y: (torch.cat([x, x], 1).pin_memory()[:, :6], y),
    "lists": lambda x, y: ([row.pin_memory() for row in x], [row.pin_memory() for row in y]),
    "dim 1 and whole": lambda x, y: (
        {"x": x.T.contiguous().pin_memory(), "y": y}
        | dict.fromkeys(("scale", "again"), torch.ones(1).pin_memory())
    ),
    "a user's type": Samples,
    "pageable": lambda x, y: (x.clone(), y.clone()),
}


@pytest.mark.parametrize("prefetch", [True, "pin", False])
@pytest.mark.parametrize("kind", BATCHES)
def test_any_batch_has_its_exact_gradient(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, kind: str, prefetch: bool | str
) -> None:
    monkeypatch.setitem(splitters, Samples, None)  # put back at the end
    register_splitter(
        Samples,
        length=lambda obj: len(obj.y),
        slice=lambda obj, start, stop: Samples(obj.x[start:stop], obj.y[start:stop]),
        tensors=lambda obj: [obj.x, obj.y],
        move=lambda obj, fn: Samples(fn(obj.x), fn(obj.y)),
    )
    model, wanted = on_device()
    batch = BATCHES[kind](*pinned())
    dims: Any = (
        {"x": 1} | cut.whole("scale", "again")
        if kind.startswith("dim")
        else cut.items("0", "1")
        if kind == "lists"
        else None
    )
    mbs = elastic(model, micro_batch_size=3, prefetch=prefetch, dims=dims)
    for door in (1, 3):
        before = simulation.calls("cudaStreamWaitEvent")
        through(door, mbs, lambda piece: cross_entropy(model)(as_pair(piece)), batch)
        assert off_by(model, wanted) <= 1e-12
        model.zero_grad()
        assert (simulation.calls("cudaStreamWaitEvent") > before) == (
            prefetch == "pin" or (bool(prefetch) and kind != "pageable")
        )
        assert not mbs.stats.ooms


@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize("fault", ["allocator", "driver"])
def test_out_of_memory_at_any_operation_leaves_the_exact_gradient(
    simulation: Simulation, fault: str, door: int
) -> None:
    model, wanted = on_device()
    batch = pinned()
    struck = 0
    for after in range(300):
        mbs = elastic(model, micro_batch_size=4 if after % 2 else 2)
        model.zero_grad()
        if fault == "driver":
            simulation.fail_operation(control.OUT_OF_MEMORY, after=after)
        with InjectOOM(at=[after + 1] if fault == "allocator" else []) as injected:
            result = through(door, mbs, cross_entropy(model), batch)
        simulation.fail_operation(0)
        assert off_by(model, wanted) <= 1e-12, after
        struck += bool(result.ooms)
        if injected.count <= after and not result.ooms:
            break
    assert 30 < struck < 299


def test_no_small_piece_is_copied_ahead(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = on_device()
    batch = pinned()
    half = sum(each.nbytes for each in batch) // 2
    for small, copied in ((half, True), (half + 1, False)):
        monkeypatch.setattr(transfer, "SMALL", small)
        before = simulation.calls("cudaStreamWaitEvent")
        elastic(model, micro_batch_size=4).backward(cross_entropy(model), batch)
        assert (simulation.calls("cudaStreamWaitEvent") > before) == copied


class NoCopies(InjectOOM):
    """A device with room for everything but the copies made ahead."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def step(self, name: str) -> None:
        if name == "aten::empty_like":
            self.hits.append(name)
            raise self.error


@pytest.mark.parametrize(
    ("error", "ooms"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), 0),
        # this one could be an operation's of the piece before, whose gradient is wrong then
        (RuntimeError("CUDA error: out of memory"), 1),
    ],
)
def test_no_room_for_the_next_piece_ends_prefetching_for_this_call(
    simulation: Simulation, error: Exception, ooms: int
) -> None:
    model, wanted = on_device()
    mbs = elastic(model, micro_batch_size=2)
    for _ in range(2):
        model.zero_grad()
        with NoCopies(error) as full:
            result = mbs.backward(cross_entropy(model), pinned())
        assert full.hits == ["aten::empty_like"]
        assert result.ooms == ooms
        assert off_by(model, wanted) <= 1e-12


def test_memory_of_a_dropped_copy_is_not_used_before_the_copy_is_done(
    simulation: Simulation,
) -> None:
    model, wanted = on_device()
    batch = pinned()
    tries: list[int] = []

    def loss_fn(piece: Pair) -> Tensor:
        tries.append(len(piece[1]))
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        # one of them is where the next piece was to arrive
        mine = [torch.full_like(piece[0], i) for i in range(4)]
        torch.cuda.synchronize()
        assert all(bool((each == i).all()) for i, each in enumerate(mine))
        return cross_entropy(model)(piece)

    elastic(model, micro_batch_size=4).backward(loss_fn, batch)
    assert tries == [4, 2, 2, 2, 2]
    assert off_by(model, wanted) <= 1e-12


class Sums(nn.Module):
    """Large inputs, and no other tensor that is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum(1).mean()


def run_ahead(line: Callable[[object], None]) -> None:
    """Train on a device far behind the host, where memory that waits for an event would lack."""
    model, batch = Sums().to(DEVICE), torch.ones(8, MEBI // 8, dtype=torch.float64).pin_memory()
    at_oom: list[int] = []

    def heard(event: Event) -> None:
        if isinstance(event, OutOfMemory):
            at_oom.append(torch.cuda.memory_allocated())

    def peak(prefetch: bool) -> int:
        mbs = elastic(model, micro_batch_size=1, prefetch=prefetch)
        loop(mbs, model, batch)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loop(mbs, model, batch)
        assert torch.cuda.memory_allocated() == before
        # with what waits for an event
        return int(torch.cuda.memory_stats()["active_bytes.all.peak"]) - before

    assert 0.99 * MEBI <= peak(True) - peak(False) <= MEBI  # one sample
    model.zero_grad()
    torch.cuda.synchronize()
    held, failed = torch.cuda.memory_allocated(), [False]

    def fails(piece: Tensor) -> Any:
        if not failed[0]:
            failed[0] = True
            assert torch.cuda.memory_allocated() >= held + 2 * MEBI
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return model(piece)

    elastic(model, micro_batch_size=1, on_event=heard).backward(fails, batch)
    assert at_oom == [held]
    mbs = elastic(model, micro_batch_size=1)
    with pytest.raises(ValueError, match="mine"):
        mbs.backward(lambda piece: int("mine"), batch)
    model.zero_grad()
    assert torch.cuda.memory_allocated() == held


def test_at_most_one_more_piece_is_on_the_device(
    apart: Callable[..., None],
) -> None:
    apart(run_ahead, SIMCUDA_LAG_US=2000)


def test_where_the_smallest_piece_fits_only_alone_it_runs_alone_from_then_on(
    simulation: Simulation,
) -> None:
    model, batch = Sums().to(DEVICE), torch.ones(6, 4 * MEBI, dtype=torch.float64).pin_memory()
    wanted: list[Tensor | None] = [torch.tensor(4.0 * MEBI, dtype=torch.float64, device=DEVICE)]
    with Room(DEVICE, model) as room:
        alone = room.need(
            lambda: elastic(model, micro_batch_size=1, prefetch=False).backward(model, batch)
        )
        model.zero_grad()
        room.allow(alone + 16 * MEBI)
        mbs = elastic(model, micro_batch_size=1)
        ooms = []
        for _ in range(3):
            model.zero_grad()
            ooms.append(mbs.backward(model, batch).ooms)
            assert off_by(model, wanted) <= 1e-12
    assert ooms == [1, 0, 0]
