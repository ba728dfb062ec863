from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_mbs.errors import MisuseError
from elastic_mbs.memory import MemoryBudget, sensor_for

KIB = 1024
MIB = 1024**2


def block(kib: int = 1) -> Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_a_budget_is_entered_once_at_a_time() -> None:
    budget = MemoryBudget(MIB)
    with budget, pytest.raises(MisuseError, match="already active in this thread"):
        budget.__enter__()
    with budget:  # one after the other is fine
        kept = block()
    beside = block(4)
    assert budget.live == KIB, "after the block nothing new is counted, and the old is followed"
    del kept, beside
    assert budget.live == 0
    with pytest.raises(MisuseError, match="not active in this thread"):
        budget.__exit__(None, None, None)


def test_budgets_nest_and_both_count() -> None:
    assert MemoryBudget.current() is None
    with MemoryBudget("8KiB") as outer:
        x = block(2)
        with MemoryBudget("4KiB") as inner:
            assert MemoryBudget.current() is inner
            y = block(3)
            assert (outer.live, inner.live) == (5 * KIB, 3 * KIB)
            with pytest.raises(torch.OutOfMemoryError, match=r"Budget 4\.0 KiB"):
                block(2)
            outer.limit = "5KiB"
            with pytest.raises(torch.OutOfMemoryError, match=r"Budget 5\.0 KiB"):
                block(1)
            assert (outer.live, inner.live) == (5 * KIB, 3 * KIB)
        assert MemoryBudget.current() is outer
        assert (outer.ooms, inner.ooms) == (1, 1)
        del x, y
        assert outer.live == inner.live == 0
    assert MemoryBudget.current() is None


def test_a_budget_is_the_sensor_and_meter_of_its_device() -> None:
    with MemoryBudget(MIB) as budget:
        assert sensor_for("cpu") == (budget, budget)
        assert sensor_for("cuda")[0] is not budget
    with MemoryBudget(MIB, device="cuda") as virtual:
        assert sensor_for("cuda:0") == (virtual, virtual)


def test_a_budget_dies_before_its_tensors() -> None:
    with MemoryBudget(MIB) as budget:
        x = block()
    gone = weakref.ref(budget)
    del budget
    assert gone() is None
    del x


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_not_counted() -> None:
    # in a subprocess of its own: fork and the threads of a test runner do not mix
    code = """
        import os, torch
        from elastic_mbs.memory import MemoryBudget
        with MemoryBudget(100) as budget:
            pid = os.fork()
            if pid == 0:
                x = torch.empty(1000)
                assert budget.live == 0 and MemoryBudget.current() is None
                with MemoryBudget(10_000) as own:
                    y = torch.empty(1000)
                    assert own.live == 4000 and MemoryBudget.current() is own
            else:
                assert os.waitpid(pid, 0)[1] == 0
                assert MemoryBudget.current() is budget
        os._exit(0) if pid == 0 else None  # it leaves the block as its parent does
        print("parent done")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (0, "parent done\n"), done.stderr


# counters


def test_two_threads_count_into_one_budget() -> None:
    rounds, kept, errors = 300, [], []
    with MemoryBudget("1GiB") as budget:

        def work() -> None:
            try:
                with budget:
                    for i in range(rounds):
                        x = block()
                        if i % 10 == 0:
                            kept.append(x)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            block(2)
            if kept:
                kept.pop()
            assert budget.live >= 0
        for thread in threads:
            thread.join()
        assert not errors
        assert budget.live == len(kept) * KIB
        kept.clear()
        assert budget.live == 0


def test_the_collector_may_free_storages_inside_the_budget_itself() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me, self.data = self, block()

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with MemoryBudget("1GiB") as budget:
            for _ in range(300):
                Cycle()
            gc.collect()
            assert budget.live == 0
    finally:
        gc.set_threshold(*threshold)


def test_many_dead_storages_do_not_pile_up() -> None:
    x = torch.empty(1000)
    with MemoryBudget(MIB, track=x) as budget:
        for _ in range(1000):
            torch.empty(0)
            torch.empty(1)
        assert len(budget._gone) < 200
        assert len(budget._storages) < 200
        assert budget.peak <= 4004
        assert budget.live == 4000


class Allocator:
    """What the budget should do, in plain numbers: slots look into blocks, blocks have sizes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.peak, self.ooms, self.blocks = limit, 0, 0, 0
        self.looks: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

    @property
    def live(self) -> int:
        return sum(self.sizes[key] for key in set(self.looks.values()))

    def fits(self, new: int) -> bool:
        """Whether `new` bytes more may be live for a moment."""
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
        self.sizes[key] = max(size, self.sizes[key])  # torch never shrinks a storage in resize_, and one that is enlarged in place is not refused
        self.peak = max(self.peak, self.live)


STEP = st.tuples(st.sampled_from(["new", "free", "resize", "view", "inplace", "copy"]), st.integers(0, 5), st.integers(0, 40))


@settings(max_examples=100)
@example(steps=[("new", 0, 0), ("resize", 0, 1), ("new", 0, 0)], limit=0)
@given(steps=st.lists(STEP, max_size=40), limit=st.integers(0, 200))
def test_live_peak_and_errors_equal_a_model_of_the_allocator(steps: list[tuple[str, int, int]], limit: int) -> None:
    slots: dict[int, Tensor] = {}
    model = Allocator(limit)

    def act(action: str, slot: int, other: int, size: int) -> bool:
        """Does the same to both; returns whether the model says that it fits."""
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
                assert act(action, slot, (slot + 1) % 6, size), "the budget let an allocation pass that the model refuses"
            assert (budget.live, budget.ooms) == (model.live, model.ooms)
        assert budget.peak == model.peak
        slots.clear()
        assert budget.live == 0
