"""The number of samples on which all parts of a batch agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_mbs.batch.agreement.advice import disagreement
from elastic_mbs.batch.agreement.questions import ask, is_certain, two_readings
from elastic_mbs.batch.agreement.texts import MOST_NAMES, line_on, some_of
from elastic_mbs.batch.containers import Path
from elastic_mbs.batch.cut import Dims, ListLayout
from elastic_mbs.batch.layout import Cut, Layout, Node, call, where
from elastic_mbs.batch.ragged.relations import Belongs, Placeholders
from elastic_mbs.batch.ragged.settle import settle
from elastic_mbs.batch.splitters import type_name
from elastic_mbs.errors import BatchError


class Agreement:
    """A batch, read.

    Attributes:
        layout: how it was read.
        root: the batch as a tree of nodes.
        ends: all values without parts.
        samples: the number of samples.
        known: how its values were read, in this batch and earlier ones.
    """

    def __init__(
        self,
        batch: Any,
        dims: Dims,
        known: Mapping[Path, ListLayout | Belongs],
        placeholders: Placeholders = dict,
    ) -> None:
        self.layout = layout = Layout(dims, dict(known), placeholders)
        self.root = root = layout.read(batch)
        _close(layout, root)
        _check_tuples(layout)
        self.ends = root.ends()
        self.leaves = [end for end in self.ends if end.size >= 0]
        self.samples = self._length()
        ask(layout, root, self.samples, known)
        self.known = layout.known
        if self.samples > 1:
            shown = [node for node in layout.sequences if len(node.value) != self.samples]
            self.known.update({node.path: ListLayout.FIELDS for node in shown})
            for leaf in self.leaves:
                if leaf.cut is Cut.NARROW and is_certain(leaf.value, self.samples):
                    self.known.setdefault(leaf.path, Belongs.SAMPLES)

    def _samples(self, dims: Dims) -> int | None:
        """Return the number of samples under other `dims`; None where the batch is refused."""
        try:
            return Agreement(self.root.value, dims, {}, self.layout.placeholders).samples
        except BatchError:
            return None

    def _length(self) -> int:
        layout, sizes = self.layout, {leaf.size for leaf in self.leaves}
        if len(sizes) > 1:
            raise BatchError(disagreement(layout, self.root, self._samples))
        if layout.ragged and sizes != {0}:
            plain = [leaf.path for leaf in self.leaves if leaf.path[:-1] in layout.keyed]
            rest = next(iter(sizes), None)
            sizes = {settle(self.root.value, layout.ragged, rest, layout.known, plain)}
            self.leaves = [end for end in self.ends if end.size >= 0]
        if not sizes:
            raise BatchError(
                "there is nothing to cut in the batch (type "
                f"{type_name(type(self.root.value))}): no tensor with a dimension and no list of "
                "samples\n  give at least one tensor or list with a row per sample"
            )
        size = sizes.pop()
        if not size:
            raise BatchError(
                f"the batch is empty: {line_on(self.leaves[0])}\n  skip it before the call. In "
                "a job of several ranks call backward(loss_fn, None) in its place, because the "
                "others have samples; an evaluation of a sharded model needs one on every rank"
            )
        return size


def _check_tuples(layout: Layout) -> None:
    """Ask about tuples with nothing in them that has rows."""
    if not layout.unclear:
        return
    inside = {node.path for node in layout.unclear}
    # the outermost: what lies in one of them goes with it
    paths = [
        node.path
        for node in layout.unclear
        if not any(node.path[:depth] in inside for depth in range(len(node.path)))
    ]
    node = layout.unclear[-1]  # the parts of a tuple come before it
    text = f"{where(node.path)} is a tuple of {len(node.value)} with nothing in it that has rows"
    if len(paths) > 1:
        text = f"{some_of(paths)} are tuples with nothing in them that has rows"
    if len(paths) > MOST_NAMES:
        raise BatchError(f"{text}\n  name them all in dims=, with cut.items or cut.whole")
    raise BatchError(
        f"{text}: {'is it' if len(paths) == 1 else 'are they'} one item per sample?\n"
        f"  if so: dims={call('items', *paths)}\n  if every piece needs all of "
        f"{'it' if len(paths) == 1 else 'them'}: dims={call('whole', *paths)}"
    )


def _lengths(layout: Layout, root: Node) -> set[int]:
    """Return the lengths that the batch can have, with the open lists read either way."""
    choices = [{node.size} | _lengths(inner, fields) for node, fields, inner in layout.open]
    undecided = [node for node, _, _ in layout.open]
    sizes = {end.size for end in root.ends() if end.size >= 0 and end not in undecided}
    if sizes:
        choices.append(sizes if len(sizes) == 1 else set())
    return set.intersection(*choices) if choices else set()


def _decide(layout: Layout, length: int) -> None:
    """Decide the open lists.

    A batch of one sample is not remembered: both readings give the same single piece.
    """
    for node, fields, inner in layout.open:
        as_fields = length in _lengths(inner, fields)
        if as_fields and node.size == length != 1:
            layout.asked.append(node)
        elif as_fields and node.size != length:
            _decide(inner, length)
            node.cut, node.children = fields.cut, fields.children
            layout.unclear += inner.unclear
            layout.asked += inner.asked
            layout.ragged += inner.ragged
            layout.sequences += [node if each is fields else each for each in inner.sequences]
        if length != 1:
            layout.known[node.path] = (
                ListLayout.ITEMS if node.cut is Cut.ITEMS else ListLayout.FIELDS
            )


def _close(layout: Layout, root: Node) -> None:
    """Decide the open lists by the length on which the batch agrees."""
    if not layout.open:
        return
    lengths = _lengths(layout, root)
    if len(lengths) < 2:
        _decide(layout, max(lengths, default=-1))
        return
    # nothing else is cut, and a batch of one sample has one piece either way
    if any(node.size != 1 for node, _, _ in layout.open):
        node = layout.open[0][0]
        raise BatchError(two_readings([node], min(lengths - {node.size})))
    _decide(layout, 1)
