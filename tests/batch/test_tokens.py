"""Under a budget of tokens no piece is above it, but a sample that is longer by itself."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.batch.counts import Counts
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

RUN = random.Random(35)


def schedule(lengths: Sequence[int], budget: int, *, padded: bool, wide: int = 0) -> Schedule:
    each = [wide + 2 * length for length in lengths]
    costs: Costs = PaddedCosts(each) if padded else RowCosts(each)
    tokens = PaddedTokens(lengths) if padded else RowTokens(lengths)
    counts = Counts.samples(len(lengths))
    return Schedule(counts, costs=costs, budget=TokenBudget(tokens, budget))


def tokens_of(lengths: Sequence[int], *, padded: bool) -> int:
    return len(lengths) * max(lengths) if padded else sum(lengths)


def above(lengths: Sequence[int], pieces: list[Range], budget: int, *, padded: bool) -> int:
    """Return how many pieces of more than one sample are above the budget."""
    ran = [lengths[piece.start : piece.stop] for piece in pieces]
    return sum(len(each) > 1 and tokens_of(each, padded=padded) > budget for each in ran)


def drawn(run: random.Random) -> list[int]:
    """Return lengths as texts have them: few are much longer than the others."""
    spread = run.choice([0.1, 0.5, 1.0, 2.0])
    samples, middle = run.randint(1, 64), run.randint(1, 400)
    return [max(1, round(middle * run.lognormvariate(0, spread))) for _ in range(samples)]


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


@pytest.mark.parametrize("padded", [True, False])
def test_no_piece_of_a_random_batch_is_above_the_budget(padded: bool) -> None:
    for _ in range(500):
        lengths = drawn(RUN)
        if padded:
            lengths.sort(reverse=True)
        budget = RUN.randint(1, 3 * max(lengths))
        plan = schedule(lengths, budget, padded=padded, wide=RUN.choice([0, 7]))
        pieces = with_failures(RUN, plan)
        assert above(lengths, pieces, budget, padded=padded) == 0
        ran = sorted(i for piece in pieces for i in range(piece.start, piece.stop))
        assert ran == list(range(len(lengths)))


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


def cut(lengths: Sequence[int], budget: int, *, padded: bool) -> Partition:
    tokens = PaddedTokens(lengths) if padded else RowTokens(lengths)
    costs = RowCosts([1] * len(lengths))  # no limit beside the budget
    return TokenBudget(tokens, budget).balanced(
        lambda most: costs.partition(0, len(lengths), NO_LIMIT, most)
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=14), st.integers(1, 90))
def test_pieces_of_packed_rows_are_the_fewest_that_there_can_be_and_balanced(
    lengths: list[int], budget: int
) -> None:
    def fewest(budget: int) -> float:
        return (least(lengths, budget, 10**6, padded=False) - sum(lengths)) // 10**6

    pieces = cut(lengths, budget, padded=False)
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
    pieces = cut(lengths, budget, padded=True)
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


def test_text_has_less_padding_than_in_as_many_pieces_of_as_many_samples() -> None:
    run = random.Random(0)
    for _ in range(20):
        lengths = [min(320, max(4, round(run.lognormvariate(4.9, 0.6)))) for _ in range(64)]
        lengths.sort(reverse=True)
        pieces = cut(lengths, 8 * lengths[0], padded=True)
        positions = sum(tokens_of(lengths[a:b], padded=True) for a, b in pieces)
        by_samples = sum(8 * lengths[at] for at in range(0, 64, 8))
        assert positions + len(pieces) * lengths[0] / 2 <= by_samples + 8 * lengths[0] / 2


def test_the_largest_size_is_that_of_the_most_expensive_piece() -> None:
    plan = schedule([10, 4, 4, 4, 1, 1], 12, padded=True)
    # pieces of 10, of 4 + 4 + 4, and of 1 + 1 tokens: of the longest sample's elements, 1.2 times
    assert plan.largest == 2
    pieces = [plan.next(plan.largest) for _ in range(3)]
    assert [(each.start, each.stop) for each in pieces if each] == [(0, 1), (1, 4), (4, 6)]
    assert schedule([4] * 6, 100, padded=True).largest == 6


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
