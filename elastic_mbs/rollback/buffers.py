"""Buffers that a forward changes (running statistics, spectral-norm vectors, codebooks): their snapshots and their rollback.

Rollback needs no memory: values are copied back into the tensors that exist. Source:
shared/reference/autograd.md, "State a failed attempt leaves behind".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from elastic_mbs.rollback import copies

PLAIN = (bool, int, float, str, type(None))
_ABSENT: Any = object()  # hangs where there is no buffer
_BUFFERS, _TRAINING = attrgetter("_buffers"), attrgetter("training")


class _Places(NamedTuple):
    """Where buffers hang, as columns: looking at all of them is one loop in C."""

    pairs: list[tuple[nn.Module, str]]
    owners: list[dict[str, Tensor | None]]
    names: list[str]

    @classmethod
    def of(cls, pairs: Iterable[tuple[nn.Module, str]]) -> _Places:
        pairs = list(pairs)
        return cls(pairs, [module._buffers for module, _ in pairs], [name for _, name in pairs])

    def hanging(self) -> list[Any]:
        return list(map(dict.get, self.owners, self.names, repeat(_ABSENT)))

    def ids(self) -> set[tuple[int, str]]:
        return set(zip(map(id, self.owners), self.names, strict=True))


class _Snapshot(NamedTuple):
    """Buffers at one moment, as columns."""

    places: _Places
    tensors: list[Any]  # what hung in each place
    copies: list[Tensor | None]  # its value, where one was kept
    versions: list[int]  # where none was kept, a change is noticed by these
    # numbers, flags and strings of their modules
    attributes: list[tuple[nn.Module, dict[str, Any]]]

    def changed(self) -> list[int]:
        """Places where another tensor hangs now, or one with another version."""
        now = self.places.hanging()
        versions = _versions(now)
        if versions == self.versions and all(map(is_, now, self.tensors)):
            return []
        return [
            i
            for i, tensor in enumerate(now)
            if tensor is not self.tensors[i] or versions[i] != self.versions[i]
        ]

    def put_back(self, skip: Collection[int] = ()) -> str | None:
        """Hangs every tensor where it hung, with its value; returns the label of one whose value was not kept. Can be repeated after an error."""
        lost = None
        for i, ((module, name), tensor, copy) in enumerate(
            zip(self.places.pairs, self.tensors, self.copies, strict=True)
        ):
            if i in skip:
                continue
            if tensor is _ABSENT:
                module._buffers.pop(name, None)
                continue
            module._buffers[name] = tensor
            if copy is None:
                lost = _label(module, name) if _versions([tensor]) != [self.versions[i]] else lost
            elif copy.shape != tensor.shape:
                # resized in place: the one case that takes memory
                tensor.data = copy.to(tensor.device, copy=True)
            else:
                # `data` has a version of its own: graphs that saved a buffer which did not change
                # stay valid
                tensor.data.copy_(copy)
        for module, saved in self.attributes:
            present = vars(module)
            for name in _plain(present).keys() - saved.keys():
                del present[name]
            present.update(saved)
        return lost


_NOWHERE = _Places([], [], [])
_NOTHING = _Snapshot(_NOWHERE, [], [], [], [])


class _Memory:
    """Copies of the values of buffers. The same memory is filled again and again."""

    def __init__(self) -> None:
        self._tensors: list[Any] = []
        self._shapes: list[torch.Size | None] = []
        self._copies: list[Tensor | None] = []
        self._groups: copies.Groups = []

    def take(self, tensors: list[Any]) -> list[Tensor | None]:
        """Copies the values; None for what cannot be copied."""
        if (
            len(tensors) != len(self._tensors)
            or not all(map(is_, tensors, self._tensors))
            or _shapes(tensors) != self._shapes
        ):
            self._prepare(tensors)
        copies.copy(self._groups)
        return self._copies

    def _prepare(self, tensors: list[Any]) -> None:
        # until it is done: there may be no room
        self._tensors, self._copies, self._groups = [], [], []
        with torch.inference_mode(False):
            kept = [torch.empty_like(tensor) if _copyable(tensor) else None for tensor in tensors]
        groups = copies.group(
            (copy, tensor.detach() if tensor.requires_grad else tensor)
            for tensor, copy in zip(tensors, kept, strict=True)
            if copy is not None
        )
        self._copies, self._groups, self._shapes = kept, groups, _shapes(tensors)
        # detached ones can lie elsewhere the next time
        if not any(map(getattr, tensors, repeat("requires_grad"), repeat(False))):
            self._tensors = tensors


@dataclass(frozen=True)
class _Layout:
    """Which buffers there are, and which of them change."""

    key: object = _ABSENT  # of the loss function
    modes: tuple[bool, ...] = ()  # training or not: a codebook, say, changes in training mode only
    modules: Sequence[nn.Module] = ()
    owners: Sequence[dict[str, Tensor | None]] = ()  # `_buffers` of each
    names: Sequence[str] = ()
    known: bool = False  # a clean piece of this loss function in these modes has been seen
    changing: _Places = _NOWHERE
    still: _Places = _NOWHERE
    plain: Sequence[nn.Module] = ()  # whose numbers, flags and strings go back with the buffers

    @cached_property
    def split_shows(self) -> bool:
        """Whether a buffer changes in a way that depends on the split; running statistics of groups that are never apart do not."""
        return not all(hasattr(module, "batch_group") for module, _ in self.changing.pairs)


class BufferCopies:
    """Snapshots of the buffers that the forward changes, at the call's start and at the piece's start: a recovery goes back to either.

    Learns per loss function which buffers change, by versions and identities; its first call copies
    the others to the host and compares values. Running statistics that can change always count as
    changing, because eager BatchNorm does not bump their version.
    """

    def __init__(self) -> None:
        self.watched = True  # there is something to learn after each piece
        self.busy = False  # there is something to copy before each piece
        self._changing: set[tuple[int, str]] = set()
        self._learned: set[object] = set()
        self._layout = _Layout()
        self._memory = _Memory(), _Memory()
        self._still = _NOTHING  # what is not known to change, at the call's start
        self._moved: set[int] = set()  # what of that has changed since, in a clean piece
        self._call: _Snapshot | None = None  # None where nothing of the call has run
        self._piece: _Snapshot | None = None  # None where nothing of the piece has run

    def begin_call(self, modules: Sequence[nn.Module], key: object = None) -> None:
        """Takes the snapshot of the call's start.

        Args:
            modules: whose buffers.
            key: the loss function; what is known of one says nothing of another.
        """
        # until there is one: a failure before that leaves nothing to put back
        self._call = self._piece = None
        owners = list(map(_BUFFERS, modules))
        names = list(chain.from_iterable(owners))
        modes = tuple(map(_TRAINING, compress(modules, owners)))
        layout = self._layout
        same = (
            key == layout.key
            and modes == layout.modes
            and names == layout.names
            and modules == layout.modules
        )
        if not same or not all(map(is_, owners, layout.owners)):
            layout = self._look(_Layout(key, modes, list(modules), owners, names))
            self._use(layout, set())
        self._still, self._moved = _NOTHING, set()
        if layout.still.names:
            tensors = layout.still.hanging()
            copies = [None if layout.known else _on_host(tensor) for tensor in tensors]
            self._still = _Snapshot(layout.still, tensors, copies, _versions(tensors), [])
        self._call = self._piece = self._take(0) if self.busy else _NOTHING

    def end_call(self) -> None:
        """Drops the snapshots: a call that fails before it has its own leaves the buffers alone."""
        self._call = self._piece = None

    def _look(self, layout: _Layout) -> _Layout:
        """Finds out which buffers change."""
        known = (layout.key, layout.modes) in self._learned
        changing, still = list[tuple[nn.Module, str]](), list[tuple[nn.Module, str]]()
        for module in layout.modules:
            # One of the user's can update them by a flag of its own, and a batch norm moves no
            # version.
            statistics = (
                module.training if _keeps_statistics(module) else "running_mean" in module._buffers
            )
            for name, tensor in module._buffers.items():
                learned = (id(module._buffers), name) in self._changing
                (changing if learned or (statistics and _copyable(tensor)) else still).append(
                    (module, name)
                )
        plain = (
            [
                module
                for module in layout.modules
                if module._buffers and not _keeps_statistics(module)
            ]
            if known
            else layout.modules
        )
        return replace(
            layout, known=known, changing=_Places.of(changing), still=_Places.of(still), plain=plain
        )

    def begin_piece(self) -> None:
        """Takes the snapshot of the start of a piece that is not the call's first.

        Comes before all else of the piece that can fail.
        """
        self._piece = None
        self._piece = self._take(1)

    def _take(self, memory: int) -> _Snapshot:
        layout = self._layout
        attributes = [(module, _plain(vars(module))) for module in layout.plain]
        if not layout.changing.names:
            return _NOTHING._replace(attributes=attributes)
        tensors = layout.changing.hanging()
        return _Snapshot(
            layout.changing,
            tensors,
            self._memory[memory].take(tensors),
            _versions(tensors),
            attributes,
        )

    def end_clean_piece(self) -> bool:
        """Learns which buffers the forward changes; returns whether it changes any in a way that depends on the split.

        After the first clean piece of a loss function values are compared too, on the host, so that
        a change that moves no version is seen, and buffers that the forward has made are included.
        """
        layout, still = self._layout, self._still
        moved = set(still.changed()) - self._moved
        if layout.known and not moved:
            return layout.split_shows
        made = []
        if not layout.known:
            made = self._made()
            moved.update(
                i
                for i, copy in enumerate(still.copies)
                if copy is not None and not _same_bits(copy, still.tensors[i])
            )
        # Where one of several running statistics has moved its version (the count does), a forward
        # has put its module in training mode.
        owners = still.places.owners
        switched = {id(owners[i]) for i in moved if "running_mean" in owners[i]}
        moved.update(i for i, owner in enumerate(owners) if id(owner) in switched)
        new = _Places.of([*(still.places.pairs[i] for i in sorted(moved - self._moved)), *made])
        self._changing |= new.ids()
        self._learned.add((layout.key, layout.modes))
        changing = _Places.of([*layout.changing.pairs, *new.pairs])
        # the next call looks again
        layout = replace(layout, key=_ABSENT, known=True, changing=changing)
        self._use(layout, self._moved | moved)
        return layout.split_shows

    def _use(self, layout: _Layout, moved: set[int]) -> None:
        watched, busy = (
            bool(layout.still.names) or not layout.known,
            bool(layout.plain or layout.changing.names),
        )
        self._layout, self._moved, self.watched, self.busy = layout, moved, watched, busy

    def _made(self, *, since_call: bool = False) -> list[tuple[nn.Module, str]]:
        """Buffers that hang where there was none when the call began, or, unless it is `since_call`, that are not known to be made."""
        call = self._call or _NOTHING
        there = (
            self._still.places.ids() | (call.places if since_call else self._layout.changing).ids()
        )
        return [
            (module, name)
            for module in self._layout.modules
            for name in module._buffers
            if (id(module._buffers), name) not in there
        ]

    def changed(self) -> bool:
        """Whether the piece can have changed a buffer in a way that depends on the split.

        Compares no values: that takes memory. What is known to change counts as changed.
        """
        return self._call is not None and bool(
            self._layout.split_shows or self._still.changed() or self._made()
        )

    def restore(self, *, to_call_start: bool) -> str | None:
        """Puts every buffer back, as an object and in value; one that the forward has made is removed. Can be repeated after an error.

        Returns:
            The label of a buffer whose earlier value was not kept (it changed for the first time in
            this very call), or None.
        """
        snapshot = self._call if to_call_start else self._piece
        if self._call is None:
            return None
        since_call = snapshot is self._call
        with torch.inference_mode(False), torch.no_grad():
            lost = self._still.put_back(skip=() if since_call else self._moved)
            if snapshot is not None:
                lost = snapshot.put_back() or lost
        for module, name in self._made(since_call=since_call):
            if self._layout.known and not to_call_start:
                lost = _label(module, name)  # made in this attempt, or in an earlier piece
            del module._buffers[name]
        if to_call_start:
            self._piece = self._call
        return lost


def _label(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__}.{name}"


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Numbers, flags and strings: a cache and its length, a codebook and whether it was initialised, go back together."""
    # the mode is the caller's to set
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, PLAIN) and name != "training"
    }


