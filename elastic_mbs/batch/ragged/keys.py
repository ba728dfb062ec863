"""Keys that say themselves which rows belong to which sample.

Each entry of `_BY_KEY` is a function from the parts of a container to what it knows of some of
them. It looks at the whole container, and says nothing where its data contradict the key: the parts
are then read in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import Path, Role, has_rows, kind_of, roles_in
from elastic_mbs.batch.ragged import vision
from elastic_mbs.batch.ragged.relations import (
    Belongs,
    How,
    Member,
    Part,
    Placeholders,
    Relation,
)
from elastic_mbs.batch.ragged.rows import whole_numbers
from elastic_mbs.errors import BatchError

Parts = Mapping[Any, Any]
Members = dict[Any, Member]

# Ultralytics' names: fields of a box, and of a picture
_OF_BOX = frozenset({"cls", "bboxes", "keypoints", "obb"})
_OF_PICTURE = frozenset({"img", "im_file", "ori_shape", "resized_shape", "ratio_pad"})
_CUMULATED = (
    "cu_seqlens",
    "cu_seq_lens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
)
_TELLS_PICTURES = "a field with one row per picture tells it"
_TELLS_GRAPHS = (
    '"ptr" tells it (the first node of each graph, and the number of nodes at the end), or a field '
    "with one row per graph"
)
_OF_TOKEN = frozenset({"input_ids", "labels", "position_ids", "seq_idx"})
_LONGEST = frozenset({"max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k"})


def _boxes(parts: Parts) -> Members:
    """Return what `batch_idx` says: it has the number of the picture of each box."""
    index = parts["batch_idx"]
    if not _is_index(index):
        return {}
    if len(index) and float(torch.as_tensor(index).max()) >= max(map(_rows, parts.values())):
        return {}  # of something else than the samples
    relation, found = _by_key(How.INDEX, "batch_idx", _TELLS_PICTURES), Members()
    for key, value in parts.items():
        if key in _OF_BOX or (key not in _OF_PICTURE and _rows(value) == len(index)):
            found[key] = Member(relation, Part.ROWS, sure=key in _OF_BOX)
    found["batch_idx"] = Member(relation, Part.BY)
    return found


def of_pictures(parts: Parts) -> list[Any]:
    """Return the fields of lists or tuples that have an entry for each picture of `img`."""
    pictures = parts.get("img")
    if "batch_idx" not in parts or not isinstance(pictures, Tensor) or not pictures.ndim:
        return []
    return [
        key
        for key in parts
        if key in _OF_PICTURE
        and type(parts[key]) in (tuple, list)
        and len(parts[key]) == len(pictures)
    ]


def _graphs(parts: Parts) -> Members:
    """Return what `batch` says beside `edge_index` or `ptr`: it has the graph of each node."""
    batch, ptr, edges = parts.get("batch"), parts.get("ptr"), parts.get("edge_index")
    if ptr is None and edges is None:
        return {}
    if batch is None or not _is_index(batch, floats=False):
        _refuse_lone_edges(edges, ptr)
        return {}
    relation, found = _by_key(How.INDEX, "batch", _TELLS_GRAPHS), Members()
    starts = None if ptr is None else _cumulated(ptr)
    if starts is not None and int(starts[-1]) == len(batch):
        relation = _by_key(How.CUMULATED, "ptr")
        found["ptr"] = Member(relation, Part.BY)
    elif ptr is not None and edges is None:
        return {}
    elif ptr is not None:
        raise BatchError(f'"ptr" must begin with 0 and end with {len(batch)}, the number of nodes')
    found["batch"] = Member(relation, Part.NUMBER)
    of_edge = _edges(parts, relation, found)
    links = -2 if of_edge is None else len(of_edge.by)  # type: ignore[arg-type]  # a tensor
    # where edge i lies in the graph of node i, both readings cut alike
    alike = of_edge is not None and torch.equal(
        torch.as_tensor(batch).reshape(-1), torch.as_tensor(of_edge.by)
    )
    for key, value in parts.items():
        if key in found:
            continue
        rows, named = _rows(value), isinstance(key, str) and key.startswith("edge_")
        if of_edge is not None and rows == links and (named or rows != len(batch)):
            found[key] = Member(of_edge, Part.ROWS, sure=key in ("edge_attr", "edge_weight"))
        elif rows == len(batch):
            sure = key in ("x", "pos", "z")
            rival = rows == links and not (sure or alike)
            found[key] = Member(relation, Part.ROWS, sure=sure, rival=rival)
    return found


def _refuse_numbers_of_nodes(key: Any, value: Any, graph_of: Tensor) -> None:
    """Refuse numbers of nodes, which nothing renumbers in a piece: `train_index`, pairs of nodes.

    A field is taken for them by its name, if it has another number of rows than there are nodes and
    graphs, or each graph's row is the number of one of its nodes.
    """
    named = isinstance(key, str) and ("index" in key or "indices" in key)
    if not named or not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        return
    if not value.numel() or not value.ndim or not len(graph_of):
        return
    numbers = value.detach().reshape(-1).to(graph_of.device).long()
    if not 0 <= int(numbers.min()) <= int(numbers.max()) < len(graph_of):
        return
    graphs = torch.arange(int(graph_of.max()) + 1, device=graph_of.device)
    if value.ndim == 1 and len(numbers) == len(graph_of) > len(graphs):
        return
    one_each = value.ndim == 1 and len(numbers) == len(graphs) > 1
    if one_each and not torch.equal(graph_of[numbers], graphs):
        return
    raise BatchError(
        f'"{key}" can hold numbers of nodes, which are others in a piece\n'
        "  if so, give a mask with one value per node in its place, or put the batch into a class "
        "of yours and register_splitter(ThatClass, ...)\n"
        "  if not, say in dims= how it is cut"
    )


def _refuse_lone_edges(edges: Any, ptr: Any) -> None:
    """Refuse edges (2, E) without the graph of each node: they would be cut as two samples."""
    if not isinstance(edges, Tensor) or edges.is_floating_point() or edges.shape[:-1] != (2,):
        return
    told = None if ptr is None else _cumulated(ptr)
    text = '"edge_index" holds numbers of nodes, and is cut by "batch", the graph of each node'
    if told is not None:
        raise BatchError(
            f'{text}, which is needed beside "ptr"\n'
            '  add it: batch["batch"] = torch.repeat_interleave('
            'torch.arange(len(batch["ptr"]) - 1), batch["ptr"].diff())\n'
            "  let dims say nothing of it"
        )
    raise BatchError(
        f"{text}: add it to the batch, and let dims say nothing of it\n"
        '  if all samples share one graph: dims=cut.whole("edge_index")'
    )


def _edges(parts: Parts, nodes: Relation, found: Members) -> Relation | None:
    """Add `edge_index`, and return the relation of the edges; None where there are none."""
    edges, batch = parts.get("edge_index"), parts["batch"]
    if not isinstance(edges, Tensor) or edges.ndim != 2 or len(edges) != 2:
        return None
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < len(batch):
        raise BatchError(
            f'"edge_index" holds {int(edges.min())} to {int(edges.max())} for {len(batch)} nodes'
        )
    index = torch.as_tensor(batch)[edges]
    if not torch.equal(index[0], index[1]):
        raise BatchError('"edge_index" has edges between the graphs of "batch": they cannot be cut')
    of_edge = Relation(How.INDEX, index[0], belongs=Belongs.EDGES)
    found["edge_index"] = Member(of_edge, Part.POINTERS, 1, into=nodes)
    return of_edge


def _bags(parts: Parts) -> Members:
    """Return what `offsets` says: the first row of each bag of a `torch.nn.EmbeddingBag`."""
    starts = _cumulated(parts["offsets"])
    if starts is None:
        return {}
    count = len(starts)
    flat = {key: len(value) for key, value in parts.items() if getattr(value, "ndim", 0) == 1}
    named = {key for key in ("input", "per_sample_weights") if key in flat}
    rows = named or {key for key, size in flat.items() if size not in (count, count - 1)}
    totals = {flat[key] for key in rows}
    if len(totals) != 1 or (total := totals.pop()) < int(starts[-1]):
        return {}
    others = {_rows(value) for key, value in parts.items() if key not in rows | {"offsets"}}
    with_last = int(starts[-1]) == total
    if with_last and count in others and count - 1 in others:
        return {}
    if with_last and others.isdisjoint({count, count - 1}):
        names = ", ".join(repr(key) for key in sorted(rows))
        raise BatchError(
            f'"offsets" ends with {total}, the number of rows, and can be read in two ways: as '
            f"{count} bags, the last of which is empty, or as {count - 1} bags\n"
            f"  {count}: dims=cut.offsets({names})\n"
            f"  {count - 1}: dims=cut.offsets({names}, include_last_offset=True)"
        )
    last = with_last and count not in others
    relation = _by_key(How.CUMULATED if last else How.OFFSETS, "offsets")
    return {key: Member(relation, Part.ROWS) for key in rows} | {
        "offsets": Member(relation, Part.BY)
    }


def _packed(parts: Parts) -> Members:
    """Return what `cu_seqlens` says: the first token of each of the sequences in a row."""
    found, relations = Members(), dict[int, Relation]()
    for key in _CUMULATED:
        starts = _cumulated(parts.get(key))
        if starts is not None and len(starts) > 1 and int(starts[-1]):
            relation = _by_key(How.CUMULATED, key)
            relations.setdefault(int(starts[-1]), relation)
            found[key] = Member(relation, Part.BY)
    used = set[int]()
    for key, value in parts.items():
        fitting = relations.keys() & set(getattr(value, "shape", ()))
        if key in found or len(fitting) != 1:
            continue
        used |= fitting
        relation = relations[fitting.pop()]
        part = Part.NUMBER if key == "seq_idx" else Part.ROWS
        found[key] = Member(relation, part, None, sure=key in _OF_TOKEN)
    if used != relations.keys():
        return {}  # lengths of something that is not here
    for key in _LONGEST & parts.keys():
        ends = "_k" if key.endswith("_k") else "_q"
        source = next((name for name in _CUMULATED if name in found and name.endswith(ends)), None)
        source = source or next(name for name in _CUMULATED if name in found)
        found[key] = Member(found[source].relation, Part.LONGEST)
    return found


def _by_key(how: How, key: str, tells: str = "") -> Relation:
    hint = f"\n  if {key!r} means something else, dims= says how it is cut"
    return Relation(how, key, hint=hint, tells=tells)


def _rows(value: Any) -> int:
    """Return the length of a tensor, array or list; -1 where it has none, or can hold fields."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else -1
    is_list = kind_of(type(value)).role is Role.LIST
    return len(value) if is_list and not has_rows(value, roles_in(value)) else -1


