"""Sorted by length, each sample comes once, with its counts, and loses only padding."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_mbs import cut
from elastic_mbs.batch.containers import register_splitter
from elastic_mbs.batch.counts import Counts, count_tokens
from elastic_mbs.batch.join import Order, join
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError, UsageError
from tests.helpers.steps import there

LENGTHS = [3, 1, 6, 2, 6, 4]


def padded(lengths: list[int], width: int) -> dict[str, Any]:
    """Return tokens that all differ, their mask, and labels, every third of which is ignored."""
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    tokens = (torch.arange(mask.numel()).reshape(mask.shape) + 1) * mask
    return {
        "tokens": tokens,
        "mask": mask,
        "labels": torch.where((mask > 0) & (tokens % 3 > 0), tokens, -100),
    }


def view(
    batch: Any,
    length: Any = "mask",
    trim: Any = None,
    dims: Any = None,
    warned: list[str] | None = None,
) -> BatchView:
    told = [] if warned is None else warned
    return BatchView(
        batch, dims, by_length=ByLength(length, trim, lambda kind, text: told.append(text))
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(0, 3),
    st.booleans(),
    st.data(),
)
def test_pieces_hold_each_sample_once_and_no_needless_padding(
    lengths: list[int], more: int, by_mask: bool, data: st.DataObject
) -> None:
    batch = padded(lengths, max(lengths) + more) | {
        "index": torch.arange(len(lengths)),
        "names": [f"sample {i}" for i in range(len(lengths))],
    }
    read = view(batch, "mask" if by_mask else lambda b: b["mask"].sum(1))
    counts = (
        Counts.read(count_tokens("labels"), read) if bool((batch["labels"] != -100).any()) else None
    )
    cuts = sorted({0, len(lengths), *data.draw(st.lists(st.integers(0, len(lengths))))})
    seen: list[int] = []
    for start, stop in pairwise(cuts):
        piece = read.piece(start, stop)
        own = piece["index"].tolist()
        seen += own
        width = max(lengths[i] for i in own) if read.sorted is not None else max(lengths) + more
        assert piece["names"] == [batch["names"][i] for i in own]
        assert all(
            torch.equal(piece[name], batch[name][own, :width])
            for name in ("tokens", "mask", "labels")
        )
        if counts is not None:
            terms = (piece["labels"] != -100).sum()
            assert there(counts.weights(start, stop) or {None: 0.0})[None] == pytest.approx(
                float(terms / counts.total)
            )
    # stable, so it repeats
    assert seen == sorted(
        range(len(lengths)), key=lambda i: -lengths[i] if read.sorted is not None else i
    )
    # one position of padding in the whole batch is no evidence, and not worth a cut
    padding = len(lengths) * (max(lengths) + more) - sum(lengths)
    assert (read.sorted is None) == (padding < 2)


def test_containers_and_dimensions_are_gathered_and_the_rest_passes_whole() -> None:
    batch = padded(LENGTHS, 7)
    batch |= {
        "columns": batch["tokens"].T.contiguous(),
        "array": batch["tokens"].numpy(),
        "lists": [[n] for n in LENGTHS],
        "scale": 2.0,
    }
    batch |= {
        "table": torch.eye(7),
        "pair": (batch["tokens"][:, None], {"scores": torch.randn(6, 4)}),
        "stacked": torch.stack([batch["mask"]] * 3),
    }
    read = view(
        batch,
        trim={"stacked": 2, "pair.0": -1},
        dims={"columns": 1, "stacked": 1} | cut.whole("table") | cut.items("lists"),
    )
    piece = read.piece(2, 5)
    picked = [5, 0, 3]  # of 4, 3 and 2 tokens
    assert torch.equal(piece["columns"], batch["tokens"][picked, :4].T)
    assert np.array_equal(piece["array"], batch["array"][picked, :4])
    assert piece["lists"] == [[4], [3], [2]]
    assert piece["lists"][0] is not batch["lists"][5]
    assert torch.equal(piece["stacked"], batch["stacked"][:, picked, :4])
    assert torch.equal(piece["pair"][0], batch["tokens"][picked, None, :4])
    assert torch.equal(piece["pair"][1]["scores"], batch["pair"][1]["scores"][picked])
    assert piece["scale"] == 2.0
    assert piece["table"] is batch["table"]
    piece["tokens"].zero_()
    assert bool(batch["tokens"].any())  # pieces are copies, so a replay sees what was there


def test_elements_are_the_longest_samples_and_padding_is_worth_nothing() -> None:
    read = view(padded(LENGTHS, 9) | {"classes": torch.zeros(6, 5)})
    assert read.elements == 3 * 6 + 5
    assert read.worth == -(-(3 * sum(LENGTHS) + 5 * 6) // (3 * 6 + 5))
    texts = view(["aaaa", "a", "aa"], lambda batch: list(map(len, batch)))
    # nothing to count but the length
    assert (texts.elements, texts.worth, texts.piece(0, 3)) == (4, 2, ["aaaa", "aa", "a"])
    rows = view(
        [torch.zeros(n, 2) for n in (2, 6, 1)],
        lambda batch: [len(row) for row in batch],
        dims=cut.items(),
    )
    assert (rows.elements, rows.worth) == (12, 2)


def other(kind: str, width: int = 6) -> dict[str, Tensor]:
    rows = torch.arange(1, 6 * width + 1).reshape(6, width)
    return padded(LENGTHS, 6) | {"other": rows.double() if kind == "scores" else rows}


@pytest.mark.parametrize("length", ["mask", lambda batch: batch["mask"].sum(1)])
def test_a_tensor_as_long_by_accident_is_kept_whole_and_named_once(length: Any) -> None:
    warned: list[str] = []
    # class scores, or a target sequence with its own lengths
    piece = view(other("targets"), length, warned=warned).piece(3, 6)
    assert piece["tokens"].shape == (3, 3)
    assert piece["other"].shape == (3, 6)
    (text,) = warned
    assert "'other'" in text
    assert "trim={'other': 1}" in text
    for trim, width in (({"other": None}, 6), ({"other": 1}, 3)):
        assert view(other("targets"), length, trim, warned=warned).piece(3, 6)["other"].shape == (
            3,
            width,
        )
    assert len(warned) == 1


def test_a_tensor_that_once_held_more_than_padding_is_never_trimmed_again() -> None:
    by_length = ByLength("mask", None, lambda kind, text: None)
    BatchView(other("scores", 5), by_length=by_length)
    unlucky = BatchView(padded(LENGTHS, 6) | {"other": torch.zeros(6, 6)}, by_length=by_length)
    assert unlucky.piece(3, 6)["other"].shape == (3, 6)
    assert view(padded(LENGTHS, 6) | {"other": torch.zeros(6, 6)}).piece(3, 6)["other"].shape == (
        3,
        3,
    )


class Ragged:
    rows = 6


register_splitter(
    Ragged,
    length=lambda batch: batch.rows,
    slice=lambda batch, start, stop: list(range(start, stop)),
)
RIGHT = padded(LENGTHS, 6)


@pytest.mark.parametrize(
    ("batch", "length", "trim", "says"),
    [
        (RIGHT, "no_mask", None, "there is no 'no_mask'"),
        (RIGHT | {"mask": RIGHT["mask"].flip(1)}, "mask", None, "pad on the right"),
        (RIGHT | {"mask": RIGHT["mask"] == 0}, "mask", None, r"\(b\['mask'\] == 0\).sum\(1\)"),
        (RIGHT | {"mask": RIGHT["mask"].double()}, "mask", None, "no mask of shape"),
        (RIGHT | {"mask": RIGHT["mask"].sum(1)}, "mask", None, "no mask of shape"),
        (RIGHT, lambda batch: torch.ones(5), None, "batch of 6 samples"),
        (RIGHT, lambda batch: [1, 2, 3, 4, 5, -1], None, "0 or more"),
        (RIGHT, lambda batch: {"lengths": 3}, None, "whole number"),
        (RIGHT, lambda batch: batch["mask"].sum(1) / 2, None, "whole number"),
        (RIGHT, "mask", {"tokens": 0}, 'trim says dim 0 of "tokens"'),
        (
            RIGHT | {"short": torch.zeros(6, 5)},
            "mask",
            {"short": 1},
            "the padded length there should be 6",
        ),
        (RIGHT | {"rows": Ragged()}, "mask", None, "make it a list"),
    ],
)
def test_what_cannot_be_sorted_or_trimmed_is_refused_with_the_way_out(
    batch: Any, length: Any, trim: Any, says: str
) -> None:
    with pytest.raises(BatchError, match=says):
        view(batch, length, trim)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_length_advised_for_a_mask_of_padding_is_right_when_followed(
    nested: bool, dim: int
) -> None:
    padding = (RIGHT["mask"] == 0).movedim(0, dim)
    batch: Any = {"padding": padding, "x": torch.zeros(6, 3)}
    batch = {"inputs": (batch,)} if nested else batch
    dims = {"padding": dim}
    with pytest.raises(BatchError, match="pad on the right") as refused:
        view(batch, "padding", dims=dims)
    advised = eval(str(refused.value).partition("length=lambda b: ")[2], {"b": batch})
    assert advised.tolist() == LENGTHS
    followed = view(batch, lambda b: advised, dims=dims).sorted
    assert followed is not None
    assert followed.lengths == sorted(LENGTHS, reverse=True)


def test_outputs_of_a_width_that_is_none_of_the_pieces_are_asked_about() -> None:
    made = [{"square": torch.ones(n, n + 1)} for n in (2, 3)]
    order = Order.of([2, 4, 0, 3, 1], [6, 6, 4, 3, 2], [(0, 2), (2, 5)])
    with pytest.raises(UsageError, match=r"(?s)output square has rows of the shapes .*pad=0"):
        join(made, [2, 3], order=order)


@pytest.mark.parametrize("place", [lambda t: t, lambda t: t.numpy()])
def test_outputs_come_in_the_batchs_order_and_as_wide_as_its_longest_sample(
    place: Callable[[Tensor], Any],
) -> None:
    order, widths, pieces = [2, 4, 5, 0, 3, 1], [6, 6, 4, 3, 2, 1], [(0, 2), (2, 5)]
    rows, wide = torch.arange(6.0), torch.arange(36.0).reshape(6, 6) + 1
    made = [
        {
            "row": place(rows[order[start:stop]]),
            "wide": wide[order[start:stop], : widths[start]],
            "names": [str(i) for i in order[start:stop]],
            "loss": float(start),
        }
        for start, stop in pieces
    ]
    joined = join(made, [2, 3], order=Order.of(order, widths, pieces))
    assert list(joined["row"]) == [0, 2, 3, 4, 5]
    assert joined["names"] == ["0", "2", "3", "4", "5"]
    assert torch.equal(
        joined["wide"],
        torch.where(
            torch.tensor([4, 6, 4, 6, 4])[:, None] > torch.arange(6), wide[[0, 2, 3, 4, 5]], 0.0
        ),
    )
    assert joined["loss"] == [0.0, 2.0]


def test_one_value_beyond_a_length_is_no_evidence_of_padding() -> None:
    # four class scores of three texts of at most four tokens
    batch = {"mask": torch.ones(3, 4).long(), "scores": torch.arange(12.0).view(3, 4)}
    batch["mask"][2, 3] = 0
    for length in ("mask", lambda batch: batch["mask"].sum(1)):
        read = view(batch, length)
        assert torch.equal(read.piece(2, 3)["scores"], batch["scores"][2:])
    named = view(batch, trim={"scores": 1, "mask": 1})
    assert named.piece(2, 3)["scores"].shape == (1, 3)
