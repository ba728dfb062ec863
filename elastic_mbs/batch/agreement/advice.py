"""The text for parts that disagree on the number of samples, with the lines that can be meant.

A line is offered only with its meaning, for a reading that more than one size supports, and only if
the batch can be read with it. For the rest the ways are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

from elastic_mbs.batch import cut
from elastic_mbs.batch.agreement.evidence import Evidence, Way
from elastic_mbs.batch.agreement.questions import outermost
from elastic_mbs.batch.agreement.texts import MOST_NAMES, line_on, some_of
from elastic_mbs.batch.containers import Path, alike, dotted, unmatched
from elastic_mbs.batch.layout import Cut, Layout, Node, quoted
from elastic_mbs.batch.ragged.relations import Part, rows_in

# The number of samples under given `dims`; None where the batch is refused.
Reads = Callable[[Mapping[str, Any]], int | None]

_SHOWN = 6  # leaves
_OFFERED = 3  # lines
_TRIED = 12
_WIDEST = 240  # columns of a line


def disagreement(layout: Layout, root: Node, reads: Reads) -> str:
    """Return a text of up to 14 lines: the parts, and the lines that can be meant."""
    leaves = [end for end in root.ends() if end.size >= 0]
    sizes = sorted({leaf.size for leaf in leaves})
    more = f" and {len(sizes) - 4} others" if len(sizes) > 4 else ""
    lines = [
        f"the parts of the batch disagree on its length: {' and '.join(map(str, sizes[:4]))}{more}"
    ]
    shown = _shown(leaves)
    lines += [f"  {line_on(leaf)}" for leaf in shown]
    if len(leaves) > len(shown):
        lines.append(f"  … and {len(leaves) - len(shown)} more")
    lines += _forgotten(layout, leaves, reads)
    lines += _offers(layout, root, leaves, reads) or _WAYS
    unused = ", ".join(map(repr, unmatched(layout.dims, root.value)[:MOST_NAMES]))
    return "\n".join(lines) + (
        f"\n  dims names {unused}, which the batch does not have" if unused else ""
    )


def _shown(leaves: Sequence[Node]) -> list[Node]:
    """Return a few leaves, in order, with as many different sizes as can be."""
    firsts = list({leaf.size: leaf for leaf in reversed(leaves)}.values())[::-1]
    ranked = list(dict.fromkeys(map(id, [*firsts, *leaves])))
    chosen = set(ranked[:_SHOWN])
    return [leaf for leaf in leaves if id(leaf) in chosen]


def _forgotten(layout: Layout, leaves: Sequence[Node], reads: Reads) -> list[str]:
    """Return a line on parts that have as many rows as one that `dims` gives to the samples."""
    for node, member in layout.ragged:
        rows = rows_in(node.value, member.dim)
        paths = [leaf.path for leaf in leaves if leaf.size == rows]
        told = {dotted(path): member for path in paths}
        said = bool(paths) and member.part is Part.ROWS and layout.is_given(node.path)
        if said and reads({**layout.dims, **told}) is not None:
            return [
                f"  {some_of(paths)}: {rows} rows, as many as {quoted(node.path)}. If they go "
                f"with it, name them in dims= where {quoted(node.path)} is named"
            ]
    return []


_WAYS = [
    "  all of them with a row per sample: mend the batch, they have to be equally long",
    "  rows that belong to samples in unequal numbers: cut.ragged(..., by=...) or lengths=...",
    "  one entry per sample in a list: cut.items(...); a class of your own: register_splitter",
    "  samples on dim 1: dims={name: 1}; what all of them share (class weights): cut.whole",
]


def _offers(layout: Layout, root: Node, leaves: Sequence[Node], reads: Reads) -> list[str]:
    found = dict[str, None]()
    for samples, said in islice(_choices(layout, root, leaves), _TRIED):
        line = _joined(said)
        if line is None:
            continue
        text, meaning, dims = line
        if reads({**layout.dims, **dims}) == samples:
            found[f"  if it has {samples} samples, {meaning}: dims={text}"] = None
    found = {line: None for line in found if len(line) <= _WIDEST}
    if not found and alike(root.value) and any(node is root for node in layout.sequences):
        entries = len(root.value)
        if reads(cut.items()) == entries:
            return [f"  if it has {entries} samples, one per entry: dims=cut.items()"]
    return list(found)[:_OFFERED]


def _choices(
    layout: Layout, root: Node, leaves: Sequence[Node]
) -> Iterator[tuple[int, list[tuple[Way, Path]]]]:
    """Yield readings: the number of samples, and the way to say each part that has another."""
    unsaid = {id(node) for node in layout.sequences}
    lists = outermost(root, unsaid)[0]
    lists += [node for node, _, _ in layout.open if node.cut is Cut.ITEMS]
    in_lists = {id(end) for node in lists for end in node.ends()}
    evidence = Evidence([leaf for leaf in leaves if id(leaf) not in in_lists])
    sizes = {len(node.value) for node in lists} | {leaf.size for leaf in leaves}
    for samples in sorted((sizes | evidence.lengths()) - {0}):
        items = [node for node in lists if len(node.value) == samples]
        inside = {id(end) for node in items for end in node.ends()}
        beside = [leaf for leaf in leaves if id(leaf) not in inside]
        fitting = [leaf for leaf in beside if leaf.size == samples]
        groups = [
            [leaf for leaf in beside if leaf.size == size]
            for size in dict.fromkeys(leaf.size for leaf in beside if leaf.size != samples)
        ]
        said = [(Way("items"), node.path) for node in items]
        if any(id(leaf) in in_lists for group in groups for leaf in group):
            continue
        for ways in product(*(evidence.ways(group, fitting, samples) for group in groups)):
            told = zip(ways, groups, strict=True)
            yield samples, [*said, *((way, leaf.path) for way, group in told for leaf in group)]


def _joined(said: Sequence[tuple[Way, Path]]) -> tuple[str, str, dict[str, Any]] | None:
    """Return ways as one line to paste after `dims=`, its meaning, and its value."""
    texts, meanings = list[str](), list[str]()
    dims = dict[str, Any]()
    ways = list(dict.fromkeys(way for way, _ in said))
    sources = [way.source for way in ways if way.source]
    if len(set(sources)) < len(sources):
        return None  # numbers that would tell two things
    for way in ways:
        paths = [path for each, path in said if each == way]
        told = way.told(paths)
        if not 0 < len(told) <= MOST_NAMES or not set(sources).isdisjoint(told):
            return None
        texts.append(way.text(paths))
        meanings.append(way.meaning(paths))
        dims |= way.dims(paths)
    return (" | ".join(texts), " and ".join(meanings), dims) if texts else None
