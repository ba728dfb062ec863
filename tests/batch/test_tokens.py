"""Under a budget of tokens no piece is above it, but a sample that is longer by itself."""

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elastic_mbs import cut
from elastic_mbs.batch.counts import Counts, count_tokens
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.batch.pieces import (
    Costs,
    PaddedCosts,
    PaddedTokens,
    Partition,
    RowCosts,
    RowTokens,
    TokenBudget,
)
from elastic_mbs.batch.schedule import NO_LIMIT, Range, Schedule
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError


def schedule(lengths: Sequence[int], budget: int, *, padded: bool) -> Schedule:
    each = [2 * length for length in lengths]
    costs: Costs = PaddedCosts(each) if padded else RowCosts(each)
    tokens = PaddedTokens(lengths) if padded else RowTokens(lengths)
    counts = Counts.samples(len(lengths))
    return Schedule(counts, costs=costs, budget=TokenBudget(tokens, budget))


def tokens_of(lengths: Sequence[int], *, padded: bool) -> int:
    return len(lengths) * max(lengths) if padded else sum(lengths)


def drawn(run: random.Random) -> list[int]:
    """Return lengths: all the same, any up to one, as texts have them, or with a heavy tail."""
    samples, middle = run.randint(1, 40), run.randint(1, 60)
    spread, tail = run.choice([0.1, 0.5, 1.0, 2.0]), run.choice([0.7, 1.5])
    draw: Callable[[], int] = run.choice(
        [
            lambda: middle,
            lambda: run.randint(0, middle),
            lambda: round(middle * run.lognormvariate(0, spread)),
            lambda: round(middle / 4 * run.paretovariate(tail)),
        ]
    )
    lengths = [min(400, draw()) for _ in range(samples)]
    if run.random() < 0.2:
        lengths[run.randrange(samples)] = 400
    return lengths


