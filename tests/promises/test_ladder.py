"""Escalation goes one step at a time, as far as memory asks for, and back when it has come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs import (
    Deescalated,
    ElasticMBS,
    Escalated,
    Event,
    MemoryBudget,
    MicroBatchFloorError,
)
from elastic_mbs.escalation.ladder import Ladder, Memory, Step
from elastic_mbs.events import format_bytes
from elastic_mbs.testing import InjectOOM
from stress.reference.state import error_of
from tests.helpers.steps import elastic, grads, there, whole_gradient

BLOCKS, WIDTH, LENGTH = 8, 8, 256
RUNGS = ("logits", "checkpoint", "offload")


class Block(nn.Module):
    """A block whose activations are many times its input, and which counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        RUNS[id(self)] = RUNS.get(id(self), 0) + 1
        found: Tensor = x + self.down(self.up(x).sin().tanh())
        return found


RUNS: dict[int, int] = {}


def deep() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks).double(), x


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def plain_peak(budget: MemoryBudget, model: nn.Module, x: Tensor) -> int:
    """Return the bytes that a step takes beside the model and its gradients."""
    loss_of(model)(x).backward()
    before = budget.live
    budget.reset_peak()
    loss_of(model)(x).backward()
    model.zero_grad()
    return budget.peak - before


def counted(model: nn.Module) -> list[int]:
    """Return how often each block has run since the last time."""
    found = [RUNS.get(id(block), 0) for block in model[1]]  # type: ignore[index]
    RUNS.clear()
    return found


def growing(model: nn.Module, events: list[Event], **options: object) -> ElasticMBS:
    quick = {"grow": True, "patience": 2, "jitter": 0.0, "sensor": None}
    return elastic(model, on_event=events.append, **quick | options)


@pytest.mark.parametrize(("part", "blocks"), [(1.1, 0), (0.9, 2), (0.65, 4), (0.5, 6), (0.33, 8)])
def test_as_many_blocks_are_checkpointed_as_memory_asks_for(part: float, blocks: int) -> None:
    model, x = deep()
    events: list[Event] = []
    wanted = whole_gradient(model, lambda twin: loss_of(twin)(x))
    with MemoryBudget("1GiB", track=(model, x)) as budget:
        need = plain_peak(budget, model, x)
        gradients = sum(parameter.nbytes for parameter in model.parameters())
        mbs = growing(model, events, escalate=("checkpoint",))
        budget.limit = budget.live + gradients + int(part * need)
        mbs.backward(loss_of(model), x)
        found = grads(model)
        model.zero_grad()
        counted(model)
        mbs.backward(loss_of(model), x)
    assert counted(model) == [2] * blocks + [1] * (BLOCKS - blocks)  # the first ones
    steps = [event.part for event in events if isinstance(event, Escalated)]
    assert steps == [f"{count} of {BLOCKS} blocks" for count in range(2, blocks + 1, 2)]
    assert error_of(found, wanted) <= 1e-12
    assert error_of(grads(model), wanted) <= 1e-12


