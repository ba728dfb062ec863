"""Ragged batches of every kind, made of samples; and the samples of their pieces, read back.

Both are written out sample by sample, with nothing of the product's.
"""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Sample = dict[str, Tensor]
LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def samples_of(lengths: list[int]) -> list[Sample]:
    """Return samples with different values everywhere: rows (L, 2), tokens (L,) and one value."""
    found, row = [], 0
    for number, length in enumerate(lengths):
        tokens = torch.arange(row, row + length)
        found.append(
            {
                "rows": torch.stack([tokens, tokens + 1000], 1).double() / 7,
                "tokens": tokens + 1,
                "one": torch.tensor(float(number)),
            }
        )
        row += length
    return found


def _starts(samples: list[Sample]) -> list[int]:
    starts = [0]
    for sample in samples:
        starts.append(starts[-1] + len(sample["tokens"]))
    return starts


def by_index(samples: list[Sample], *, floats: bool = False) -> dict[str, Any]:
    index = [number for number, each in enumerate(samples) for _ in each["tokens"]]
    return {
        "img": torch.stack([each["one"] for each in samples]),
        "bboxes": torch.cat([each["rows"] for each in samples]),
        "cls": torch.cat([each["tokens"] for each in samples])[:, None],
        "batch_idx": torch.tensor(index, dtype=torch.float32 if floats else torch.int64),
    }


def by_lengths(samples: list[Sample]) -> tuple[Any, ...]:
    return (
        torch.stack([each["one"] for each in samples]),
        torch.cat([each["tokens"] for each in samples]),
        torch.tensor([len(each["tokens"]) for each in samples]),
    )


def bags(samples: list[Sample], *, last: bool) -> dict[str, Any]:
    starts = _starts(samples)
    return {
        "y": torch.stack([each["one"] for each in samples]),
        "input": torch.cat([each["tokens"] for each in samples]),
        "per_sample_weights": torch.cat([each["rows"][:, 0] for each in samples]),
        "offsets": torch.tensor(starts if last else starts[:-1]),
    }


def packed(samples: list[Sample]) -> dict[str, Any]:
    tokens = torch.cat([each["tokens"] for each in samples])
    cumulated = torch.tensor(_starts(samples), dtype=torch.int32)
    index = [number for number, each in enumerate(samples) for _ in each["tokens"]]
    return {
        "input_ids": tokens[None],
        "labels": tokens[None] * 3,
        "hidden": torch.cat([each["rows"] for each in samples])[None],
        "cu_seq_lens_q": cumulated,
        "cu_seq_lens_k": cumulated,
        "max_length_q": max(len(each["tokens"]) for each in samples),
        "max_length_k": max(len(each["tokens"]) for each in samples),
        "seq_idx": torch.tensor([index], dtype=torch.int32),
    }


def graphs(samples: list[Sample]) -> dict[str, Any]:
    """Return graphs whose nodes are in a ring."""
    edges, node = [], 0
    for each in samples:
        length = len(each["tokens"])
        ring = torch.arange(length)
        edges.append(torch.stack([ring, ring.roll(1)]) + node)
        node += length
    index = [number for number, each in enumerate(samples) for _ in each["tokens"]]
    return {
        "x": torch.cat([each["rows"] for each in samples]),
        "edge_index": torch.cat(edges, 1),
        "edge_attr": torch.cat([each["tokens"] for each in samples]) * 5,
        "batch": torch.tensor(index, dtype=torch.int64),
        "ptr": torch.tensor(_starts(samples)),
        "y": torch.stack([each["one"] for each in samples]),
    }


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same types, dtypes, shapes and bits."""
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor) and one.dtype == other.dtype and bool(torch.equal(one, other))
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