def with_failures(run: random.Random, plan: Schedule) -> list[Range]:
    """Run all pieces; some fail, at sizes that fall, and some of these cannot be cut but in two."""
    size, done = min(NO_LIMIT, run.choice([plan.largest, NO_LIMIT, run.randint(1, 9)])), []
    while (piece := plan.next(size)) is not None:
        if run.random() < 0.8:
            done.append(piece)
            continue
        plan.push(piece)
        size = max(1, min(size, plan.worth(piece)) // 2)
        if not plan.can_split(piece, size):
            plan.halve(piece)
    return done


class Drawn(NamedTuple):
    """A random batch, and how its tokens are counted without the product."""

    batch: dict[str, Any]
    tokens_in: Callable[[Any], int]  # a piece
    length: Any = None  # the option; None for packed rows
    dims: Any = None
    count: Any = None

    def read(self) -> BatchView:
        by_length = (
            None if self.length is None else ByLength(self.length, None, lambda kind, text: None)
        )
        return BatchView(self.batch, self.dims, by_length=by_length)


def words_of(lengths: Sequence[int], more: int = 0) -> Tensor:
    """Return words, none of them 0, and 0 beyond the length of each sample."""
    there = torch.arange(max(1, *lengths) + more) < torch.tensor(lengths)[:, None]
    return (torch.arange(there.numel()).reshape(there.shape) + 1) * there


def with_a_mask(run: random.Random) -> Drawn:
    lengths = [max(1, length) for length in drawn(run)]
    words = words_of(lengths, run.choice([0, 3]))
    kept = torch.tensor([run.random() < 0.7 for _ in lengths])
    kept[run.randrange(len(lengths))] = True
    labels = torch.where((words != 0) & kept[:, None], words, -100)  # some samples have none
    batch = {"words": words, "mask": (words != 0).long(), "labels": labels}
    return Drawn(batch, lambda piece: piece["words"].numel(), "mask", count=count_tokens("labels"))


def with_lengths(run: random.Random) -> Drawn:
    lengths = drawn(run)
    batch = {"words": words_of(lengths), "scores": torch.zeros(len(lengths), 3)}
    return Drawn(batch, lambda piece: piece["words"].numel(), lambda batch: lengths)


def in_pairs(run: random.Random) -> Drawn:
    chosen = drawn(run)
    rejected = run.sample(chosen, len(chosen))
    longer = list(map(max, chosen, rejected))
    batch = {"chosen": words_of(chosen), "rejected": words_of(rejected)}
    return Drawn(batch, lambda piece: piece["chosen"].numel(), lambda batch: longer)


def in_a_list(run: random.Random) -> Drawn:
    texts = [torch.ones(length) for length in drawn(run)]
    return Drawn(
        {"texts": texts},
        lambda piece: len(piece["texts"]) * max(1, *map(len, piece["texts"])),
        lambda batch: list(map(len, batch["texts"])),
        cut.items("texts"),
    )


def in_one_row(run: random.Random) -> Drawn:
    lengths = [max(1, length) for length in drawn(run)]
    batch = {
        "input_ids": torch.arange(sum(lengths))[None],
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
    }
    return Drawn(batch, lambda piece: piece["input_ids"].numel())


def in_rows(run: random.Random) -> Drawn:
    each = drawn(run)  # some samples bring none
    batch = {"each": torch.tensor(each), "rows": torch.zeros(sum(each), 2)}
    dims = cut.ragged("rows", lengths="each")
    return Drawn(batch, lambda piece: len(piece["rows"]), dims=dims)


KINDS = [with_a_mask, with_lengths, in_pairs, in_a_list, in_one_row, in_rows]


@pytest.mark.parametrize("kind", KINDS)
@given(st.randoms(use_true_random=True))
def test_no_piece_of_a_random_batch_is_above_the_budget(
    kind: Callable[[random.Random], Drawn], run: random.Random
) -> None:
    # `pytest --hypothesis-profile=many` draws 20,000 of each kind
    made = kind(run)
    view = made.read()
    tokens = view.tokens()
    budget = run.randint(1, 3 * max(1, tokens.longest))
    plan = Schedule(
        Counts.read(made.count, view),
        costs=view.even_costs,
        budget=TokenBudget(tokens, budget),
    )
    ran = with_failures(run, plan)
    assert sorted(i for each in ran for i in range(each.start, each.stop)) == [*range(view.length)]
    for each in ran:
        if len(each) > 1:
            assert made.tokens_in(view.piece(each.start, each.stop)) <= budget


def least(lengths: Sequence[int], budget: int, overhead: float, *, padded: bool) -> float:
    """Return the least tokens of ranges within the budget, with an overhead for each range.

    It is found by trying all last ranges.
    """
    best = [0.0] + [float("inf")] * len(lengths)
    for stop in range(1, len(lengths) + 1):
        for start in range(stop):
            tokens = tokens_of(lengths[start:stop], padded=padded)
            if tokens <= budget or stop - start == 1:
                best[stop] = min(best[stop], best[start] + tokens + overhead)
    return best[-1]


def cut_evenly(lengths: Sequence[int], budget: int, *, padded: bool) -> Partition:
    tokens = PaddedTokens(lengths) if padded else RowTokens(lengths)
    costs = RowCosts([1] * len(lengths))  # no limit beside the budget
    samples = len(lengths)
    return TokenBudget(tokens, budget).balanced(
        0, samples, lambda most: costs.partition(0, samples, NO_LIMIT, most)
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=14), st.integers(1, 90))
def test_pieces_of_packed_rows_are_the_fewest_that_there_can_be_and_balanced(
    lengths: list[int], budget: int
) -> None:
    def fewest(budget: int) -> float:
        return (least(lengths, budget, 10**6, padded=False) - sum(lengths)) // 10**6

    pieces = cut_evenly(lengths, budget, padded=False)
    assert len(pieces) == fewest(budget)
    largest = max((sum(lengths[a:b]) for a, b in pieces if b - a > 1), default=0)
    smaller = largest - budget // TokenBudget.FINE - 1
    if smaller >= 1:  # a budget that is smaller by more than the balance is fine needs more pieces
        assert fewest(smaller) > len(pieces)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=14), st.integers(1, 400))
def test_a_padded_piece_more_is_made_where_it_saves_its_overhead_of_padding(
    lengths: list[int], budget: int
) -> None:
    lengths.sort(reverse=True)
    pieces = cut_evenly(lengths, budget, padded=True)
    overhead = budget / TokenBudget.OVERHEAD
    positions = sum(tokens_of(lengths[a:b], padded=True) for a, b in pieces)
    found = positions + overhead * len(pieces)
    best = least(lengths, budget, overhead, padded=True)
    assert found >= best - 1e-6
    if len(pieces) == 1 or budget < TokenBudget.FINE:
        assert found == pytest.approx(best)
    # what balancing costs: with the budget that is left, nothing is better
    largest = max((tokens_of(lengths[a:b], padded=True) for a, b in pieces if b - a > 1), default=0)
    assert found <= least(lengths, max(1, largest), overhead, padded=True) + 1e-6


def text(run: random.Random) -> list[int]:
    lengths = [min(320, max(4, round(run.lognormvariate(4.9, 0.6)))) for _ in range(64)]
    return sorted(lengths, reverse=True)


