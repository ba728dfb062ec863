"""The decision how the fields of a ragged batch are cut, once all of it has been seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from elastic_mbs.batch.containers import Path, dotted
from elastic_mbs.batch.ragged.fields import RaggedField, RowsOf
from elastic_mbs.batch.ragged.relations import Belongs, How, Member, Relation, rows_in
from elastic_mbs.batch.ragged.rows import Rows, whole_numbers
from elastic_mbs.errors import BatchError


class RaggedNode(Protocol):
    """A value of the batch whose cut is to be settled."""

    path: Path
    value: Any
    ragged: RaggedField | None
    dim: int
    size: int


Asked = Sequence[tuple[RaggedNode, Member]]


def settle(
    batch: Any,
    asked: Asked,
    samples: int | None,
    known: dict[Path, Any],
    plain: Iterable[Path],
) -> int:
    """Settle how ragged fields are cut, and return the number of samples.

    Args:
        batch: all of it, in which the sources are found.
        asked: the fields.
        samples: of the other parts of the batch; None where there are none.
        known: readings of earlier batches; those of this one are added.
        plain: fields with one value per sample beside ragged ones.

    Raises:
        BatchError: the fields contradict each other, or can be read in two ways.
    """
    known |= {path: Belongs.SAMPLES for path in plain if path not in known}
    settled = _Settled(batch, asked, samples)
    for node, member in asked:
        node.ragged = settled.field(node.path, node.value, member, known)
        if node.ragged is not None:
            node.dim, node.size = node.ragged.dim, settled.samples
    settled.ask()
    return settled.samples


class _Settled:
    """The relations of one batch, each source read once.

    Attributes:
        samples: of the batch.
    """

    def __init__(self, batch: Any, asked: Asked, samples: int | None) -> None:
        self._batch = batch
        self._values: dict[Any, tuple[Tensor, str]] = {}
        self._rows: dict[Any, Rows] = {}
        self._unclear: list[tuple[Path, Relation, int]] = []  # with their rows
        self._rivals: list[tuple[Path, int]] = []  # of nodes or of edges, with their rows
        for node, member in asked:
            values, name = self._source(node.path, member.relation)
            told = member.relation.samples(values)
            if told is not None and samples is not None and told != samples:
                raise BatchError(
                    f"{name} tells of {told} samples, and other parts of the batch have {samples}"
                    f"{member.relation.hint}"
                )
            samples = told if samples is None else samples
        if not samples:
            raise BatchError(self._without_samples(asked))
        self.samples = samples

    def _without_samples(self, asked: Asked) -> str:
        names = ", ".join([dotted(node.path) for node, _ in asked[:6]])
        told = next((member.relation.tells for _, member in asked if member.relation.tells), "")
        way = told or "the rows of each sample do: dims=cut.ragged(..., lengths=...)"
        seen = max(
            [int(each.max()) + 1 for each, _ in self._values.values() if len(each)], default=0
        )
        for node, member in asked:
            if not member.sure and _length(node.value) == seen:
                name = dotted(node.path)
                way += f'\n  if "{name}" has one row per sample: dims={{"{name}": 0}}'
        return (
            f"nothing tells how many samples the batch has: {names} hold rows that belong to "
            f"samples\n  {way}"
        )

    def _source(self, path: Path, relation: Relation) -> tuple[Tensor, str]:
        value, name, place = relation.find(self._batch, path)
        key = id(relation) if place is None else place
        if key not in self._values:
            self._values[key] = whole_numbers(value, name, relation.shape), name
        return self._values[key]

    def _rows_of(self, path: Path, relation: Relation, total: int) -> Rows:
        values, source = self._source(path, relation)
        key = (id(values), relation.how, total if relation.how is How.OFFSETS else 0)
        if key not in self._rows:
            self._rows[key] = relation.rows(values, self.samples, total, source)
        return self._rows[key]

    def field(
        self, path: Path, value: Any, member: Member, known: dict[Path, Any]
    ) -> RaggedField | None:
        """Return the way to cut one field; None for one that every piece gets whole.

        Args:
            path: of the field.
            value: of the field.
            member: its part in the batch.
            known: readings of earlier batches; this one's is added.
        """
        if member.starts is not None:
            return member.starts
        relation, name = member.relation, f'"{dotted(path)}"'
        rows = self._rows_of(path, relation, rows_in(value, member.dim))
        if not member.sure:
            reading = self._reading(path, value, member, rows, known)
            if reading not in (Belongs.ROWS, Belongs.EDGES):
                return RowsOf(Rows(list(range(self.samples + 1)))) if reading else None
        into = member.into
        pointed = None if into is None else self._rows_of(path, into, 0)
        return member.field(value, rows, name, pointed)

    def _reading(
        self, path: Path, value: Any, member: Member, rows: Rows, known: dict[Path, Any]
    ) -> Belongs | None:
        """Return how a field with as many rows as a relation tells of is read; None: is asked."""
        size, relation = _length(value), member.relation
        if member.rival and self.samples > 1:
            self._rivals.append((path, size))
            return None
        # fewer rows than samples: the part that tells how many these are can be the odd one
        by_index = relation.how is How.INDEX and isinstance(relation.by, str)
        fewer = by_index and 0 < size < self.samples
        if self.samples == 1 or not (fewer or size == self.samples):
            if not member.rival:
                known[path] = relation.belongs
            return Belongs.ROWS
        one_each = size == self.samples and rows.bounds == list(range(size + 1))
        if one_each and rows.order is None:
            return Belongs.ROWS
        if path not in known:
            self._unclear.append((path, relation, size))
        return known.get(path)

    def ask(self) -> None:
        """Raise a BatchError about the fields that can be read in two ways."""
        if self._rivals:
            raise BatchError(self._nodes_or_edges())
        if not self._unclear:
            return
        path, relation, size = self._unclear[0]
        alike = [
            dotted(other)
            for other, each, rows in self._unclear
            if each is relation and rows == size
        ]
        names, key = ", ".join(f'"{name}"' for name in alike), self._source(path, relation)[1]
        way = f"cut.ragged({names}, by={key})"
        if relation.how in (How.OFFSETS, How.CUMULATED):
            way = f"cut.packed({names}, cu_seqlens={key})"
        plain = ", ".join(f'"{name}": 0' for name in alike)
        one_each = f"\n  one row per sample: dims={{{plain}}}" if size == self.samples else ""
        raise BatchError(
            f"{_some(alike)} can be read in two ways beside {key}: {size} rows, in a batch of "
            f"{self.samples} samples{one_each}\n"
            f"  rows that {key} gives to the samples: dims={way}"
        )

    def _nodes_or_edges(self) -> str:
        paths = [path for path, _ in self._rivals]
        path, size = self._rivals[0]
        batch, edges = dotted((*path[:-1], "batch")), dotted((*path[:-1], "edge_index"))
        alike = [dotted(each) for each in paths if each[:-1] == path[:-1]]
        names = ", ".join(f'"{name}"' for name in alike)
        text = (
            f'{_some(alike)} can be read in two ways beside "{edges}": {size} rows, of {size} '
            f'nodes and {size} edges\n  rows of nodes: dims=cut.ragged({names}, by="{batch}")\n'
            f'  rows of edges: let the name begin with "edge_", as in "edge_{path[-1]}"'
        )
        if size == self.samples:
            plain = ", ".join(f'"{name}": 0' for name in alike)
            text += f"\n  one row per graph: dims={{{plain}}}"
        return text


def _some(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names[:4]) + (
        f" and {len(names) - 4} more" if len(names) > 4 else ""
    )


def _length(value: Any) -> int:
    shape = getattr(value, "shape", None)
    return len(value) if shape is None else int(shape[0])
