"""With max_tokens the gradient is that of the batch, and no piece has more tokens."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, MemoryBudget, MemoryOptions, Policy, count_tokens
from elastic_mbs.errors import BatchError, UsageError
from elastic_mbs.events import Event, Warned
from tests.engine.test_by_length import FEW, LENGTHS, OPTIONS, Reader, loss_of, sentences, wanted
from tests.helpers.steps import elastic, loop, off_by, once, whole_gradient
from tests.helpers.strikes import every_operation

EXACT = 1e-12


class Seen:
    """The pieces that a loss function got, as (samples, tokens of the longest)."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.pieces: list[tuple[int, int]] = []

    def __call__(self, piece: Any) -> Tensor:
        self.pieces.append(tuple(piece["words"].shape))
        return loss_of(self.model, piece)

    def above(self, budget: int) -> list[tuple[int, int]]:
        return [each for each in self.pieces if each[0] > 1 and each[0] * each[1] > budget]


@pytest.mark.injectable
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=14),
    st.integers(0, 3),
    st.integers(1, 60),
    st.integers(1, 14) | st.just("auto"),
    st.sampled_from([1, 2, 3]),
)
def test_the_gradient_is_that_of_the_padded_batch_for_every_budget(
    lengths: list[int], more: int, budget: int, size: Any, door: int
) -> None:
    model, batch = Reader(), sentences(lengths, max(lengths) + more)
    seen = Seen(model)
    once(door, model, seen, batch, **OPTIONS, micro_batch_size=size, max_tokens=budget)
    assert off_by(model, wanted(model, batch)) <= EXACT
    assert seen.above(budget) == []


@pytest.mark.parametrize("door", [1, 3])
def test_running_out_of_memory_at_any_operation_keeps_the_budget(door: int) -> None:
    model, batch = Reader(), sentences(FEW, 8)
    exact = wanted(model, batch)
    for strike in every_operation(stride=11):
        model.zero_grad()
        seen = Seen(model)
        mbs = elastic(model, **OPTIONS, max_tokens=14)
        with strike:
            _ = mbs.backward(seen, batch) if door == 1 else loop(mbs, seen, batch)
        assert off_by(model, exact) <= EXACT, strike.hits
        assert seen.above(14) == []


@pytest.mark.verifies
@pytest.mark.parametrize("budget", [1, 9, 14, 40])
def test_the_check_after_the_first_split_keeps_the_budget(budget: int) -> None:
    model, batch, events = Reader(), sentences(LENGTHS, 8), list[Event]()
    seen = Seen(model)
    mbs = elastic(model, **OPTIONS, max_tokens=budget, on_event=events.append)
    for _ in range(4):
        mbs.backward(seen, batch)
    assert seen.above(budget) == []
    assert [each for each in events if isinstance(each, Warned) and "verify" in each.topic] == []
    run = len(seen.pieces)
    assert (run > 4 * len(mbs.backward(seen, batch).partition)) == (budget > 1)


def packed(lengths: list[int]) -> dict[str, Any]:
    torch.manual_seed(2)
    total = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(0, 12, (1, total))
    labels = ids.clone()
    labels[0, starts[:-1]] = -100
    return {"input_ids": ids, "labels": labels, "cu_seqlens": starts}


@pytest.mark.parametrize("budget", [1, 5, 8, 13, 100])
def test_packed_rows_are_cut_by_their_sum(budget: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 12)).double()
    batch, rows = packed(LENGTHS), list[list[int]]()

    def loss_fn(model: nn.Module, piece: Any) -> Tensor:
        scores = model(piece["input_ids"])[0, :-1]
        return functional.cross_entropy(scores, piece["labels"][0, 1:])

    def noted(piece: Any) -> Tensor:
        rows.append(piece["cu_seqlens"].diff().tolist())
        return loss_fn(model, piece)

    once(1, model, noted, batch, count=count_tokens("labels"), max_tokens=budget)
    assert off_by(model, whole_gradient(model, lambda twin: loss_fn(twin, batch))) <= EXACT
    assert [n for each in rows for n in each] == LENGTHS
    assert not [each for each in rows if len(each) > 1 and sum(each) > budget]


def test_a_sample_that_is_longer_runs_alone_and_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batch = Reader(), sentences([20, 3, 3, 3, 3], 20)
    seen = Seen(model)
    mbs = elastic(model, **OPTIONS, max_tokens=9)
    with caplog.at_level(logging.WARNING, "elastic_mbs"):
        mbs.backward(seen, batch)
        mbs.backward(seen, batch)
    assert seen.pieces[:3] == [(1, 20), (2, 3), (2, 3)]  # balanced: not 3 and 1
    (record,) = [each for each in caplog.records if "max_tokens" in each.getMessage()]
    assert "a sample has 20 tokens, more than max_tokens=9" in record.getMessage()


@pytest.mark.no_oom_injection
def test_where_memory_leaves_less_than_the_budget_sizes_fall_and_come_back() -> None:
    model, batch = Reader(), sentences(LENGTHS * 4, 8)
    exact = wanted(model, batch)
    seen = Seen(model)
    with MemoryBudget("1GiB", [model]) as budget:
        budget.reset_peak()
        loss_of(model, batch).backward()
        need = budget.peak - budget.live
        model.zero_grad()
        with ElasticMBS(
            model,
            policy=Policy(max_tokens=60, patience=1, jitter=0, cooldown=0, min_gain=0),
            memory=MemoryOptions(monitor_interval=0),
            **OPTIONS,
        ) as mbs:
            free = mbs.backward(seen, batch).partition
            for limit, fewer in ((need // 12, False), (2**30, True)):
                model.zero_grad()
                budget.limit = budget.live + limit
                for _ in range(8):
                    model.zero_grad()
                    found = mbs.backward(seen, batch)
                    assert off_by(model, exact) <= EXACT
                assert (found.partition == free) == fewer
        assert mbs.stats.ooms
    assert seen.above(60) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 0}, "whole number of at least 1"),
        ({"max_tokens": 8, "min_micro_batch_size": 2}, "min_micro_batch_size=2 asks for more"),
        ({"max_tokens": 8, "align": 4}, "align=4 asks for more than one sample"),
    ],
)
def test_options_that_no_piece_could_keep_are_refused(options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Policy(**options)


def test_batchnorm_goes_with_it_only_where_one_sample_is_said_to_be_enough() -> None:
    model = nn.Sequential(nn.Embedding(12, 6), nn.BatchNorm1d(6))
    with pytest.raises(UsageError, match="min_micro_batch_size=1 if one is enough"):
        elastic(model, **OPTIONS, max_tokens=8)
    elastic(model, **OPTIONS, max_tokens=8, min_micro_batch_size=1)


def test_a_padded_batch_in_its_own_order_is_refused_before_it_runs() -> None:
    model, batch = Reader(), sentences(LENGTHS, 8)
    mbs = elastic(model, count=count_tokens("labels"), max_tokens=8)
    with pytest.raises(BatchError, match='say pieces="by_length"'):
        mbs.backward(lambda piece: loss_of(model, piece), batch)
    mbs = elastic(model, **OPTIONS, max_tokens=8)  # as the error says
    mbs.backward(lambda piece: loss_of(model, piece), batch)
    assert off_by(model, wanted(model, batch)) <= EXACT
