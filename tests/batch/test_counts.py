"""Counts are read once, and the weights that follow from them add up to one for every split."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import CountError


def view_of(n: int) -> BatchView:
    return BatchView(torch.zeros(n))


def read(values: Any, n: int | None = None) -> Counts:
    return Counts.read(lambda batch: values, view_of(len(values) if n is None else n))


def splits(n: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    edges = st.sets(st.integers(1, n - 1)) if n > 1 else st.just(set[int]())
    return edges.map(lambda inner: list(zip([0, *sorted(inner)], [*sorted(inner), n], strict=True)))


whole_numbers = st.lists(st.integers(0, 2**70), min_size=1, max_size=20).filter(any)
floats = st.lists(st.one_of(st.floats(0, 1e300, allow_nan=False), st.sampled_from([0.1, 5e-324, 1e17, 3])), min_size=1, max_size=20).filter(any)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_weights_of_any_split_are_the_shares_of_its_terms_and_add_up_to_one(data: st.DataObject) -> None:
    values = data.draw(st.one_of(whole_numbers, floats))
    counts, ranges = read(values), data.draw(splits(len(values)))
    exact = [sum(map(Fraction, values[start:stop])) for start, stop in ranges]
    added = 0.0
    for (start, stop), terms in zip(ranges, exact, strict=True):
        weights, share = counts.weights(start, stop), float(Fraction(terms) / sum(exact))
        if share == 0:
            assert weights is counts.weights(start, stop, reduction="sum") is None
            continue
        assert weights is not None
        assert weights[None] == share, "correctly rounded"
        assert counts.weights(start, stop, reduction="sum") == {None: 1.0}
        added += weights[None]
    assert added == pytest.approx(1, rel=1e-14)


def test_samples_count_one_each() -> None:
    for counts in (Counts.samples(17), Counts.read(None, view_of(17))):
        assert (counts.n, counts.names, counts.total) == (17, None, 17)
        assert counts.weights(16, 17) == {None: 1 / 17}, "a division by the number of pieces would give 1/2"
        assert counts.weights(2, 2) is None


@pytest.mark.parametrize(
    "vector",
    [
        [2, 0, 3],
        (2, 0, 3),
        torch.tensor([2, 0, 3]),
        torch.tensor([2, 0, 3], dtype=torch.uint8),
        [torch.tensor(2), torch.tensor(0), torch.tensor(3)],
        [torch.tensor(2), torch.tensor(0, dtype=torch.int32), 3],
        np.array([2, 0, 3]),
        list(np.array([2, 0, 3])),
        [2, False, 3],
        [2.0, 0, 3],
        torch.tensor([2.0, 0, 3]),
        np.array([2.0, 0, 3]),
        [Fraction(2), 0, np.float32(3)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_vector_of_numbers_is_read_and_keeps_whole_numbers_whole(vector: Any) -> None:
    counts = read(vector)
    assert counts.total == 5
    assert isinstance(counts.total, float) == any("float" in str(getattr(value, "dtype", type(value))) for value in vector)
    assert counts.weights(1, 2) is None
    assert counts.weights(2, 3) == {None: 0.6}


def test_a_mask_counts_what_is_true() -> None:
    assert read(torch.tensor([True, False, True])).total == 2


def test_the_count_function_is_called_once_with_the_whole_batch() -> None:
    seen: list[Any] = []
    batch = {"x": torch.zeros(3)}

    def count(given: Any) -> list[int]:
        seen.append(given)
        return [1, 2, 3]

    counts = Counts.read(count, BatchView(batch))
    counts.weights(0, 1)
    assert len(seen) == 1
    assert seen[0] is batch


def test_losses_by_name_have_counts_by_name() -> None:
    counts = Counts.read({"mlm": lambda batch: [0, 2, 6], "nsp": None, "aux": lambda batch: [0, 0.5, 0.5]}, view_of(3))
    assert counts.names == ("mlm", "nsp", "aux")
    assert counts.total == {"mlm": 8, "nsp": 3, "aux": 1.0}
    assert counts.weights(0, 1) == {"mlm": 0.0, "nsp": 1 / 3, "aux": 0.0}
    assert counts.weights(0, 2) == {"mlm": 0.25, "nsp": 2 / 3, "aux": 0.5}
    assert counts.weights(0, 1, reduction="sum") == {"mlm": 0.0, "nsp": 1.0, "aux": 0.0}
    named = Counts.read({"mlm": lambda batch: [0, 2], "aux": lambda batch: [0, 1]}, view_of(2))
    assert named.weights(0, 1) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, -2, 3], "count of sample 1 is -2: counts are not negative"),
        ([1.0, 2.0, float("nan")], "count of sample 2 is nan: counts are finite"),
        ([1, float("inf"), 1], "count of sample 1 is inf: counts are finite"),
        (torch.tensor([1.0, float("-inf"), 1.0]), "count of sample 1 is -inf"),
        ([0, 0, 0], r"count is zero for all 3 samples.*\(is every label ignored\?\)"),
        (torch.zeros(3), "count is zero for all 3 samples"),
        ([1, 2], "count returned 2 counts for a batch of 3 samples: it must return one count per sample"),
        (torch.ones(4), "count returned 4 counts for a batch of 3 samples"),
        ([], "count returned 0 counts for a batch of 3"),
        (7, r"count returned 7 \(of type int\): it must return one count per sample\n.*torch.full\(\(N,\), count\)"),
        (torch.tensor(7), r"count returned a tensor of shape \(\): it must return one count per sample\n.*torch.full\(\(N,\), count\)"),
        (
            torch.ones(3, 2),
            r"count returned a tensor of shape \(3, 2\): it must return one count per sample\n  sum over every dimension but the first",
        ),
        (np.ones((3, 2)), r"count returned a tensor of shape \(3, 2\)"),
        (None, r"count returned None \(of type NoneType\): it must return one number per sample"),
        ("123", r"count returned '123' \(of type str\)"),
        ([1, "2", 3], r"count of sample 1 is '2' \(of type str\): counts are numbers"),
        ([1, 2j, 3], "count of sample 1 is 2j"),
        ([1, Decimal(2), 3], "count of sample 1 is Decimal"),
        ([1, torch.ones(2), 3], r"count of sample 1 is a tensor of shape \(2,\): counts are numbers"),
        ({"mlm": [1, 2, 3]}, "count returned a dict: give a dict of functions instead.*'mlm'"),
        ([1e308, 1e308, 1e308], "count adds up to more than a float can hold"),
        ([10**400, 1.0, 1], "count adds up to more than a float can hold"),
    ],
)
def test_counts_that_make_no_sense_are_named(values: Any, message: str) -> None:
    with pytest.raises(CountError, match=message):
        read(values, 3)
    if not isinstance(values, dict):
        with pytest.raises(CountError, match=message.replace("count", r"count\['mlm'\]", 1)):
            Counts.read({"nsp": None, "mlm": lambda batch: values}, view_of(3))


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (3, r"count is 3 \(of type int\): it must be None \(samples\), a function"),
        (torch.ones(3), r"count is a tensor of shape \(3,\): it must be"),
        ({}, r"count is the dict \{\}"),
        ({"mlm": 3}, r"count\['mlm'\] is 3"),
        ({1: None}, r"count is the dict \{1: None\}: its keys are the names"),
    ],
)
def test_a_count_of_the_wrong_kind_is_named(count: Any, message: str) -> None:
    with pytest.raises(CountError, match=message):
        Counts.read(count, view_of(3))


def test_errors_of_the_count_function_pass_through() -> None:
    def broken(batch: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Counts.read(broken, view_of(3))
