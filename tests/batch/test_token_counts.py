"""Labels that are not ignored are counted per sample, wherever in the batch and along whichever dimension they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elastic_mbs.batch.counts import Counts, count_tokens, looks_like_token_labels
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import CountError

LABELS = torch.tensor([[5, -100, 7, 8], [-100, -100, -100, -100], [1, 2, 3, -100]])


@pytest.mark.parametrize(
    ("counter", "batch", "expected"),
    [
        (count_tokens(), {"ids": torch.zeros(3, 4), "labels": LABELS}, [3, 0, 3]),
        (count_tokens(shift=True), {"labels": LABELS}, [2, 0, 2]),
        (count_tokens(ignore_index=7), {"labels": LABELS}, [3, 4, 4]),
        (count_tokens("deep.y"), {"deep": {"y": LABELS}}, [3, 0, 3]),
        (count_tokens("y"), {"deep": {"y": LABELS}}, [3, 0, 3]),
        (count_tokens(1), (LABELS[:, 0], LABELS), [3, 0, 3]),
        (count_tokens(lambda given: given["labels"][:, :2]), {"labels": LABELS}, [1, 0, 2]),
        (count_tokens(), {"labels": LABELS.reshape(3, 2, 2)}, [3, 0, 3]),
        (count_tokens(), {"labels": torch.tensor([1, -100, 0])}, [1, 0, 1]),
        (count_tokens(), {"labels": LABELS.numpy()}, [3, 0, 3]),
        (count_tokens(), {"labels": [torch.tensor([1, -100]), torch.tensor([2, 3, 4]), [5, -100, -100], np.array([-100]), ()]}, [1, 3, 1, 0, 0]),
        (count_tokens(shift=True), {"labels": [torch.tensor([1, -100]), [2, 3, 4], np.array([-100])]}, [0, 2, 0]),
        (count_tokens(), {"labels": [3, -100]}, [1, 0]),
    ],
)
def test_labels_that_are_not_ignored_are_counted_per_sample(counter: Any, batch: Any, expected: list[int]) -> None:
    assert [int(count) for count in counter(batch)] == expected


def test_counts_match_the_mean_that_cross_entropy_takes() -> None:
    logits = torch.randn(3, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = Counts.read(count_tokens(), BatchView({"labels": LABELS}))

    def loss(start: int, stop: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[start:stop].flatten(0, 1), LABELS[start:stop].flatten())

    for split in ([(0, 1), (1, 2), (2, 3)], [(0, 2), (2, 3)]):
        parts = [weights[None] * loss(*bound) for bound in split if (weights := counts.weights(*bound)) is not None]
        assert abs(sum(parts) - loss(0, 3)) < 1e-15


def terms(counter: Any, view: BatchView) -> list[float]:
    """Labels of each sample, as the weights show them."""
    counts = Counts.read(counter, view)
    assert isinstance(counts.total, int)
    shares = [counts.weights(i, i + 1) or {None: 0.0} for i in range(view.length)]
    return [round(share[None] * counts.total) for share in shares]


@pytest.mark.parametrize("kind", [lambda labels: labels, lambda labels: labels.numpy()], ids=["tensor", "numpy"])
def test_tokens_are_counted_along_the_dimension_that_holds_the_samples(kind: Callable[[torch.Tensor], Any]) -> None:
    labels = torch.full((4, 4), -100)  # (T, N), as many steps as samples
    labels[:, 0], labels[:2, 1], labels[0, 2] = 1, 1, 1
    view = BatchView({"x": torch.zeros(4, 4, 3), "labels": kind(labels)}, {"x": 1, "labels": 1})
    assert terms(count_tokens(), view) == [4, 2, 1, 0]
    assert terms(count_tokens(shift=True), view) == [3, 1, 0, 0]


def test_labels_in_a_list_of_fields_are_not_counted_as_samples() -> None:
    column = torch.tensor([1, -100, 1, 1])
    view = BatchView({"x": torch.zeros(4), "labels": [column] * 4})  # what default_collate makes of lists of four
    with pytest.raises(CountError, match="found 4 fields of 4 samples each"):
        Counts.read(count_tokens(), view)
    assert terms(count_tokens(lambda batch: torch.stack(batch["labels"], 1)), view) == [4, 0, 4, 4]
    with pytest.raises(CountError, match="found 2 fields of 2 samples each"):
        Counts.read(count_tokens(lambda batch: batch), BatchView([column[:2], column[:2]]))


@pytest.mark.parametrize(
    ("counter", "batch", "message"),
    [
        (count_tokens(), {"ids": LABELS, "y": LABELS}, r"no 'labels': dict has the parts 'ids', 'y'\n.*count_tokens\(key=\.\.\.\)"),
        (count_tokens("a.b"), {"a": {"c": LABELS}}, r"no 'a\.b': dict has the parts 'a', 'a\.c'"),
        (count_tokens(), LABELS, "no 'labels': .*Tensor has no named parts"),
        (count_tokens("m"), [{"m": LABELS}, {"m": LABELS}], "'m' is not unique"),
        (count_tokens(shift=True), {"labels": LABELS[:, 0]}, r"found labels of shape \(3,\): they must be \(N, L, \.\.\.\)"),
        (count_tokens(), {"labels": torch.tensor(1)}, r"found labels of shape \(\): they must be \(N, \.\.\.\)"),
        (count_tokens(), {"labels": "text"}, r"found 'text' \(of type str\): labels are a tensor"),
        (count_tokens(), {"labels": ["a", "b"]}, "found a list with 'a'"),
        (count_tokens(shift=True), {"labels": [1, 2]}, r"found a list with a tensor of shape \(\)"),
    ],
)
def test_labels_that_are_not_found_are_named(counter: Callable[[Any], Any], batch: Any, message: str) -> None:
    with pytest.raises(CountError, match=message):
        counter(batch)


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"ids": LABELS, "labels": LABELS}, "labels"),
        ({"deep": {"target": LABELS.int()}}, "deep.target"),
        ((LABELS, LABELS), "1"),
        ([torch.zeros(3), LABELS], "1"),
        ({"ids": LABELS}, None),
        ({"labels": LABELS.clamp(min=0)}, None),
        ({"labels": LABELS.double()}, None),
        ({"labels": LABELS.to("meta")}, None),
        ({1: LABELS}, None),
        ({"labels": ["a", "b"]}, None),
        (LABELS, None),
    ],
)
def test_token_labels_are_noticed_by_name_on_the_host_only(batch: Any, name: str | None) -> None:
    assert looks_like_token_labels(BatchView(batch)) == name
