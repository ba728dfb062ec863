"""Pieces cover the range once, in order, balanced and aligned."""

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_mbs.batch.pieces import (
    PaddedCosts,
    RowCosts,
    aligned,
    longest,
    partition,
    piece_count,
    smallest_size,
)

small = st.integers(1, 40)


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 50), st.integers(1, 200), small, st.integers(1, 20), st.integers(1, 9))
def test_pieces_cover_the_range_in_order_balanced_and_aligned(
    start: int, length: int, size: int, minimum: int, align: int
) -> None:
    pieces = partition(start, start + length, size, minimum=minimum, align=align)
    assert [i for a, b in pieces for i in range(a, b)] == list(range(start, start + length))
    lengths = [b - a for a, b in pieces]
    assert min(lengths) > 0
    assert max(lengths) - min(lengths) <= align
    assert all(n % align == 0 for n in lengths[:-1])
    assert min(lengths) >= min(minimum, length)
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True), (
        "the allocator's blocks for the first serve all that follow"
    )
    assert longest(length, size, minimum=minimum, align=align) == max(lengths)
    assert piece_count(length, size, minimum=minimum, align=align) == len(pieces)


@settings(deadline=None, max_examples=400)
@given(st.integers(1, 200), small, st.integers(1, 9))
def test_no_piece_is_longer_than_the_size_nor_is_there_one_piece_too_many(
    length: int, size: int, align: int
) -> None:
    lengths = [b - a for a, b in partition(0, length, size, align=align)]
    assert max(lengths) <= (length if size >= length else aligned(size, align))
    assert len(lengths) == (1 if size >= length else -(-length // aligned(size, align)))


@settings(deadline=None, max_examples=400)
@given(st.integers(1, 200), small, st.integers(1, 20), st.integers(1, 9))
def test_the_minimum_wins_over_the_size_and_allows_all_pieces_it_can(
    length: int, size: int, minimum: int, align: int
) -> None:
    pieces = partition(0, length, size, minimum=minimum, align=align)
    assert len(pieces) <= len(partition(0, length, size, align=align))
    if len(pieces) < len(partition(0, length, size, align=align)):
        finer = smallest_size(length, len(pieces) + 1, align=align)
        one_more = [b - a for a, b in partition(0, length, finer, align=align)]
        assert len(one_more) != len(pieces) + 1 or min(one_more) < minimum


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 300), st.integers(1, 50), st.integers(1, 9))
def test_the_smallest_size_for_a_count_is_the_smallest(
    samples: int, count: int, align: int
) -> None:
    size = smallest_size(samples, count, align=align)
    assert size % align == 0
    assert piece_count(samples, size, align=align) <= count
    if size > align:
        assert piece_count(samples, size - align, align=align) > count


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 45),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 40),
)
def test_samples_that_differ_are_cut_by_what_they_cost(
    falling: list[int], size: int, minimum: int, align: int, most: int
) -> None:
    costs, n = PaddedCosts(sorted(falling, reverse=True)), len(falling)
    pieces = costs.partition(0, n, size, lambda at: most, minimum=minimum, align=align)
    assert [start for start, _ in pieces] + [n] == [0] + [stop for _, stop in pieces]
    lengths = [stop - start for start, stop in pieces]
    assert all(length % align == 0 for length in lengths[:-1])
    assert min(lengths) >= min(minimum, n)
    allowed = longest(costs.samples, size, minimum=minimum, align=align)
    if minimum == align == 1:
        assert all(
            length <= most and costs.worth(*piece) <= allowed
            for length, piece in zip(lengths, pieces, strict=True)
        )
        assert lengths[0] == min(allowed, most)  # the first piece is the worst that the size means
        for start, stop in pieces:
            halved = costs.partition(
                start, stop, max(1, costs.worth(start, stop) // 2), lambda at: most
            )
            assert len(halved) > 1 or costs.worth(start, stop) == 1


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 45),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 40),
)
def test_samples_in_any_order_are_cut_by_the_sum_of_what_they_cost(
    each: list[int], size: int, minimum: int, align: int, most: int
) -> None:
    costs, n = RowCosts(each), len(each)
    pieces = costs.partition(0, n, size, lambda at: most, minimum=minimum, align=align)
    assert [start for start, _ in pieces] + [n] == [0] + [stop for _, stop in pieces]
    lengths = [stop - start for start, stop in pieces]
    assert all(length % align == 0 for length in lengths[:-1])
    assert min(lengths) >= min(minimum, n)
    assert (costs.unit, costs.samples) == (max(each), -(-sum(each) // max(each)))
    start, stop, cost = costs.example(size)
    assert cost == sum(each[start:stop]) / max(each) <= size
    assert max(each[start:stop]) == max(each)
    assert (start, stop) == (0, n) or cost > size - 1
    if minimum == align == 1:
        assert max(lengths) <= most
        assert all(sum(each[start:stop]) <= size * max(each) for start, stop in pieces)
        for start, stop in pieces:
            halved = costs.partition(
                start, stop, max(1, costs.worth(start, stop) // 2), lambda at: most
            )
            assert len(halved) > 1 or costs.worth(start, stop) == 1


@given(st.integers(1, 40), st.integers(1, 45))
def test_samples_that_cost_the_same_are_cut_to_the_size(n: int, size: int) -> None:
    pieces = RowCosts([7] * n).partition(0, n, size, lambda at: n)
    assert max(stop - start for start, stop in pieces) == longest(n, size)
