"""The ways to read parts whose rows are not the samples, and what speaks for each.

A single size that occurs twice speaks for nothing. A way is offered where a whole shape recurs, or
where the numbers in a part fit the rows of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch import cut
from elastic_mbs.batch.agreement.texts import some_of
from elastic_mbs.batch.containers import Path, dotted
from elastic_mbs.batch.layout import Cut, Node, call, quoted
from elastic_mbs.batch.ragged.rows import whole_numbers
from elastic_mbs.errors import BatchError

WHOLE_NUMBERS = {torch.int64, torch.int32}


@dataclass(frozen=True)
class Way:
    """A way to say how some parts are cut."""

    kind: str  # "items", "dim 1", "by", "lengths", "column", "first", "first and end"
    source: Path = ()  # the part that tells which rows are whose

    def meaning(self, paths: Sequence[Path]) -> str:
        """Return when it is right, after "if it has 8 samples, "."""
        names, source = some_of(self.told(paths)), quoted(self.source)
        return {
            "items": f"one per entry of {names}",
            "dim 1": f"on dim 1 of {names}",
            "by": f"{source} has the number of the sample of each row of {names}",
            "column": f"column 0 of {names} has the number of the sample of each row",
            "lengths": f"{source} has the number of rows of each in {names}",
            "first": f"{source} has the first row of each in {names}",
            "first and end": f"{source} has the first row of each in {names}, and the end",
        }[self.kind]

    def text(self, paths: Sequence[Path]) -> str:
        """Return what is pasted after `dims=`."""
        told, source = self.told(paths), quoted(self.source)
        names = ", ".join(map(quoted, told))
        return {
            "items": call("items", *paths),
            "dim 1": f"{{{', '.join(f'{quoted(path)}: 1' for path in paths)}}}",
            "by": f"cut.ragged({names}, by={source})",
            "column": f"cut.ragged({names}, column=0)",
            "lengths": f"cut.ragged({names}, lengths={source})",
            "first": f"cut.offsets({names}, offsets={source})",
            "first and end": f"cut.offsets({names}, offsets={source}, include_last_offset=True)",
        }[self.kind]

    def dims(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Return the value of `text`."""
        names, source = [dotted(path) for path in self.told(paths)], dotted(self.source)
        if self.kind == "items":
            return cut.items(*[name for name in names if name])
        if self.kind == "dim 1":
            return dict.fromkeys(names, 1)
        if self.kind == "column":
            return cut.ragged(*names, column=0)
        if self.kind == "by":
            return cut.ragged(*names, by=source)
        if self.kind == "lengths":
            return cut.ragged(*names, lengths=source)
        last = self.kind == "first and end"
        return cut.offsets(*names, offsets=source, include_last_offset=last)

    def told(self, paths: Sequence[Path]) -> list[Path]:
        """Return the parts whose rows are told of: all but the source."""
        return [path for path in paths if path != self.source or not path]


class Evidence:
    """The numbers and shapes of a batch's parts, which tell about its rows."""

    def __init__(self, leaves: Iterable[Node]) -> None:
        self._leaves = [leaf for leaf in leaves if leaf.cut in (Cut.NARROW, Cut.COPY)]
        found = {leaf.path: _numbers(leaf.value) for leaf in self._leaves}
        self._numbers = {path: each for path, each in found.items() if each is not None}

    def lengths(self) -> set[int]:
        """Return numbers of samples of which only first rows tell."""
        sizes = {leaf.size for leaf in self._leaves}
        return {
            len(each) - 1
            for each in self._numbers.values()
            if _rises(each) and not int(each[0]) and int(each[-1]) in sizes
        }

    def ways(self, leaves: Sequence[Node], fitting: Sequence[Node], samples: int) -> list[Way]:
        """Return the ways that would do for all of some leaves of one size.

        Args:
            leaves: parts of another length than the batch.
            fitting: the parts with one row per sample.
            samples: of the batch.
        """
        each = [
            list(dict.fromkeys([*self._relations(leaf, samples), *_stack(leaf, fitting)]))
            for leaf in leaves
        ]
        return [way for way in each[0] if all(way in ways for ways in each)]

    def _relations(self, leaf: Node, samples: int) -> Iterator[Way]:
        if leaf.cut not in (Cut.NARROW, Cut.COPY):
            return
        for path, told in self._numbers.items():
            kind = _kind(told, leaf, samples)
            if kind is not None:
                yield Way(kind, path)
        if leaf.value.ndim == 2 and leaf.value.shape[1] > 1:
            column = _numbers(leaf.value[:, 0])
            if column is not None and _is_index(column, samples):
                yield Way("column")


def _kind(told: Tensor, leaf: Node, samples: int) -> str | None:
    """Return what some numbers can tell about the rows of a leaf; None for nothing.

    Fewer rows than samples are told of by nothing: labels of two classes add up to as many.
    """
    rows = leaf.size
    if rows < samples:
        return None
    if len(told) == rows and _is_index(told, samples):
        return "by"
    if len(told) == samples and int(told.sum()) == rows:
        return "lengths"
    if not _rises(told) or int(told[0]) or not int(told[-1]):
        return None
    bags = leaf.value.ndim == 1 and rows > samples  # of an EmbeddingBag
    if len(told) == samples and bags and int(told[-1]) <= rows:
        return "first"
    # the leaf has the rows, or is the numbers themselves
    ends = len(told) == samples + 1 and rows in (len(told), int(told[-1]))
    return "first and end" if ends else None


def _stack(leaf: Node, fitting: Sequence[Node]) -> Iterator[Way]:
    """Yield dim 1 for a stack of parts of one shape, such as position ids of three axes."""
    shape = tuple(getattr(leaf.value, "shape", ()))
    others = [tuple(getattr(other.value, "shape", ())) for other in fitting]
    if len(shape) > 2 and leaf.value.dtype in WHOLE_NUMBERS and shape[1:] in others:
        yield Way("dim 1")


def _numbers(value: Any) -> Tensor | None:
    """Return whole numbers of shape (R,) or (R, 1); None for any others."""
    if not value.size if not isinstance(value, Tensor) else not value.numel():
        return None
    try:
        return whole_numbers(value, "")
    except (BatchError, RuntimeError):  # a fake tensor has no numbers
        return None


def _rises(numbers: Tensor) -> bool:
    return bool((numbers[1:] >= numbers[:-1]).all())


def _is_index(numbers: Tensor, samples: int) -> bool:
    """Return whether sorted numbers can be those of samples that mostly have rows."""
    last = int(numbers[-1])
    return _rises(numbers) and 0 <= int(numbers[0]) < last < samples < len(numbers)