def test_text_has_less_padding_than_in_as_many_pieces_of_as_many_samples() -> None:
    run = random.Random(0)
    for _ in range(20):
        lengths = text(run)
        pieces = cut_evenly(lengths, 8 * lengths[0], padded=True)
        positions = sum(tokens_of(lengths[a:b], padded=True) for a, b in pieces)
        by_samples = sum(8 * lengths[at] for at in range(0, 64, 8))
        assert positions + len(pieces) * lengths[0] / 2 <= by_samples + 8 * lengths[0] / 2


@pytest.mark.parametrize(("times", "most"), [(1 / 4, 1.03), (1, 1.005), (4, 1.06)])
def test_an_overhead_that_is_not_the_one_assumed_costs_little(times: float, most: float) -> None:
    run, budget = random.Random(0), 8 * 320
    overhead = times * budget / TokenBudget.OVERHEAD
    found = best = 0.0
    for _ in range(20):
        lengths = text(run)
        pieces = cut_evenly(lengths, budget, padded=True)
        positions = sum(tokens_of(lengths[a:b], padded=True) for a, b in pieces)
        found += positions + overhead * len(pieces)
        best += least(lengths, budget, overhead, padded=True)
    assert found <= most * best


def test_the_largest_size_is_that_of_the_most_expensive_piece() -> None:
    plan = schedule([10, 4, 4, 4, 1, 1], 12, padded=True)
    # pieces of 10, of 4 + 4 + 4, and of 1 + 1 tokens: of the longest sample's elements, 1.2 times
    assert plan.largest == 2
    pieces = [plan.next(plan.largest) for _ in range(3)]
    assert [(each.start, each.stop) for each in pieces if each] == [(0, 1), (1, 4), (4, 6)]
    assert schedule([4] * 6, 100, padded=True).largest == 6


def opcodes(run: Callable[[], object]) -> int:
    """Return the operations of Python's that `run` takes."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    for _ in range(2):  # Python 3.12 and 3.13 see none in the first run of a process
        count = 0
        sys.settrace(trace)
        try:
            run()
        finally:
            sys.settrace(before)
    return count


def shorter_and_shorter(samples: int) -> list[int]:
    return [100 - 99 * i // samples for i in range(samples)]


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("held", [2, 30, 1000])
def test_the_work_of_a_plan_grows_as_the_samples_do(padded: bool, held: int) -> None:
    few, many = (
        opcodes(partial(schedule, shorter_and_shorter(samples), 100 * held, padded=padded))
        for samples in (100, 800)
    )
    assert many <= 12 * few


def test_a_piece_that_failed_is_cut_without_a_look_at_the_others() -> None:
    plan = schedule(shorter_and_shorter(800), 1000, padded=True)
    failed = plan.next(plan.largest)
    assert failed is not None
    plan.push(failed)
    work = opcodes(partial(plan.can_split, failed, plan.worth(failed) // 2))
    assert work < opcodes(partial(schedule, shorter_and_shorter(800), 1000, padded=True)) / 20


def masked(lengths: list[int], width: int) -> dict[str, Any]:
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {"mask": mask, "words": mask * 3}


@pytest.mark.parametrize(
    ("lengths", "width", "each"),
    [
        ([3, 1, 6], 8, [6, 3, 1]),  # sorted and trimmed
        ([6, 6, 6], 6, [6, 6, 6]),  # no padding
        ([4, 4, 4], 6, [4, 4, 4]),  # trimmed, though all are as long
        ([6, 5, 6], 6, [6, 6, 6]),  # one position of padding is none: nothing is trimmed
    ],
)
def test_tokens_of_a_padded_batch_are_those_that_its_pieces_keep(
    lengths: list[int], width: int, each: list[int]
) -> None:
    batch = masked(lengths, width)
    for length in ("mask", lambda batch: batch["mask"].sum(1)):
        view = BatchView(batch, by_length=ByLength(length, None, lambda kind, text: None))
        tokens = view.tokens()
        assert isinstance(tokens, PaddedTokens)
        assert list(tokens.lengths) == each
        kept = [view.piece(i, i + 1)["words"].shape[1] for i in range(3)]
        assert kept == each


def test_tokens_of_a_packed_batch_are_its_rows() -> None:
    batch = {"input_ids": torch.arange(9)[None], "cu_seqlens": torch.tensor([0, 3, 4, 9])}
    view = BatchView(batch)
    tokens = view.tokens()
    assert isinstance(tokens, RowTokens)
    assert list(tokens.lengths) == [3, 1, 5]


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (masked([3, 1], 4), 'pieces="by_length"'),
        ({"input_ids": torch.ones(2, 3), "names": ["a", "b"]}, "does not say their lengths"),
    ],
)
def test_a_batch_that_does_not_say_how_long_its_samples_are_is_refused(
    batch: Any, says: str
) -> None:
    with pytest.raises(BatchError, match=says):
        BatchView(batch).tokens()
