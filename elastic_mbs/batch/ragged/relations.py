"""The relations between rows and samples: an index, lengths, offsets, cumulated lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import Path, dotted, kind_of, lookup
from elastic_mbs.batch.ragged.fields import (
    Index,
    IndexColumn,
    Longest,
    Pointers,
    RaggedField,
    RowsOf,
    Starts,
)
from elastic_mbs.batch.ragged.nested import Jagged, is_jagged
from elastic_mbs.batch.ragged.rows import Rows, described, whole_numbers
from elastic_mbs.errors import BatchError

# A name, a dotted path or an index in the batch; or a function of the batch, or the values
# themselves.
Source = str | int | Callable[[Any], Any] | Sequence[int] | Tensor

# A function that returns the tokens of an "image" and a "video" in the texts of a model.
Placeholders = Callable[[], Mapping[str, int]]


class Belongs(Enum):
    """A reading of a value that was clear in one batch, kept for those in which it is not."""

    ROWS = auto()  # its rows belong to samples in unequal numbers
    EDGES = auto()  # the same, and they are edges
    SAMPLES = auto()  # one per sample
    WHOLE = auto()  # the same for all samples


class Part(Enum):
    """The part that a field has in a relation."""

    ROWS = auto()
    BY = auto()  # tells which rows belong to which sample
    NUMBER = auto()  # the number of each row's sample
    POINTERS = auto()  # the numbers of other rows
    JAGGED = auto()  # a nested tensor, which has the relation in itself
    LONGEST = auto()  # the rows of the longest sample


class How(Enum):
    """The message of a relation's source."""

    INDEX = auto()  # the sample of each row
    COLUMN = auto()  # the same, in a column of the rows themselves
    LENGTHS = auto()  # the rows of each sample
    OFFSETS = auto()  # the first row of each sample
    CUMULATED = auto()  # the same, and the end of the last one


@dataclass(frozen=True, eq=False)
class Relation:
    """A source that tells which rows belong to which sample."""

    how: How
    by: Source
    column: int = 0  # of How.COLUMN
    hint: str = ""  # what to do where the values contradict the batch
    tells: str = ""  # what would tell the number of samples, where the values do not
    belongs: Belongs = Belongs.ROWS  # the reading of its rows

    @property
    def shape(self) -> str:
        """The shape of the source, of R rows and N samples."""
        rows = (How.INDEX, How.COLUMN)
        return "(R,)" if self.how in rows else "(N + 1,)" if self.how is How.CUMULATED else "(N,)"

    def find(self, batch: Any, path: Path) -> tuple[Any, str, Any]:
        """Return the value of the source for the field at `path`, its name, and a key for it."""
        if self.how is How.COLUMN:
            value = at(batch, path)
            name = f'column {self.column} of "{dotted(path)}"'
            if getattr(value, "ndim", 0) != 2 or self.column >= value.shape[1]:
                raise BatchError(f"there is no {name}: it is {described(value)}")
            return value[:, self.column], name, path
        if isinstance(self.by, str | int):
            for near in range(len(path) - 1, -1, -1):  # in the container of the field, or around it
                place = (*path[:near], self.by)
                try:
                    return at(batch, place), f'"{dotted(place)}"', place
                except LookupError:
                    continue
            try:
                return lookup(batch, self.by), f'"{self.by}"', self.by
            except LookupError as error:
                raise BatchError(f'"{dotted(path)}" is cut by {self.by!r}: {error}') from error
        if callable(self.by):
            return self.by(batch), f"the lengths of {dotted(path)!r}", None
        return self.by, f"the lengths of {dotted(path)!r}", ("values", id(self.by))

    def samples(self, values: Tensor) -> int | None:
        """Return how many samples the source tells of; None where it does not."""
        if self.how in (How.INDEX, How.COLUMN):
            return None
        return len(values) - (self.how is How.CUMULATED)

    def rows(self, values: Tensor, samples: int, total: int, name: str) -> Rows:
        """Return the rows of each sample.

        Args:
            values: of the source.
            samples: of the batch.
            total: rows of the field, for offsets.
            name: of the source, for an error.

        Raises:
            BatchError: the values contradict the batch.
        """
        if self.samples(values) is None:
            if len(values) and int(values.max()) >= samples:
                raise self._error(
                    f"{name} holds {int(values.max())}, and the samples of the batch are 0 to "
                    f"{samples - 1}"
                )
            return Rows.of_index(values, samples)
        if self.how is How.LENGTHS:
            return Rows.of_lengths(values)
        steps = torch.cat([values, torch.tensor([total])]) if self.how is How.OFFSETS else values
        if not len(steps) or int(steps[0]) or bool((steps[1:] < steps[:-1]).any()):
            raise self._error(
                f"{name} is {values[:8].tolist()}… for {total} rows: it must begin with 0, and go "
                "up to no more than the rows"
            )
        return Rows(steps.tolist())

    def _error(self, text: str) -> BatchError:
        return BatchError(text + self.hint)