def test_each_step_is_left_again_when_memory_is_back() -> None:
    model, x = deep()
    events: list[Event] = []
    wanted = whole_gradient(model, lambda twin: loss_of(twin)(x))
    with MemoryBudget("1GiB", track=(model, x)) as budget:
        need = plain_peak(budget, model, x)
        mbs = growing(model, events, escalate=("checkpoint",))
        budget.limit = budget.live + need // 2
        mbs.backward(loss_of(model), x)
        first = next(event for event in events if isinstance(event, Escalated))
        needed = format_bytes(there(first.needed))
        assert f"do not fit in less than {needed} and cannot be cut: from now" in first.line()
        assert "checkpoint (2 of 8 blocks), the next way of escalate=" in first.line()
        budget.limit = "1GiB"
        for _ in range(4 * 2 + 1):
            model.zero_grad()
            assert mbs.backward(loss_of(model), x).ooms <= 20
            assert error_of(grads(model), wanted) <= 1e-12
        taken = [event.part for event in events if isinstance(event, Escalated)]
        left = [event for event in events if isinstance(event, Deescalated)]
        assert [event.part for event in left] == taken[::-1]
        assert "from now on without checkpoint (2 of 8 blocks)" in left[-1].line()
        counted(model)
        model.zero_grad()
        mbs.backward(loss_of(model), x)
    assert counted(model) == [1] * BLOCKS
    assert all(torch.equal(a, b) for a, b in zip(grads(model), wanted, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [1.0, 1.04])
def test_no_step_is_left_while_there_is_no_more_memory(more: float) -> None:
    model, x = deep()
    events: list[Event] = []
    with MemoryBudget("1GiB", track=(model, x)) as budget:
        need = plain_peak(budget, model, x)
        mbs = growing(model, events, escalate=("checkpoint",))
        budget.limit = budget.live + need // 2
        mbs.backward(loss_of(model), x)
        budget.limit = int(budget.limit * more)
        for _ in range(8):
            model.zero_grad()
            assert mbs.backward(loss_of(model), x).ooms == 0
    assert not any(isinstance(event, Deescalated) for event in events)


def test_a_step_that_is_missing_again_is_taken_again() -> None:
    model, x = deep()
    events: list[Event] = []
    wanted = whole_gradient(model, lambda twin: loss_of(twin)(x))
    with MemoryBudget("1GiB", track=(model, x)) as budget:
        need = plain_peak(budget, model, x)
        mbs = growing(model, events, escalate=("checkpoint",))
        budget.limit = low = budget.live + need // 2
        for more in (1.0, 1.3, 1.3, 1.3, 1.3):
            budget.limit = int(low * more)
            model.zero_grad()
            mbs.backward(loss_of(model), x)
            assert error_of(grads(model), wanted) <= 1e-12
    steps = [type(event) for event in events if isinstance(event, Escalated | Deescalated)]
    assert Deescalated in steps


@given(
    st.integers(0, 40),
    st.permutations(RUNGS),
    st.lists(st.one_of(st.none(), st.integers(1, 1000)), max_size=30),
)
def test_a_ladder_goes_up_and_down_the_same_steps(
    blocks: int, rungs: list[str], capacities: list[int | None]
) -> None:
    ladder, up = Ladder(), list[Step]()
    for capacity in capacities:
        step = ladder.next(rungs, lambda: blocks)
        if step is None:
            break
        ladder.climb(step, capacity)
        up.append(step)
    assert len(set(up)) == len(up)
    counts = [step.blocks for step in up if step.rung == "checkpoint"]
    assert counts == sorted(counts)
    assert all(0 < count <= blocks for count in counts)
    for step, needed in zip(reversed(up), reversed(capacities[: len(up)]), strict=True):
        assert not ladder.may_climb_down(2000, patience=1, changed=0.05)  # too early
        ladder.count_call()
        assert not ladder.may_climb_down(None, patience=1, changed=0.05)
        assert not ladder.may_climb_down(needed or 2000, patience=1, changed=0.05)
        assert ladder.may_climb_down(2000, patience=1, changed=0.05) == (needed is not None)
        assert ladder.climb_down() == step
    assert ladder.steps == ()


@given(
    st.integers(1, 40),
    st.permutations((*RUNGS, "tile")),
    st.dictionaries(st.sampled_from([*RUNGS[::2], "tile"]), st.integers(1, 1000)),
    st.one_of(st.none(), st.integers(0, 1000)),
)
def test_a_planned_step_comes_first_where_it_fits_and_all_others_follow(
    blocks: int, rungs: list[str], needs: dict[str, int], capacity: int | None
) -> None:
    planned, ladder = Ladder(), Ladder()
    planned.plan({Step(rung): needed for rung, needed in needs.items()}, 8)
    up, plain = list[Step](), list[Step]()
    for found, each in ((up, planned), (plain, ladder)):
        while (step := each.next(rungs, lambda: blocks, memory=Memory(capacity, 8))) is not None:
            each.climb(step, None)
            found.append(step)
    fitting = [Step(rung) for rung, needed in needs.items() if needed <= (capacity or 0)]
    assert up[:1] == (fitting or plain)[:1]
    assert [step for step in up if step != up[0]] == [step for step in plain if step != up[0]]
    planned = Ladder()
    planned.plan({Step("tile"): 0}, 8)
    assert planned.next(rungs, lambda: blocks, memory=Memory(1, 9)) == plain[0], "longer samples"
    assert planned.next(rungs, lambda: blocks) == plain[0], "in the order given"


@pytest.mark.parametrize(("part", "rungs"), [(1.1, 0), (0.6, 2), (0.2, 3)])
def test_auto_takes_as_many_rungs_as_are_needed_in_the_order_of_their_cost(
    part: float, rungs: int
) -> None:
    model, x = deep()
    events: list[Event] = []
    wanted = whole_gradient(model, lambda twin: loss_of(twin)(x))
    with MemoryBudget("1GiB", track=(model, x)) as budget:
        need = plain_peak(budget, model, x)
        gradients = sum(parameter.nbytes for parameter in model.parameters())
        mbs = growing(model, events, escalate="auto")
        budget.limit = budget.live + gradients + int(part * need)
        mbs.backward(loss_of(model), x)
        found = grads(model)
    taken = list(dict.fromkeys(event.by for event in events if isinstance(event, Escalated)))
    assert taken == ["logits", "checkpoint", "tile"][:rungs]
    assert error_of(found, wanted) <= 1e-12


def test_auto_offloads_nothing_from_the_host_to_the_host() -> None:
    model, x = deep()
    events: list[Event] = []
    mbs = elastic(model, escalate="auto", on_event=events.append)
    with InjectOOM(always_from=1), pytest.raises(MicroBatchFloorError):
        mbs.backward(loss_of(model), x)
    taken = dict.fromkeys(event.by for event in events if isinstance(event, Escalated))
    assert list(taken) == ["logits", "checkpoint", "tile"]
