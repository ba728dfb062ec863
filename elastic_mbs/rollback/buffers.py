"""Snapshots and rollback of the buffers that a forward changes.

Running statistics, spectral-norm vectors and codebooks are such buffers. Rollback needs no memory:
values are copied back into the tensors that exist. Source: docs/internals/autograd.md#buffers.
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
    """Places of buffers, as columns: a look at all of them is one loop in C."""

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
    """Buffers at one moment, as columns.

    Attributes:
        places: the places.
        tensors: the tensor in each place.
        copies: the value of each tensor, where it was kept.
        versions: the version of each tensor, which shows a change where no value was kept.
        attributes: numbers, flags and strings of the modules.
    """

    places: _Places
    tensors: list[Any]
    copies: list[Tensor | None]
    versions: list[int]
    attributes: list[tuple[nn.Module, dict[str, Any]]]

    def changed(self) -> list[int]:
        """Return the places with another tensor, or with another version of it."""
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
        """Put every tensor back in its place, with its value. Can be repeated after an error.

        Returns:
            The label of a buffer whose value was not kept, or None.
        """
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
                # It was resized in place: the one case that takes memory.
                tensor.data = copy.to(tensor.device, copy=True)
            else:
                # `data` has a version of its own. Graphs that saved an unchanged buffer stay valid.
                tensor.data.copy_(copy)
        for module, saved in self.attributes:
            present = vars(module)
            for name in _plain(present).keys() - saved.keys():
                del present[name]
            present.update(saved)
        return lost


# The mode is the caller's to set. The other says that transformers has put its hooks in place. They
# stay where they are: it would do so again, and take every output twice.
_KEPT = frozenset({"training", "_output_capturing_hooks_installed"})
_NOWHERE = _Places([], [], [])
_NOTHING = _Snapshot(_NOWHERE, [], [], [], [])


class _Memory:
    """Memory for copies of buffers, which is filled again and again."""

    def __init__(self) -> None:
        self._tensors: list[Any] = []
        self._shapes: list[torch.Size | None] = []
        self._copies: list[Tensor | None] = []
        self._groups: copies.Groups = []

    def take(self, tensors: list[Any]) -> list[Tensor | None]:
        """Copy the values; None for a tensor that cannot be copied."""
        if (
            len(tensors) != len(self._tensors)
            or not all(map(is_, tensors, self._tensors))
            or _shapes(tensors) != self._shapes
        ):
            self._prepare(tensors)
        copies.copy(self._groups)
        return self._copies

    def _prepare(self, tensors: list[Any]) -> None:
        # Empty until it is done: there may be no room.
        self._tensors, self._copies, self._groups = [], [], []
        with torch.inference_mode(False):
            kept = [torch.empty_like(tensor) if _copyable(tensor) else None for tensor in tensors]
        groups = copies.group(
            (copy, tensor.detach() if tensor.requires_grad else tensor)
            for tensor, copy in zip(tensors, kept, strict=True)
            if copy is not None
        )
        self._copies, self._groups, self._shapes = kept, groups, _shapes(tensors)
        # Detached tensors can lie elsewhere the next time.
        if not any(map(getattr, tensors, repeat("requires_grad"), repeat(False))):
            self._tensors = tensors


@dataclass(frozen=True)
class _Layout:
    """The buffers of a model, and the facts about which of them change.

    Attributes:
        key: the loss function.
        modes: training mode of each module with buffers: a codebook changes in training only.
        modules: the modules.
        owners: the `_buffers` of each module.
        names: the names of the buffers.
        known: a clean piece of this loss function in these modes was seen.
        changing: the places that change.
        still: the places that are not known to change.
        plain: modules whose numbers, flags and strings go back with the buffers.
    """

    key: object = _ABSENT
    modes: tuple[bool, ...] = ()
    modules: Sequence[nn.Module] = ()
    owners: Sequence[dict[str, Tensor | None]] = ()
    names: Sequence[str] = ()
    known: bool = False
    changing: _Places = _NOWHERE
    still: _Places = _NOWHERE
    plain: Sequence[nn.Module] = ()

    @cached_property
    def split_shows(self) -> bool:
        """True if a buffer changes in a way that depends on the split.

        Running statistics of groups that are never apart do not.
        """
        return not all(hasattr(module, "batch_group") for module, _ in self.changing.pairs)

    @cached_property
    def watched(self) -> bool:
        """True if a look after each piece can show that another buffer changes."""
        return bool(self.still.names) or not self.known

    @cached_property
    def busy(self) -> bool:
        """True if buffers are copied before each piece."""
        return bool(self.plain or self.changing.names)


class BufferCopies:
    """Copies of the buffers that the forward changes, at the call's start and at the piece's start.

    It is learned for each loss function which buffers change, by versions and identities. Its first
    call copies the others to the host and compares values. Running statistics that can change
    always count as changing, because eager BatchNorm does not raise their version.
    """

    def __init__(self) -> None:
        self._changing: set[tuple[int, str]] = set()
        self._learned: set[object] = set()
        self._layout = _Layout()
        self._memory = _Memory(), _Memory()
        self._still = _NOTHING  # buffers that are not known to change, at the call's start
        self._moved: set[int] = set()  # the ones of them that a clean piece has changed
        self.calls = 0  # begun so far, by which a call knows whether the copies are still its own
        self._call: _Snapshot | None = None  # None where nothing of the call has run
        self._piece: _Snapshot | None = None  # None where nothing of the piece has run

    @property
    def watched(self) -> bool:
        """True if a look after each piece can show that another buffer changes."""
        return self._layout.watched

    @property
    def busy(self) -> bool:
        """True if buffers are copied before each piece."""
        return self._layout.busy

    def begin_call(self, modules: Sequence[nn.Module], key: object = None) -> None:
        """Take the snapshot of the call's start.

        Args:
            modules: the owners of the buffers.
            key: the loss function. The facts about one say nothing of another.
        """
        self.calls += 1
        # None until there is one: a failure before that leaves nothing to put back.
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
            self._layout = layout
        self._still, self._moved = _NOTHING, set()
        if layout.still.names:
            tensors = layout.still.hanging()
            copies = [None if layout.known else _on_host(tensor) for tensor in tensors]
            self._still = _Snapshot(layout.still, tensors, copies, _versions(tensors), [])
        self._call = self._piece = self._take(0) if self.busy else _NOTHING

    def end_call(self) -> None:
        """Drop the snapshots: a call that fails before it has its own leaves the buffers alone."""
        self._call = self._piece = None

    def _look(self, layout: _Layout) -> _Layout:
        """Find out which buffers change."""
        known = (layout.key, layout.modes) in self._learned
        changing, still = list[tuple[nn.Module, str]](), list[tuple[nn.Module, str]]()
        for module in layout.modules:
            # A module of the user's can update them by a flag of its own, and BatchNorm raises no
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
        """Take the snapshot of the start of a piece that is not the call's first.

        It comes before everything else of the piece that can fail.
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
        """Learn from a clean piece which buffers the forward changes.

        After the first clean piece of a loss function values are compared on the host, which shows
        a change that raises no version. Buffers that the forward has made are included.

        Returns:
            Whether it changes a buffer in a way that depends on the split.
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
        # Where one of several running statistics has raised its version (the count does), the
        # forward has put its module in training mode.
        owners = still.places.owners
        switched = {id(owners[i]) for i in moved if "running_mean" in owners[i]}
        moved.update(i for i, owner in enumerate(owners) if id(owner) in switched)
        new = _Places.of([*(still.places.pairs[i] for i in sorted(moved - self._moved)), *made])
        self._changing |= new.ids()
        self._learned.add((layout.key, layout.modes))
        changing = _Places.of([*layout.changing.pairs, *new.pairs])
        # The next call looks again.
        layout = replace(layout, key=_ABSENT, known=True, changing=changing)
        self._layout, self._moved = layout, self._moved | moved
        return layout.split_shows

    def _made(self, *, since_call: bool = False) -> list[tuple[nn.Module, str]]:
        """Return the buffers in places where there was none when the call began.

        Args:
            since_call: include the ones that the forward is known to make.
        """
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

    def restore(self, *, to_call_start: bool) -> str | None:
        """Put every buffer back, as an object and in value, and remove the ones that were made.

        Can be repeated after an error.

        Args:
            to_call_start: go back to the start of the call; else to the start of the piece.

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
    """Return the numbers, flags and strings: a cache and its length go back together."""
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, PLAIN) and name not in _KEPT
    }


def _shapes(tensors: Sequence[Any]) -> list[torch.Size | None]:
    return list(map(getattr, tensors, repeat("shape"), repeat(None)))


def _versions(tensors: Sequence[Any]) -> list[int]:
    try:
        return list(map(getattr, tensors, repeat("_version"), repeat(-1)))
    except RuntimeError:  # inference tensors have no version
        return [
            -1
            if isinstance(tensor, Tensor) and tensor.is_inference()
            else getattr(tensor, "_version", -1)
            for tensor in tensors
        ]


def _copyable(tensor: Any) -> TypeGuard[Tensor]:
    """Return whether a tensor's values can be copied and compared.

    Of others (sparse, nested, meta, expanded, inference) only identity and version are known.
    """
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
    """Return whether both have the same bits. NaN is not equal to itself, so bits are compared."""
    a, b = copy.reshape(-1), tensor.detach().to("cpu").reshape(-1)
    return (
        copy.shape == tensor.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def _keeps_statistics(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own with running statistics.

    A module of the user's can put new tensors in their place, or count in an attribute.
    """
    return "running_mean" in module._buffers and type(module).__module__.startswith(
        "torch.nn.modules."
    )
