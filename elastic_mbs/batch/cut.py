"""The words of `dims=`, by which the user says how a value is cut where its shape does not tell.

The cutting itself is in `elastic_mbs.batch.layout`, that of rows which are no samples in
`elastic_mbs.batch.ragged`.

Each function returns a dict from a name, a dotted path or an index to a reading; `|` joins them
with each other and with plain dimensions: `dims={"position_ids": 1} | cut.whole("mask")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from torch import Tensor

from elastic_mbs.batch.containers import Path
from elastic_mbs.batch.ragged.relations import Belongs, How, Member, Part, Relation
from elastic_mbs.errors import UsageError

__all__ = ["Dims", "fields", "items", "offsets", "packed", "ragged", "whole"]


class ListLayout(Enum):
    """A reading of a list whose type does not decide it."""

    ITEMS = auto()  # one item per sample
    FIELDS = auto()  # each element holds all samples


# Name, dotted path or index → dimension of the samples, None (pass whole), a `ListLayout` or the
# part in a relation of rows and samples. The empty name is the batch itself.
Dims = Mapping[Any, int | ListLayout | Member | None]
Name = str | int
# How values were read in this batch and in earlier ones, where only their sizes tell.
Known = dict[Path, ListLayout | Belongs]


def whole(*names: str | int) -> dict[str, Any]:
    """Pass these parts whole to every piece: `dims=cut.whole("class_weights")`."""
    return {str(name): None for name in names}


def items(*names: str | int) -> dict[str, Any]:
    """Read these lists or tuples as one item per sample: `dims=cut.items("images")`.

    Without a name: the batch itself.
    """
    return {str(name): ListLayout.ITEMS for name in names or ("",)}


def fields(*names: str | int) -> dict[str, Any]:
    """Read these lists as fields that each hold all samples: `dims=cut.fields("views")`.

    Without a name: the batch itself.
    """
    return {str(name): ListLayout.FIELDS for name in names or ("",)}


def ragged(
    *names: Name,
    by: Name | None = None,
    lengths: Name | Sequence[int] | Tensor | Callable[[Any], Any] | None = None,
    column: int | None = None,
    dim: int = 0,
) -> dict[str, Any]:
    """Cut fields of R rows that belong to N samples in unequal numbers: boxes, tokens, nodes.

    Exactly one of three tells which rows are whose:

    - `cut.ragged("bboxes", "cls", by="batch_idx")`: a field of shape (R,) or (R, 1) holds the
      number of each row's sample. In each piece it counts from 0. Where it is not sorted, a piece
      keeps its rows in the batch's order.
    - `cut.ragged("targets", lengths="target_lengths")`: a field of shape (N,) holds the rows of
      each sample, which lie one after the other.
    - `cut.ragged("targets", column=0)`: a column of the field itself, of shape (R, C), holds the
      number of each row's sample (YOLOv5).

    Args:
        names: tensors or arrays with R rows, or lists of R items; also containers of those.
        by: the name of the field with the number of each row's sample. Other fields tell N.
        lengths: the name of the field with the rows of each sample; the numbers themselves, or a
            function batch → N numbers.
        column: the column with the number of each row's sample.
        dim: the dimension of the rows.
    """
    if sum(each is not None for each in (by, lengths, column)) != 1 or not names:
        raise UsageError(
            'cut.ragged needs the names of fields with rows, and one of by="…" (a field with the '
            'number of each row\'s sample), lengths="…" (a field with the rows of each sample) '
            "and column=0 (of the rows)"
        )
    if by is not None and not _is_name(by):
        raise UsageError(
            f"cut.ragged(by={by!r:.60}): by= is the name of a field with the number of each row's "
            "sample; the rows of each sample go into lengths="
        )
    if column is not None:
        _check_int("column", column)
        return _members(names, Relation(How.COLUMN, "", column), 0)
    _check_int("dim", dim)
    if by is not None:
        relation = Relation(How.INDEX, by)
        return _members(names, relation, dim) | {str(by): Member(relation, Part.BY)}
    if lengths is None or isinstance(lengths, bool | float | bytes):
        raise UsageError(f"cut.ragged(lengths={lengths!r}): give a name, numbers, or a function")
    return _members(names, Relation(How.LENGTHS, lengths), dim)


def offsets(
    *names: Name, offsets: Name = "offsets", include_last_offset: bool = False
) -> dict[str, Any]:
    """Cut the bags of a `torch.nn.EmbeddingBag`: `cut.offsets("input", offsets="offsets")`.

    Args:
        names: fields with R rows: the `input` of shape (R,), `per_sample_weights`.
        offsets: the name of the field with the first row of each bag, of shape (N,). In each piece
            it begins with 0.
        include_last_offset: it is of shape (N + 1,), with R at the end.
    """
    if not names:
        raise UsageError('cut.offsets needs the names of fields with rows: cut.offsets("input")')
    how = How.CUMULATED if include_last_offset else How.OFFSETS
    relation = Relation(how, _checked_name("offsets", offsets))
    return _members(names, relation, 0) | {str(offsets): Member(relation, Part.BY)}


def packed(
    *names: Name,
    cu_seqlens: Name | Sequence[Name] = "cu_seqlens",
    max_length: Name | Sequence[Name] = (),
    index: Name | Sequence[Name] = (),
    dim: int | None = None,
) -> dict[str, Any]:
    """Cut rows into which N sequences were packed without padding, between the sequences.

    `cut.packed("input_ids", "position_ids", "labels", cu_seqlens="cu_seqlens")`

    Args:
        names: fields of shape (1, T) or (T,), with any dimensions around that of the T tokens.
        cu_seqlens: the name of the field of shape (N + 1,) with the first token of each sequence,
            and T at the end; or several names of equal ones. In each piece it begins with 0.
        max_length: the names of numbers that are the length of the longest sequence. In each piece
            it is that of the piece.
        index: the names of fields with the number of each token's sequence (`seq_idx`). In each
            piece it counts from 0.
        dim: the dimension of the tokens, where several are T long.
    """
    cumulated = _names(cu_seqlens)
    if not names or not cumulated:
        raise UsageError(
            'cut.packed needs the names of fields with tokens: cut.packed("input_ids", "labels", '
            'cu_seqlens="cu_seqlens")'
        )
    if dim is not None:
        _check_int("dim", dim)
    relation = Relation(How.CUMULATED, _checked_name("cu_seqlens", cumulated[0]))
    found = _members(names, relation, dim)
    for name in cumulated:
        own = Relation(How.CUMULATED, _checked_name("cu_seqlens", name))
        found[str(name)] = Member(own, Part.BY)
    for name in _names(max_length):
        found[str(name)] = Member(relation, Part.LONGEST)
    for name in _names(index):
        found[str(name)] = Member(relation, Part.NUMBER, dim)
    return found


def _members(names: Sequence[Name], relation: Relation, dim: int | None) -> dict[str, Any]:
    return {str(_checked_name("a name", name)): Member(relation, Part.ROWS, dim) for name in names}


def _names(given: Name | Sequence[Name]) -> Sequence[Name]:
    return (given,) if isinstance(given, str | int) else tuple(given)


def _is_name(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _checked_name(what: str, value: Any) -> Any:
    if not _is_name(value):
        raise UsageError(f"{what} is {value!r:.60}: say a name, a dotted path or an index")
    return value


def _check_int(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (what == "column" and value < 0):
        raise UsageError(f"{what}={value!r} is no number of a {what}")