@dataclass(frozen=True, eq=False)
class Member:
    """A field of a batch, its relation, and its part in it."""

    relation: Relation
    part: Part
    dim: int | None = 0  # of its rows; None: the one that is as long as there are rows
    # The user or a well-known pair of names says so. Else it has as many rows as the relation tells
    # of, which the samples can have too.
    sure: bool = True
    into: Relation | None = None  # of the rows that pointers point to
    rival: bool = False  # its rows can be edges as well
    needed: Sequence[int] | None = None  # see `RowsOf`

    @property
    def starts(self) -> RaggedField | None:
        """The way to cut the offsets themselves; None for any other part."""
        how = self.relation.how
        if self.part is not Part.BY or how not in (How.OFFSETS, How.CUMULATED):
            return None
        return Starts(how is How.CUMULATED)

    def field(
        self, value: Any, rows: Rows, name: str, into: Rows | None = None
    ) -> RaggedField | None:
        """Return the way to cut the field; None for one that every piece gets whole.

        Args:
            value: of the field.
            rows: of each sample.
            name: of the field, for an error.
            into: the rows that pointers point to.
        """
        if self.part is Part.LONGEST:
            return self._longest(value, rows, name)
        if self.part is Part.JAGGED:
            return Jagged(rows)
        dim = self.dim_of(value, rows.total, name)
        if self.relation.how is How.COLUMN:
            return IndexColumn(rows, self.relation.column)
        if into is not None:
            return Pointers(rows, into.bounds, dim)
        return RowsOf(rows, dim, self.needed) if self.part is Part.ROWS else Index(rows, dim)

    def _longest(self, value: Any, rows: Rows, name: str) -> RaggedField | None:
        numbers = whole_numbers([value] if isinstance(value, int) else value.reshape(-1), name)
        longest = max(rows.lengths)
        if len(numbers) != 1 or int(numbers[0]) < longest:
            raise BatchError(f"{name} is {value}, and the longest sample has {longest} rows")
        # a bound that is larger than any batch's need holds for its pieces, too
        return Longest(rows.lengths) if int(numbers[0]) == longest else None

    def dim_of(self, value: Any, total: int, name: str) -> int:
        """Return the dimension of a field's rows."""
        if isinstance(value, list | tuple):
            if len(value) != total:
                raise BatchError(f"{name} has {len(value)} items, and its rows should be {total}")
            return 0
        shape = tuple(getattr(value, "shape", ()))
        if self.dim is not None:
            if not -len(shape) <= self.dim < len(shape) or shape[self.dim] != total:
                raise BatchError(
                    f"{name} is {described(value)}, and its rows should be {total} on dim "
                    f"{self.dim}"
                )
            return self.dim % len(shape)
        fitting = [dim for dim, size in enumerate(shape) if size == total]
        if shape[:2] == (1, total) and (self.sure or total == 1):
            return 1
        if not fitting or (len(fitting) > 1 and total > 1):
            raise BatchError(
                f"{name} is {described(value)}: {len(fitting)} of its dimensions have {total} "
                "rows\n"
                f"  if one of them holds the rows: dims=cut.packed({name}, cu_seqlens=…, dim=…)\n"
                "  a mask of rows × rows cannot be cut: make it inside loss_fn"
            )
        return fitting[0]


def jagged(value: Any) -> Member | None:
    """Return the member that a nested tensor is; None for one that cannot be cut."""
    if not is_jagged(value):
        return None
    return Member(Relation(How.CUMULATED, value.offsets()), Part.JAGGED)


def rows_in(value: Any, dim: int | None) -> int:
    """Return the number of rows of a field, as its shape tells."""
    if isinstance(value, list | tuple):
        return len(value)
    shape, dim = getattr(value, "shape", ()), dim or 0
    return int(shape[dim]) if -len(shape) <= dim < len(shape) else 0


def at(batch: Any, path: Path) -> Any:
    """Return the value at a path; a LookupError where there is none."""
    for key in path:
        parts = kind_of(type(batch)).take(batch)
        if key not in parts:
            raise LookupError(key)
        batch = parts[key]
    return batch
