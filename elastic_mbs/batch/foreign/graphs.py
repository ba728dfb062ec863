"""Batches of graphs of PyTorch Geometric, cut as they are now.

A `Batch` keeps the places of each graph's rows from the time when it was collated, and PyG takes
graphs out of it by them. Here the places are found anew for each field: edges by the graph of their
ends, other fields by the places that PyG has, or by the one kind of rows that they can have. What
does not fit is refused by name, since PyG would cut it wrongly or drop it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.errors import BatchError

_WAY = "set it on each Data before collating, or make the edit inside loss_fn"
_OF_NODE = frozenset({"x", "pos", "z"})
_NUMBERS_OF_ROWS = ("index", "face", "ptr", "batch")  # in a name: PyG adds to what it holds


def is_batch_of_graphs(cls: type) -> bool:
    return all(hasattr(cls, name) for name in ("index_select", "from_data_list", "num_graphs"))


def is_graph(cls: type) -> bool:
    """Return whether a type is one graph of PyTorch Geometric."""
    names = ("__cat_dim__", "__inc__")
    return not is_batch_of_graphs(cls) and all(hasattr(cls, name) for name in names)


def number_of_graphs(batch: Any) -> int:
    """Return how many graphs a batch has, or a batch with its places."""
    return batch.graphs if isinstance(batch, Places) else int(batch.num_graphs)


def some_graphs(places: Places, start: int, stop: int) -> Any:
    """Return graphs `start` to `stop` of a batch, of which the places are."""
    batch = places.batch
    names = {name for store in _stores(batch) for name in store}
    # keys that DataLoader(follow_batch=…) has asked for
    follow = sorted(name[:-4] for name in names if name.endswith("_ptr"))
    follow = [name for name in follow if f"{name}_batch" in names]
    graphs = batch.index_select(range(start, stop))
    piece = type(batch).from_data_list(graphs, follow_batch=follow)
    for store, wanted, whole in zip(_stores(piece), _stores(batch), places.whole, strict=True):
        for name in whole:
            store[name] = wanted[name]
        nodes, others = store.get("ptr"), wanted.get("ptr")
        if nodes is not None and others is not None:
            others = others[start : stop + 1].cpu()
            if not torch.equal(nodes.cpu(), others - others[0]):
                raise _refused("ptr", "does not tell of the nodes that the graphs have")
    return piece


def nodes_of_graphs(batch: Any) -> list[int] | None:
    """Return the nodes of each graph; None where there are several kinds, or nothing tells."""
    starts = getattr(batch, "ptr", None)
    return starts.diff().tolist() if isinstance(starts, Tensor) else None


def _stores(batch: Any) -> list[Any]:
    return list(getattr(batch, "stores", ()))


def _refused(name: str, problem: str, way: str = _WAY) -> BatchError:
    return BatchError(f'"{name}" of the batch of graphs {problem}\n  {way}')


class Places:
    """The places of each graph's rows in the present fields of a batch, for all of its pieces.

    Attributes:
        graphs: their number.
        batch: a copy that PyG cuts as it is now.
        whole: names of values that every piece gets whole, of each store.
    """

    def __init__(self, batch: Any) -> None:
        """Find the places.

        Raises:
            BatchError: a field of the batch cannot be cut.
        """
        try:
            self.graphs = int(batch.num_graphs)
        except (AttributeError, ValueError) as error:
            raise BatchError(
                'nothing tells how many graphs the batch has: give it "ptr", or make it with '
                "Batch.from_data_list"
            ) from error
        self.batch, self.whole = batch, list[list[str]]()
        if not _stores(batch):
            return
        self.batch = copy.copy(batch)
        slices, incs = dict[Any, Any](), dict[Any, Any]()
        for store in _stores(self.batch):
            key = getattr(store, "_key", None)  # of a kind of nodes, or of edges
            old_slices, old_incs = (
                kept if key is None else kept.get(key, {})
                for kept in (
                    getattr(batch, "_slice_dict", None) or {},
                    getattr(batch, "_inc_dict", None) or {},
                )
            )
            placed = _Store(self.batch, store, key, self.graphs, old_slices, old_incs)
            self.whole.append(placed.whole)
            if key is None:
                slices |= placed.slices
                incs |= placed.incs
            else:
                slices[key], incs[key] = placed.slices, placed.incs
        self.batch._slice_dict, self.batch._inc_dict = slices, incs


@dataclass
class _Store:
    """The places of the rows in one store: all fields of a kind of nodes or edges."""

    batch: Any
    store: Any
    kind: Any
    graphs: int
    old_slices: Mapping[str, Any]
    old_incs: Mapping[str, Any]
    slices: dict[str, Any] = field(default_factory=dict)
    incs: dict[str, Any] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes = _bounds(self.store, self.graphs, self.old_slices)
        self.edges: Tensor | None = None  # the first edge of each graph, and the end
        self.order: Tensor | None = None  # of the edges, by graph; None: they lie in it
        names = [name for name in self.store if not self._is_made(name)]
        if isinstance(self.store.get("edge_index"), Tensor):
            self._place_edges()
        for name in names:
            if name not in self.slices:
                self._place(name, self.store[name])

    def _is_made(self, name: str) -> bool:
        """Return whether collating makes a field anew."""
        if name in self.old_slices:
            return False
        followed = name.removesuffix("_ptr").removesuffix("_batch")
        return name in ("batch", "ptr", "num_nodes") or (
            followed != name and followed in self.store
        )

    def _place_edges(self) -> None:
        """Find the graph of each edge by its ends."""
        edges = self.store["edge_index"]
        starts = self._starts_of_ends()
        if edges.ndim != 2 or len(edges) != 2 or edges.is_floating_point():
            raise _refused("edge_index", f"has the shape {tuple(edges.shape)}: it must be (2, E)")
        if starts is None:
            raise _refused("edge_index", 'needs "batch", the graph of each node', "add it")
        graph = _graph_of(edges, starts)
        if not torch.equal(graph[0], graph[1]) or (graph.numel() and int(graph.min()) < 0):
            raise _refused("edge_index", "has edges between graphs: they cannot be cut")
        index = graph[0]
        if bool((index[1:] < index[:-1]).any()):
            self.order = torch.sort(index, stable=True).indices
            self.store["edge_index"] = edges.index_select(1, self.order.to(edges.device))
        self.edges = _cumulated(torch.bincount(index, minlength=self.graphs))
        self.slices["edge_index"], self.incs["edge_index"] = self.edges, starts

    def _starts_of_ends(self) -> Tensor | None:
        """Return what PyG adds to the edges of each graph: the first of the nodes at their ends."""
        if "edge_index" in self.old_incs:
            starts: Tensor = self.old_incs["edge_index"]
            return starts
        if not isinstance(self.kind, tuple):
            return None if self.nodes is None else self.nodes[:-1]
        source, _, target = self.kind
        ends = [_bounds(self.batch[kind], self.graphs, {}) for kind in (source, target)]
        if ends[0] is None or ends[1] is None:
            return None
        return torch.stack([ends[0][:-1], ends[1][:-1]], 1)[:, :, None]

    def _place(self, name: str, value: Any) -> None:
        if value is None or isinstance(value, str | int | float) or _ndim(value) == 0:
            self.whole.append(name)
            return
        slices = self.old_slices.get(name)
        rows = _rows(self.batch, name, value, self.store)
        if self._goes_with_edges(name, slices, rows):
            self._reorder(name, value)
            slices = self.edges
        elif slices is None:
            slices = self._added(name, value, rows)
        elif not _fits(self.batch, name, value, slices, self.store):
            was = int(slices[-1]) if isinstance(slices, Tensor) and slices.ndim == 1 else "others"
            raise _refused(name, f"has {rows} rows, and had {was} when it was collated")
        self.slices[name] = slices
        self.incs[name] = self.old_incs.get(name, torch.zeros(self.graphs, dtype=torch.long))
        self._check_numbers(name, value)
        if name in _OF_NODE and self.nodes is not None and not _same(slices, self.nodes):
            raise _refused("batch", f'gives other nodes to the graphs than "{name}" had')

    def _goes_with_edges(self, name: str, slices: Any, rows: int) -> bool:
        """Return whether a field has a row for each of the present edges."""
        before = self.old_slices.get("edge_index")
        if self.edges is None or rows != int(self.edges[-1]) or name in _OF_NODE:
            return False
        if self.order is None and slices is not None and _same(slices, self.edges):
            return False  # as it was collated
        if "edge" in name and "index" not in name:
            return True
        if slices is None or before is None or not _same(slices, before):
            return False
        if (self.nodes is not None and rows == int(self.nodes[-1])) or rows == self.graphs:
            raise _refused(name, "has as many rows as there are edges, which were edited")
        return True

    def _reorder(self, name: str, value: Any) -> None:
        if self.order is None:
            return
        if not isinstance(value, Tensor):
            raise _refused(name, "is no tensor, and the edges were edited")
        dim = self.batch.__cat_dim__(name, value, self.store) or 0
        self.store[name] = value.index_select(dim, self.order.to(value.device))

    def _added(self, name: str, value: Any, rows: int) -> Tensor:
        """Return the places of a field that was set after collating."""
        if any(part in name for part in _NUMBERS_OF_ROWS) or not isinstance(value, Tensor):
            raise _refused(name, "was set after collating")
        ways = [torch.arange(self.graphs + 1), self.nodes, self.edges]
        found: list[Tensor] = [way for way in ways if way is not None and rows == int(way[-1])]
        if name in _OF_NODE and any(way is self.nodes for way in found):
            found = [way for way in found if way is self.nodes]
        if not found:
            raise _refused(name, f"was set after collating, and has {rows} rows")
        alike = all(torch.equal(way, found[0]) for way in found)
        if len(found) > 1 and (self.order is not None or not alike):
            raise _refused(
                name,
                f"was set after collating, and its {rows} rows can be those of graphs, nodes or "
                "edges",
            )
        if found[0] is self.edges:
            self._reorder(name, value)
        return found[0]

    def _check_numbers(self, name: str, value: Any) -> None:
        """Refuse numbers of rows that lie in another graph than their place."""
        starts, slices = self.incs[name], self.slices[name]
        if not isinstance(starts, Tensor) or not isinstance(value, Tensor) or not starts.numel():
            return
        if (starts.ndim == 1 and not int(starts[-1])) or value.is_floating_point():
            return
        dim = self.batch.__cat_dim__(name, value, self.store) or 0
        lengths = slices.diff()
        placed = torch.repeat_interleave(torch.arange(self.graphs), lengths)
        if not bool((_graph_of(value, starts).movedim(dim, -1) == placed).all()):
            raise _refused(name, "holds numbers of other graphs than when it was collated")


def _bounds(store: Any, graphs: int, collated: Mapping[str, Any]) -> Tensor | None:
    """Return the first node of each graph, and the end; None where there are no nodes."""
    index, starts = store.get("batch"), store.get("ptr")
    if not isinstance(index, Tensor) or "batch" in collated:
        return None
    index = index.cpu()
    if bool((index[1:] < index[:-1]).any()) or (len(index) and int(index[0]) < 0):
        raise _refused("batch", "is not sorted", "sort the nodes by their graph")
    if len(index) and int(index[-1]) >= graphs:
        raise _refused("batch", f"holds {int(index[-1])}, and the graphs are 0 to {graphs - 1}")
    bounds = _cumulated(torch.bincount(index, minlength=graphs))
    if starts is not None and not torch.equal(starts.cpu(), bounds):
        raise _refused("ptr", 'contradicts "batch"')
    numbers = getattr(store, "_num_nodes", None)
    if numbers is not None and list(numbers) != bounds.diff().tolist():
        raise _refused("batch", "gives other nodes to the graphs than they had")
    return bounds


def _graph_of(numbers: Tensor, starts: Tensor) -> Tensor:
    """Return the graph in which each number of a row lies, by what PyG has added to each graph."""
    columns = starts.cpu().reshape(len(starts), -1)
    numbers = numbers.detach().cpu().contiguous()
    if columns.shape[1] == 1:
        return torch.searchsorted(columns[:, 0].contiguous(), numbers, right=True) - 1
    rows = [
        torch.searchsorted(columns[:, place].contiguous(), each, right=True) - 1
        for place, each in enumerate(numbers)
    ]
    return torch.stack(rows)


def _cumulated(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _ndim(value: Any) -> int:
    return value.ndim if isinstance(value, Tensor) else -1


def _same(slices: Any, others: Tensor) -> bool:
    return isinstance(slices, Tensor) and torch.equal(slices.cpu(), others.cpu())


def _rows(batch: Any, name: str, value: Any, store: Any) -> int:
    """Return the rows of a field along the dimension in which PyG joins it; -1 for none."""
    if isinstance(value, Tensor):
        dim = batch.__cat_dim__(name, value, store) or 0
        return -1 if isinstance(dim, tuple) else int(value.size(dim))
    return len(value) if isinstance(value, Sequence) else -1


def _fits(batch: Any, name: str, value: Any, slices: Any, store: Any) -> bool:
    """Return whether a field has as many rows as when it was collated."""
    if isinstance(value, Mapping) and isinstance(slices, Mapping):
        return value.keys() == slices.keys() and all(
            _fits(batch, key, part, slices[key], store) for key, part in value.items()
        )
    if not isinstance(slices, Tensor):
        pairs = zip(value, slices, strict=False)
        return len(value) == len(slices) and all(
            _fits(batch, name, part, each, store) for part, each in pairs
        )
    dims = batch.__cat_dim__(name, value, store) if hasattr(value, "size") else None
    if isinstance(dims, tuple):
        return [int(value.size(dim)) for dim in dims] == slices[-1].tolist()
    return len(value) == int(slices[-1]) if dims is None else value.size(dims) == int(slices[-1])
