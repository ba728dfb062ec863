"""The figures of a MemoryBudget."""

import contextlib
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from elastic_mbs.errors import UsageError
from elastic_mbs.memory import Headroom, MemoryBudget, MemorySensor, Usage, UsageMeter, parse_bytes

KIB = 1024
MIB = 1024**2


def block(kib: int = 1) -> Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (7, 7),
        ("7", 7),
        ("7 B", 7),
        ("2KiB", 2048),
        ("2 GiB", 2 * 1024**3),
        ("1.5MiB", 3 * 512 * 1024),
        ("1_000kb", 10**6),
        ("3GB", 3 * 10**9),
        ("1tib", 1024**4),
    ],
)
def test_sizes_are_read_as_people_write_them(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "wrong", [-1, True, 1.5, None, "", "GiB", "-1MiB", "2G", "2 parsecs", "1e3", "1..5MiB"]
)
def test_a_size_that_cannot_be_read_is_named(wrong: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{wrong!r}" if wrong != -1 else "-1 bytes")):
        parse_bytes(wrong)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: torch.zeros(3, 5), 60),
        (lambda: torch.empty(2, 3, dtype=torch.bool), 6),
        (lambda: torch.empty(0), 0),
        (lambda: torch.empty(4, 4).t(), 64),
        (lambda: torch.empty(1).expand(1000), 4),
        (lambda: torch.empty(10)[3:5], 40),
        (lambda: torch.empty(10, 4).split(2), 160),
        (lambda: torch.empty(2, 4).max(dim=1), 8 + 16),
        (lambda: (torch.empty(4), [torch.empty(2), {"x": torch.empty(1)}]), 28),
        (lambda: torch.zeros(2).resize_(100), 400),
        # seen at the next operation that touches it
        (lambda: [x := block(4), x.untyped_storage().resize_(KIB), x.resize_(9).zero_()][0], KIB),
        (lambda: torch.empty(8, device="meta"), 0),
    ],
)
def test_live_is_the_bytes_of_the_storages(make: Callable[[], Any], size: int) -> None:
    with MemoryBudget(MIB) as budget:
        kept = make()
        assert budget.live == size
        del kept
        assert budget.live == 0


