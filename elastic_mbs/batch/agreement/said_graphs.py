"""Graphs in a dict of which `dims` says how a field is cut.

What holds numbers of nodes or graphs counts from 0 in each piece, if `dims` says nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic_mbs.batch.layout import Cut, Node, where
from elastic_mbs.batch.ragged.fields import Pointers
from elastic_mbs.errors import BatchError

_OF_NODE = ("batch", "x", "pos", "z")


def check_said_graphs(root: Node, samples: int) -> None:
    """Refuse numbers of nodes or graphs that every piece would get as they are in the batch.

    Raises:
        BatchError: `dims` says so of `edge_index`, `batch` or `ptr`.
    """
    todo = [root] if samples > 1 else []
    while todo:
        node = todo.pop()
        todo.extend([child for child in node.children.values() if child.children])
        if "edge_index" in node.children:
            _check_edges(node.children)
            _check_graphs(node.children, samples)


def _check_edges(fields: Mapping[Any, Node]) -> None:
    edges, numbers = fields["edge_index"], _numbers(fields["edge_index"])
    if isinstance(edges.ragged, Pointers) or numbers is None or numbers.shape[:-1] != (2,):
        return
    nodes = [fields[name].ragged for name in _OF_NODE if name in fields]
    for ragged in nodes:
        rows = None if ragged is None else ragged.rows
        # numbers that count from 0 in each graph, or in one that all share, are right as they are
        if rows is not None and max(rows.lengths) <= int(numbers.max()) < rows.total:
            raise BatchError(
                f"{where(edges.path)} holds numbers of nodes, which are others in a piece, and "
                f"dims= says how it is cut\n  {_way_out(fields)}"
            )


def _check_graphs(fields: Mapping[Any, Node], samples: int) -> None:
    for name in ("batch", "ptr"):
        field = fields.get(name)
        numbers = None if field is None or field.cut is not Cut.WHOLE else _numbers(field)
        if field is None or numbers is None or numbers.ndim != 1:
            continue
        if (len(numbers) - 1 if name == "ptr" else int(numbers.max()) + 1) == samples:
            raise BatchError(
                f"{where(field.path)} tells of {samples} graphs, as many as there are samples, and "
                f"dims= gives every piece all of it\n  {_way_out(fields)}\n"
                "  if the step picks its graphs out of all by their numbers, give it another name"
            )


def _way_out(fields: Mapping[Any, Node]) -> str:
    add = "" if "batch" in fields else 'add "batch" with the graph of each node, and '
    return f'{add}leave the fields of the graphs out of dims=: they go with "batch"'


def _numbers(field: Node) -> torch.Tensor | None:
    """Return the whole numbers of a field; None for all else."""
    if not hasattr(field.value, "shape") or field.children:
        return None
    found = torch.as_tensor(field.value)
    kinds = (torch.int32, torch.int64)
    return found if found.dtype in kinds and found.numel() else None
