"""The ways to cut one field of a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from elastic_mbs.batch.ragged.rows import Rows


class RaggedField(Protocol):
    """The way to cut one field whose rows are no samples.

    Attributes:
        rows: the rows that a sample brings; None where the field has one value per sample.
        dim: the dimension of the rows.
    """

    @property
    def rows(self) -> Rows | None: ...

    @property
    def dim(self) -> int: ...

    def piece(self, value: Any, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` of the field."""


@dataclass(frozen=True, eq=False, slots=True)
class RowsOf:
    """Rows that go with their samples."""

    rows: Rows
    dim: int = 0
    # what samples before each one need of it; a piece that needs nothing gets None
    needed: Sequence[int] | None = None

    def piece(self, value: Any, start: int, stop: int) -> Any:
        if self.needed is not None and self.needed[start] == self.needed[stop]:
            return None
        return self.rows.cut(value, self.dim, start, stop)


@dataclass(frozen=True, eq=False, slots=True)
class Index:
    """The number of each row's sample, which counts from 0 in each piece."""

    rows: Rows
    dim: int = 0

    def piece(self, value: Any, start: int, stop: int) -> Any:
        part = self.rows.cut(value, self.dim, start, stop)
        if not start:
            return part
        return [each - start for each in part] if isinstance(part, list) else part - start


@dataclass(frozen=True, eq=False, slots=True)
class Pointers:
    """Numbers of other rows, which count from the first of those in each piece."""

    rows: Rows
    starts: Sequence[int]  # the first of the other rows of each sample
    dim: int = 0

    def piece(self, value: Any, start: int, stop: int) -> Any:
        part = self.rows.cut(value, self.dim, start, stop)
        return part - self.starts[start] if self.starts[start] else part


@dataclass(frozen=True, eq=False, slots=True)
class IndexColumn:
    """Rows with the number of their sample in one of their columns."""

    rows: Rows
    column: int
    dim: int = 0

    def piece(self, value: Any, start: int, stop: int) -> Any:
        part = self.rows.cut(value, 0, start, stop)
        if start:
            part = part.clone() if isinstance(part, Tensor) else part.copy()
            part[:, self.column] -= start
        return part


@dataclass(frozen=True, eq=False, slots=True)
class Starts:
    """The first row of each sample, which counts from 0 in each piece."""

    last: bool  # the end of the last sample is in it too
    rows: Rows | None = None
    dim: int = 0

    def piece(self, value: Any, start: int, stop: int) -> Any:
        part = value[start : stop + self.last]
        if not start:
            return part.copy() if not isinstance(part, Tensor | list | tuple) else part
        if isinstance(part, list | tuple):
            return type(part)(each - value[start] for each in part)
        return part - value[start]


@dataclass(frozen=True, eq=False, slots=True)
class Longest:
    """The number of rows of the longest sample, which is another one in each piece."""

    lengths: Sequence[int]
    rows: Rows | None = None
    dim: int = 0

    def piece(self, value: Any, start: int, stop: int) -> Any:
        longest = max(self.lengths[start:stop])
        if isinstance(value, int | float):
            return type(value)(longest)
        if isinstance(value, Tensor):
            return value.new_full(value.shape, longest)
        new = value.copy()
        new[...] = longest
        return new