@pytest.mark.parametrize(
    "layout",
    [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_count_with_their_indices_and_values(layout: torch.layout) -> None:
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    dense = torch.eye(4)
    with MemoryBudget(MIB, track=dense) as budget:
        sparse = dense.to_sparse(layout=layout, blocksize=blocks)
        if layout is torch.sparse_coo:
            parts = [sparse._indices(), sparse._values()]
        elif layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [sparse.crow_indices(), sparse.col_indices(), sparse.values()]
        else:
            parts = [sparse.ccol_indices(), sparse.row_indices(), sparse.values()]
        assert budget.live == 64 + sum(part.untyped_storage().nbytes() for part in parts)
        del sparse, parts
        assert budget.live == 64


def test_a_wrapper_subclass_counts_through_the_tensors_inside_it() -> None:
    a, b = torch.ones(8), torch.ones(8)
    with MemoryBudget(MIB) as outer, MemoryBudget(MIB) as inner:
        pair = TwoTensor(a, b)
        double = pair * 2
        for budget in (outer, inner):
            assert budget.live == 4 * 32
        del double
        assert inner.live == outer.live == 2 * 32
    assert MemoryBudget(MIB, track=[pair]).live == 2 * 32


def test_tensors_without_memory_of_their_own_are_ignored() -> None:
    dense = torch.ones(4, 4)
    with MemoryBudget(KIB, track=dense) as budget:
        opaque = dense.to_mkldnn()
        assert budget.live == 64
        assert torch.equal(opaque.to_dense(), dense)
        with FakeTensorMode() as fakes:
            assert (torch.empty(10**9) * 2).shape == (10**9,)
        budget.track(fakes.from_tensor(dense))
        assert budget.live == 64


def test_another_device_is_not_counted() -> None:
    with MemoryBudget(10, device="cuda") as budget, MemoryBudget(MIB, device="meta") as meta:
        torch.ones(1000)
        kept = torch.empty(100, device="meta")
        assert meta.live == 400
        del kept
    assert (budget.live, budget.peak, budget.ooms) == (0, 0, 0)
    assert budget.covers(torch.device("cuda:3"))
    assert not MemoryBudget(10, device="cuda:1").covers(torch.device("cuda:3"))


def test_tensors_that_were_not_tracked_are_counted_when_seen_and_do_not_raise() -> None:
    a, b, c, x = block(1), block(2), block(4), block(8)
    with MemoryBudget(MIB) as budget:
        torch.cat([a, b])
        assert budget.live == 3 * KIB, "in a list"
        torch.bitwise_not(c, out=c)
        assert budget.live == 7 * KIB, "by a keyword"
    with MemoryBudget("4KiB") as budget:
        assert budget.live == 0
        view = x[:10]
        assert budget.live == budget.peak == 8 * KIB
        view.add_(1)
        with pytest.raises(torch.OutOfMemoryError):
            block()
        del x, view
        assert budget.live == 0
        block()


def test_an_operation_that_writes_a_list_and_one_tensor_runs() -> None:
    # a GradScaler's unscale_: its first argument is a list, and what it writes beside that list
    # comes second
    grads, found, scale = [torch.ones(4)], torch.zeros(()), torch.full((), 0.5)
    with MemoryBudget("1MiB"):
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
    assert grads[0].sum() == 2


def test_track_knows_modules_optimizers_gradients_and_containers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sizes = 4 * (16 + 4 + 4 + 4) + 4 * (4 + 4) + 8
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    grads = 4 * (16 + 4 + 4 + 4)
    state = 2 * grads + 4 * 4  # two moments, and one step count for each parameter
    extra = torch.ones(10)
    assert MemoryBudget(MIB, track=model).live == sizes + grads
    assert (
        MemoryBudget(MIB, track=(model, optimizer, {"x": [extra, (extra,)]})).live
        == sizes + grads + state + 40
    )
    assert MemoryBudget(MIB, track={"x": extra}).live == MemoryBudget(MIB, track={extra}).live == 40
    budget = MemoryBudget(0)
    budget.track(model, model, optimizer)
    assert budget.live == budget.peak == sizes + grads + state
    assert budget.ooms == 0
    with pytest.raises(UsageError, match="cannot track 'str'"):
        MemoryBudget(MIB, track=["model"])


def test_track_keeps_no_reference() -> None:
    model = nn.Linear(4, 4)
    budget = MemoryBudget(MIB, track=[model])
    gone = weakref.ref(model)
    assert budget.live > 0
    del model
    gc.collect()
    assert gone() is None
    assert budget.live == 0


def test_readings_take_what_is_missing_from_the_limit_for_a_co_tenant() -> None:
    budget = MemoryBudget("10KiB", clock=lambda: 42.0)
    with budget:
        x = block(3)
        assert budget.read() == Headroom(7 * KIB, 10 * KIB, 0, "budget", 42.0)
        budget.limit = "2KiB"
        reading = budget.read()
        assert reading == Headroom(0, 10 * KIB, 8 * KIB, "budget", 42.0)
        assert isinstance(reading, Headroom)
        assert reading.capacity == 2 * KIB
        budget.limit = "20KiB"
        assert budget.read() == Headroom(17 * KIB, 20 * KIB, 0, "budget", 42.0)
        assert budget.usage() == Usage(3 * KIB, 3 * KIB, 3 * KIB, 3 * KIB, 0)
        del x
    assert isinstance(budget, MemorySensor)
    assert isinstance(budget, UsageMeter)


class Allocator:
    """The budget's behaviour in plain numbers: slots look into blocks, blocks have sizes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.peak, self.ooms, self.blocks = limit, 0, 0, 0
        self.looks: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

    @property
    def live(self) -> int:
        return sum(self.sizes[key] for key in set(self.looks.values()))

    def fits(self, new: int) -> bool:
        """Return whether `new` bytes more may be live for a moment."""
        if new > 0 and self.live + new > self.limit:
            self.ooms += 1
            return False
        self.peak = max(self.peak, self.live + new)
        return True

    def new(self, slot: int, size: int) -> bool:
        if fits := self.fits(size):
            self.blocks += 1
            self.looks[slot], self.sizes[self.blocks] = self.blocks, size
        return fits

    def resize(self, slot: int, size: int) -> None:
        key = self.looks[slot]
        # torch never shrinks a storage in resize_, and one that is enlarged in place is not refused
        self.sizes[key] = max(size, self.sizes[key])
        self.peak = max(self.peak, self.live)


STEP = st.tuples(
    st.sampled_from(["new", "free", "resize", "view", "inplace", "copy"]),
    st.integers(0, 5),
    st.integers(0, 40),
)


@settings(max_examples=100)
@example(steps=[("new", 0, 0), ("resize", 0, 1), ("new", 0, 0)], limit=0)
@given(steps=st.lists(STEP, max_size=40), limit=st.integers(0, 200))
def test_live_peak_and_errors_equal_a_model_of_the_allocator(
    steps: list[tuple[str, int, int]], limit: int
) -> None:
    slots: dict[int, Tensor] = {}
    model = Allocator(limit)

    def act(action: str, slot: int, other: int, size: int) -> bool:
        """Do the same to both; return whether the model says that it fits."""
        fits = True
        if action == "free":
            slots.pop(slot, None)
            model.looks.pop(slot, None)
        elif slot not in slots or action == "new":
            fits = model.new(slot, size)
            slots[slot] = torch.empty(size, dtype=torch.uint8)
        elif action == "view":
            slots[other], model.looks[other] = slots[slot][:], model.looks[slot]
        elif action == "copy":
            fits = model.new(other, slots[slot].numel())
            slots[other] = slots[slot].clone()
        elif action == "inplace":
            slots[slot].add_(1)
        else:
            model.resize(slot, size)
            slots[slot].resize_(size)
        return fits

    with MemoryBudget(limit) as budget:
        for action, slot, size in steps:
            with contextlib.suppress(torch.OutOfMemoryError):
                assert act(action, slot, (slot + 1) % 6, size), (
                    "the budget let an allocation pass that the model refuses"
                )
            assert (budget.live, budget.ooms) == (model.live, model.ooms)
        assert budget.peak == model.peak
        slots.clear()
        assert budget.live == 0