def _is_index(value: Any, *, floats: bool = True) -> bool:
    """Return whether a value has the form of an index of samples: (R,) or (R, 1)."""
    if not isinstance(value, Tensor) and kind_of(type(value)).role is not Role.ARRAY:
        return False
    if tuple(value.shape[1:]) not in ((), (1,)) or not value.ndim:
        return False
    dtype = torch.as_tensor(value[:0]).dtype
    return (floats or not dtype.is_floating_point) and not dtype.is_complex and dtype != torch.bool


def _cumulated(value: Any) -> Tensor | None:
    """Return whole numbers that begin with 0 and do not fall, on the host; None for any others."""
    if value is None or not _is_index(value, floats=False) or value.ndim != 1 or not len(value):
        return None
    try:
        found = whole_numbers(value, "")
    except BatchError:
        return None
    return None if int(found[0]) or bool((found[1:] < found[:-1]).any()) else found


_BY_KEY: dict[str, Callable[[Parts], Members]] = {
    "batch_idx": _boxes,
    "batch": _graphs,
    "edge_index": _graphs,
    "offsets": _bags,
    **dict.fromkeys(_CUMULATED, _packed),
}
_KEYS = frozenset((*_BY_KEY, *vision.KEYS))
_PICTURES = frozenset({"pixel_values"})


