"""Batches of every kind, and ways to split them."""

from collections import UserDict
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


def rows(n: int, *shape: int) -> Tensor:
    return torch.arange(n * torch.Size(shape).numel()).reshape(n, *shape)


def splits(n: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Return every way to cut n samples into pieces."""
    edges = st.sets(st.integers(1, n - 1)) if n > 1 else st.just(set[int]())
    return edges.map(lambda inner: list(zip([0, *sorted(inner)], [*sorted(inner), n], strict=True)))


class Named(NamedTuple):
    a: Any
    b: Any = None


class Encoding(UserDict[str, Any]):
    """A container like BatchEncoding of Hugging Face.

    It has constructor arguments, an attribute next to the data, and encodings of samples by index.
    """

    def __init__(self, data: dict[str, Any], encodings: Any, *, names: list[str]) -> None:
        super().__init__(data)
        self._encodings = encodings
        self.names = names

    def __getitem__(self, item: Any) -> Any:
        return self._encodings[item] if isinstance(item, int) else self.data[item]
