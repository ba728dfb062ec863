"""Questions about lists and tensors that can be read in two ways."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch
from torch import Tensor

from elastic_mbs.batch.agreement.texts import MOST_NAMES, some_of
from elastic_mbs.batch.containers import Path, alike
from elastic_mbs.batch.layout import MANY, Cut, Layout, Node, call, quoted, where
from elastic_mbs.errors import BatchError

_WHOLE_NUMBERS = {torch.int64, torch.int32}
_CUT = {Cut.NARROW, Cut.COPY}
_CHANNELS = {3, 4}


def ask(layout: Layout, root: Node, samples: int, known: Container[Path]) -> None:
    """Raise a BatchError about what can be read in another way, with the line for each.

    Args:
        layout: the batch.
        root: the tree of its values, all of which agree on the number of samples.
        samples: this number.
        known: what earlier batches have shown.
    """
    if samples == 1 and not layout.sequences:
        return
    unsaid = {id(node) for node in layout.sequences if node.path not in known}
    lists = _all_there_is(root, unsaid, samples) or _as_long_as_the_batch(
        layout, root, unsaid, samples
    )
    if lists:
        raise BatchError(two_readings(lists, samples))
    if samples > 1:
        _ask_about_dims(layout, root, samples, known)


def two_readings(lists: Sequence[Node], samples: int) -> str:
    """Return the question about lists of one length: items or fields."""
    paths = [node.path for node in lists]
    length = len(lists[0].value)
    text = (
        f"{some_of(paths)} can be read in two ways: as {length} items, one per sample, or as "
        f"{length} fields of {samples} samples each\n"
    )
    if len(paths) > MOST_NAMES:
        return text + "  name them all in dims=, with cut.items or cut.fields"
    return text + f"  items: dims={call('items', *paths)}\n  fields: dims={call('fields', *paths)}"


def outermost(root: Node, unsaid: set[int]) -> tuple[list[Node], list[Node]]:
    """Return the outermost lists below the batch that nothing says, and the leaves beside them."""
    lists, others = list[Node](), list[Node]()
    for node in root.children.values():
        if id(node) in unsaid and alike(node.value):
            lists.append(node)
        elif node.cut is Cut.FIELDS:
            inner = outermost(node, unsaid)
            lists += inner[0]
            others += inner[1]
        elif node.cut is not Cut.WHOLE:
            others.append(node)
    return lists, others


def _all_there_is(root: Node, unsaid: set[int], samples: int) -> list[Node]:
    """Return lists that are all there is, and can be the samples.

    Several of one length (`zip(*samples)`), one of many tensors of one shape, or one of tensors
    whose shapes differ as those of samples do.
    """
    lists, others = outermost(root, unsaid)
    if others:
        lists = [root] if id(root) in unsaid else []
    if len(lists) > 1:
        counts = {len(node.value) for node in lists}
        return lists if len(counts) == 1 and counts != {1} else []
    if lists and _differ_as_samples(lists[0], root, samples):
        return lists
    if not lists or len(lists[0].value) <= MANY:
        return []
    forms = {
        (getattr(end.value, "shape", None), getattr(end.value, "dtype", None))
        for end in lists[0].ends()
    }
    return lists if len(forms) == 1 else []


def _differ_as_samples(node: Node, root: Node, samples: int) -> bool:
    """Return whether the tensors of a list can be samples of different sizes.

    Inputs and targets differ beyond dim 0, too. They are fewer than the samples, and have no
    channels of a picture on dim 0.
    """
    parts = list(node.children.values())
    if (node is root and type(node.value) is tuple) or any(part.cut not in _CUT for part in parts):
        return False
    shapes = [tuple(part.value.shape) for part in parts]
    if len({shape[1:] for shape in shapes}) == 1 or not alike(node.value):
        return False
    return len(parts) > max(samples, 2) or (len(shapes[0]) == 3 and samples in _CHANNELS)


def _as_long_as_the_batch(layout: Layout, root: Node, unsaid: set[int], samples: int) -> list[Node]:
    """Return the outermost lists with one element per sample that were read as fields."""
    if samples == 1:
        return []
    is_list = type(root.value) is list and id(root) in unsaid
    if is_list and len(root.value) == samples and alike(root.value):
        return [root]
    lists, _ = outermost(root, unsaid)
    found = {id(node) for node in [*layout.asked, *lists] if len(node.value) == samples}
    return [node for node in _below(root) if id(node) in found]


def _below(node: Node) -> Iterator[Node]:
    for child in node.children.values():
        yield child
        yield from _below(child)


def is_certain(value: Tensor, samples: int) -> bool:
    """Return whether a tensor that could be asked about in other batches has one reading here."""
    return value.ndim > 2 and value.dtype in _WHOLE_NUMBERS and value.shape[1] != samples


def _ask_about_dims(layout: Layout, root: Node, samples: int, known: Container[Path]) -> None:
    """Ask about whole numbers of shape (N, N, S) beside others of shape (N, S)."""
    leaves = [
        end
        for end in root.ends()
        if end.cut in (Cut.NARROW, Cut.RAGGED)
        and end.dim == 0
        and isinstance(end.value, Tensor)
        and end.value.shape[:1] == (samples,)
    ]
    shapes = {tuple(leaf.value.shape) for leaf in leaves if leaf.value.ndim > 1}
    for leaf in leaves:
        value: Tensor = leaf.value
        if (
            value.dtype in _WHOLE_NUMBERS
            and tuple(value.shape[1:]) in shapes
            and value.shape[1] == samples
            and leaf.path not in known
            and not layout.is_given(leaf.path)
        ):
            raise BatchError(
                f"{where(leaf.path)}, of shape {tuple(value.shape)}, can be read in two ways: with "
                f"its samples on dim 0, or on dim 1, as {samples} times "
                f"{tuple(value.shape[1:])}\n"
                f"  dim 0: dims={{{quoted(leaf.path)}: 0}}\n"
                f"  dim 1: dims={{{quoted(leaf.path)}: 1}}"
            )
