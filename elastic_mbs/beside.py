"""What containers keep beside their parts, one item per sample: HF `BatchEncoding`'s encodings, say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic_mbs.containers import kind_of


def cut_beside(obj: Any, made: Any, lengths: set[int], start: int, stop: int) -> Any:
    """The piece `made` of `obj`, with its own samples in what `obj` keeps beside its parts, where that is as long as one of them."""
    for name in kind_of(type(obj)).beside:
        items = vars(obj).get(name)
        if isinstance(items, list) and len(items) in lengths:
            vars(made)[name] = items[start:stop]
    return made


def join_beside(made: Any, pieces: list[Any], lengths: Sequence[int]) -> None:
    """Gives `made`, put together from `pieces`, what they keep beside their parts, where that is as long as each of them."""
    for name in kind_of(type(made)).beside:
        items = [vars(piece).get(name) for piece in pieces]
        if all(isinstance(part, list) and len(part) == length for part, length in zip(items, lengths, strict=True)):
            vars(made)[name] = [item for part in items for item in part or ()]