def _shapes(tensors: Sequence[Any]) -> list[torch.Size | None]:
    return list(map(getattr, tensors, repeat("shape"), repeat(None)))


def _versions(tensors: Sequence[Any]) -> list[int]:
    try:
        return list(map(getattr, tensors, repeat("_version"), repeat(-1)))
    except RuntimeError:  # inference tensors have none
        return [
            -1
            if isinstance(tensor, Tensor) and tensor.is_inference()
            else getattr(tensor, "_version", -1)
            for tensor in tensors
        ]


def _copyable(tensor: Any) -> TypeGuard[Tensor]:
    """Whether values can be copied and compared; of others (sparse, nested, meta, expanded, inference) only identity and version are known."""
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and not (
            tensor.is_meta
            or tensor.is_nested
            or tensor.is_quantized
            or tensor.is_inference()
            or 0 in tensor.stride()
        )
    )


def _on_host(tensor: Any) -> Tensor | None:
    with torch.inference_mode(False):
        return tensor.detach().to("cpu", copy=True) if _copyable(tensor) else None


def _same_bits(copy: Tensor, tensor: Tensor) -> bool:
    """Whether they hold the same. NaN is not equal to itself, so bits are compared."""
    a, b = copy.reshape(-1), tensor.detach().to("cpu").reshape(-1)
    return (
        copy.shape == tensor.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether it is one of torch's own with running statistics.

    One of the user's can put new tensors in their place, or count in an attribute.
    """
    return "running_mean" in module._buffers and type(module).__module__.startswith(
        "torch.nn.modules."
    )