def tells(parts: Parts) -> bool:
    """Return whether a key of a container can say which rows belong to which sample."""
    found = _KEYS.intersection(parts)
    return bool(found) and (found != _PICTURES or "input_ids" in parts)


def well_known(
    parts: Parts,
    path: Path,
    allowed: Callable[[Path], bool | Member],
    known: Mapping[Path, Any],
    placeholders: Placeholders,
) -> Members:
    """Return the members that the keys of a container tell of.

    Args:
        parts: of the container.
        path: of the container.
        allowed: whether a key may say how the value at a path is cut, or the member that is said.
        known: readings of earlier batches, for members that are not sure.
        placeholders: the a function that returns the tokens of pictures and videos.

    Raises:
        BatchError: they can be read in two ways, or contradict each other.
    """
    said = {key: allowed((*path, key)) for key in parts}
    free = {key: part for key, part in parts.items() if said[key]}
    unsaid = {key: part for key, part in parts.items() if said[key] is True}
    found: Members = vision.pictures(unsaid, placeholders)
    # what `dims` says of offsets decides how many there are
    keys = [key for key in _BY_KEY if key in (unsaid if key == "offsets" else free)]
    for rule in dict.fromkeys(_BY_KEY[key] for key in keys):
        found |= rule(free)
    if "edge_index" in found:
        _check_numbers(parts, unsaid, found)
    return _with_known(found, path, known)


def _check_numbers(parts: Parts, unsaid: Parts, found: Members) -> None:
    of_edge, graph_of = found["edge_index"].relation, torch.as_tensor(parts["batch"]).reshape(-1)
    for key in [key for key in unsaid if key != "edge_index"]:
        of_edges = key in found and found[key].relation is of_edge
        if not (of_edges and getattr(unsaid[key], "ndim", 1) == 1):
            _refuse_numbers_of_nodes(key, unsaid[key], graph_of)


def _with_known(found: Members, path: Path, known: Mapping[Path, Any]) -> Members:
    """Return the members as earlier batches have shown them."""
    for key, member in found.items():
        reading = known.get((*path, key))
        if member.rival and reading is Belongs.ROWS:
            found[key] = replace(member, rival=False)
        elif member.rival and reading is Belongs.EDGES:
            found[key] = replace(member, relation=found["edge_index"].relation, rival=False)
    return {
        key: member
        for key, member in found.items()
        if member.sure or known.get((*path, key)) is not Belongs.SAMPLES
    }
