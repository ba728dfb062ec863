"""Buffers, which a forward changes, and putting them back: running statistics, spectral-norm vectors, codebooks.

A piece's start and the call's start are both kept, because a recovery goes back to either. Source: shared/reference/autograd.md, "State a failed
attempt leaves behind".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, TypeGuard

import torch
from torch import nn


@dataclass(slots=True)
class _Mark:
    """A buffer at one moment: the tensor that hung there, its version, and a copy of its value where one was taken."""

    tensor: torch.Tensor | None
    version: int
    copy: torch.Tensor | None = None
    absent: bool = False

    def put_back(self, owner: dict[str, torch.Tensor | None], key: str) -> bool:
        """Hangs the tensor where it hung, with the value that it had; returns whether the value is right."""
        if self.absent:
            owner.pop(key, None)
            return True
        owner[key] = self.tensor
        if self.tensor is None:
            return True
        right = self.copy is not None or _version(self.tensor) == self.version
        if self.copy is not None and self.copy.shape != self.tensor.shape:
            self.tensor.data = self.copy.to(self.tensor.device, copy=True)  # resized in place
        elif not _same(self):
            self.tensor.copy_(self.copy)  # type: ignore[arg-type]  # what has no copy is the same
        self.version = _version(self.tensor)
        return right


@dataclass(slots=True)
class _Slot:
    """One place where a buffer hangs."""

    owner: dict[str, torch.Tensor | None]
    key: str
    label: str
    changing: bool
    at_call: _Mark
    at_piece: _Mark
    statistics: bool = False  # running ones of torch's own in training mode: a forward writes to them and puts no others in their place

    def now(self) -> torch.Tensor | None:
        return self.owner.get(self.key)

    def moved(self, since: _Mark) -> bool:
        tensor = self.now()
        return tensor is not since.tensor or _version(tensor) != since.version

    def differs(self) -> bool:
        """Whether it is not what it was at the piece's start: by value where there is a copy, which may synchronise the device."""
        mark = self.at_piece
        return not _same(mark) if mark.copy is not None and self.now() is mark.tensor else self.moved(mark)


class BufferCopies:
    """Copies of the buffers that the forward changes, taken before each piece and at the call's start.

    Which ones those are is learned for each loss function: running statistics of modules in training mode always (eager BatchNorm changes their
    values and not their version), others once a version or an identity has moved. Its first call copies all of them to the host.

    Attributes:
        watched: whether there is something to learn after each piece: what moves already needs no second look.
        busy: whether there is something to copy before each piece.
    """

    def __init__(self) -> None:
        self._changing: set[tuple[int, str]] = set()
        self._learned: set[object] = set()
        self._known = False  # whether the running loss function is among them: to ask is to hash a function's code
        self.watched = True
        self.busy = False
        self._key: object = None
        self._modules: Sequence[nn.Module] = ()
        self._owners: list[nn.Module] = []
        self._slots: list[_Slot] = []
        self._still: list[_Slot] = []
        self._moving: list[_Slot] = []
        self._tensors: list[torch.Tensor | None] = []
        self._statistics: list[_Slot] = []
        self._statistics_marks: list[_Mark] = []  # of their pieces' starts, from one call to the next
        self._others: list[_Slot] = []
        self._begun = False
        self._call_copies, self._statistics_copies, self._other_copies = _Copies(), _Copies(), _Copies()
        self._plain: list[nn.Module] = []
        self._attributes: dict[str, list[dict[str, Any]]] = {}

    def begin_call(self, modules: Sequence[nn.Module], key: object = None) -> None:
        """Remembers every buffer as it is now, and copies those that change.

        Args:
            modules: whose buffers.
            key: the loss function; what is known of one says nothing of another.
        """
        owners = [module for module in modules if module._buffers]
        key = key, tuple([module.training for module in owners])  # a codebook, say, is moved in training mode only
        tensors = [tensor for module in owners for tensor in module._buffers.values()]
        known = self._known = key in self._learned
        same = known and key == self._key and owners == self._owners and len(tensors) == len(self._tensors) == len(self._slots)
        if same and not owners and not self._plain:
            self._modules = modules
            return  # no buffers, as in the call before
        # The same tensors in the same places as in the call before: what is known of the places holds, and only values are taken anew.
        settled = same and all(map(is_, tensors, self._tensors))
        if settled:
            for slot in self._slots:
                slot.at_piece = slot.at_call
            for slot in (*self._others, *self._still):
                slot.at_call.version, slot.at_call.copy = _version(slot.at_call.tensor), None
        else:
            self._key = None  # until what is known of the places is whole again: an interrupt may come in between
            self._slots = [self._slot(module, name, tensor) for module in owners for name, tensor in module._buffers.items()]
        self._modules, self._owners, self._tensors = modules, owners, tensors
        self._plain = [module for module in owners if not _keeps_statistics(module)] if known else list(modules)
        self._attributes = {"call": _attributes(self._plain)}
        self._begun = False
        if settled:
            self.busy = bool(self._plain or self._moving)
        else:
            self._sort()
        self._key = key
        if self._moving:
            self._call_copies.take([slot.at_call for slot in self._moving])
        if not known:
            with torch.inference_mode(False):
                for slot in self._still:
                    if _copyable(slot.at_call.tensor):
                        slot.at_call.copy = slot.at_call.tensor.detach().to("cpu", copy=True)

    def _slot(self, module: nn.Module, name: str, tensor: torch.Tensor | None) -> _Slot:
        buffers = module._buffers
        moves = (id(buffers), name) in self._changing
        statistics = module.training and _keeps_statistics(module) and _copyable(tensor) and not moves
        mark = _Mark(tensor, _version(tensor))
        changing = statistics or moves
        return _Slot(buffers, name, f"{type(module).__name__}.{name}", changing, mark, mark, statistics)

    def _sort(self) -> None:
        self._moving = [slot for slot in self._slots if slot.changing]
        self._statistics = [slot for slot in self._moving if slot.statistics]
        self._others = [slot for slot in self._moving if not slot.statistics] if len(self._statistics) < len(self._moving) else []
        self._still = [slot for slot in self._slots if not slot.changing] if len(self._moving) < len(self._slots) else []
        self._statistics_marks = []
        self.watched = bool(self._still) or not self._known
        self.busy = bool(self._plain or self._moving)

    def begin_piece(self) -> None:
        """Copies the buffers that change, before a piece that is not the call's first (whose start is the call's)."""
        if self._plain:
            self._attributes["piece"] = _attributes(self._plain)
        if self._begun:
            self._statistics_copies.again()
        elif self._statistics:
            self._begin_statistics()
            self._begun = True
        if self._others:
            _begin(self._others, self._other_copies)

    def _begin_statistics(self) -> None:
        marks = self._statistics_marks
        if marks and self._statistics_copies.take_again([mark.tensor for mark in marks]):
            for slot, mark in zip(self._statistics, marks, strict=True):
                slot.at_piece = mark  # their versions are old, but what has a copy is not told by its version
        else:
            _begin(self._statistics, self._statistics_copies)
            self._statistics_marks = [slot.at_piece for slot in self._statistics]

    def end_clean_piece(self) -> bool:
        """Learns which buffers the forward changes; returns whether it changes any.

        After the first clean piece of a loss function values are compared too, so that a change that moves no version is seen, and buffers that the
        forward has made are taken in.
        """
        first = not self._known
        moved = [slot for slot in self._still if slot.moved(slot.at_piece) or (first and not _same(slot.at_piece))]
        if moved:
            # Where one of several running statistics has moved its version (the count does), a forward has put its module in training mode.
            beside = {id(slot.owner) for slot in moved if "running_mean" in slot.owner}
            moved += [slot for slot in self._still if id(slot.owner) in beside]
            self._take_for_changing(moved)
        if first:
            self._take_for_changing(self._elsewhere(self._call_copies))
            self._learned.add(self._key)
            self._known = True
            for slot in self._new_slots():
                self._changing.add((id(slot.owner), slot.key))
                self._slots.append(slot)
        if first or moved:
            self._sort()
        return bool(self._moving)

    def _take_for_changing(self, slots: Iterable[_Slot]) -> None:
        for slot in slots:
            slot.changing, slot.statistics = True, False
            self._changing.add((id(slot.owner), slot.key))

    def _elsewhere(self, copies: _Copies) -> list[_Slot]:
        """Running statistics that are not where `copies` of them have been taken from: a forward of the user's has put others in their place."""
        return [slot for slot in self._statistics if copies.displaced or slot.now() is not slot.at_piece.tensor]

    def _new_slots(self) -> list[_Slot]:
        """Buffers that hang now where there was no place for one at the call's start."""
        known = {(id(slot.owner), slot.key) for slot in self._slots}
        nothing = _Mark(None, -1, absent=True)
        return [
            _Slot(module._buffers, name, f"{type(module).__name__}.{name}", True, nothing, nothing)
            for module in self._modules
            for name in module._buffers
            if (id(module._buffers), name) not in known
        ]

    def moved(self) -> bool:
        """Whether any buffer differs from what it was at the piece's start. Compares values, so it may synchronise the device."""
        return any(slot.differs() for slot in self._slots) or bool(self._new_slots())

    def restore(self, *, to_call_start: bool) -> str | None:
        """Puts every buffer back, as an object and in value; one that the forward has made is taken away.

        Returns:
            The label of a buffer whose earlier value nobody kept (it changed for the first time in this very call), or None.
        """
        lost = None
        if self._begun and not to_call_start and (elsewhere := self._elsewhere(self._statistics_copies)):
            lost = elsewhere[0].label
            self._take_for_changing(elsewhere)
            self._key = None  # the next call finds out anew what there is
        with torch.no_grad():
            for slot in self._new_slots():
                if self._known and not to_call_start:
                    lost = slot.label  # made by this attempt, or by an earlier piece: nobody looked
                del slot.owner[slot.key]
            for slot in self._slots:
                if to_call_start:
                    slot.at_piece = slot.at_call
                if not slot.at_piece.put_back(slot.owner, slot.key):
                    lost = slot.label
        if to_call_start:
            self._attributes.pop("piece", None)
            self._begun = False
        for module, saved in zip(self._plain, self._attributes.get("piece") or self._attributes.get("call") or (), strict=False):
            present = vars(module)
            for name in [name for name, value in present.items() if _is_plain(name, value) and name not in saved]:
                del present[name]
            present.update(saved)
        return lost


PLAIN = (bool, int, float, str, type(None))


def _attributes(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Numbers, flags and strings beside buffers: a cache and its length, a codebook and whether it was initialised, go back together."""
    return [{name: value for name, value in vars(module).items() if _is_plain(name, value)} for module in modules]


def _is_plain(name: str, value: object) -> bool:
    return isinstance(value, PLAIN) and name != "training"  # the mode is the caller's to set


def _copyable(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether values can be copied and compared; others (sparse, nested, meta, expanded, inference) are told by identity and version alone."""
    return (
        tensor is not None
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor.is_inference() or 0 in tensor.stride())
    )


def _same(mark: _Mark) -> bool:
    if mark.copy is None or mark.tensor is None:
        return True
    return _equal_bits(mark.copy, mark.tensor.detach().to(mark.copy.device))


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same; NaN is not equal to itself, so their bits decide. Allocates nothing: it runs when memory is short."""
    if torch.equal(a, b):
        return True
    if a.shape != b.shape or a.dtype != b.dtype or not (a.is_floating_point() and a.is_contiguous() and b.is_contiguous()):
        return False
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether it is one of torch's own with running statistics. One of the user's may put new tensors in their place, or count in an attribute."""
    return "running_mean" in module._buffers and type(module).__module__.startswith("torch.nn.modules.")


def _begin(slots: list[_Slot], copies: _Copies) -> None:
    """Marks where these buffers stand at a piece's start."""
    for slot in slots:
        tensor = slot.now()
        slot.at_piece = _Mark(tensor, _version(tensor))
    copies.take([slot.at_piece for slot in slots])


class _Copies:
    """Copies of the same tensors, taken again and again: the small ones of one type go into one tensor by one kernel."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._places: list[tuple[int, torch.Size]] = []
        self._copies: list[torch.Tensor] = []
        self._groups: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        self._single: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self, marks: Sequence[_Mark]) -> None:
        """Fills in the copies of the marks' tensors, where they can be copied."""
        if not self.take_again([mark.tensor for mark in marks]):
            marks = [mark for mark in marks if _copyable(mark.tensor)]
            tensors = [mark.tensor for mark in marks if mark.tensor is not None]
            if not self.take_again(tensors):
                self._prepare(tensors)
        for mark, copy in zip(marks, self._copies, strict=True):
            mark.copy = copy

    def take_again(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Takes the values anew, into the copies that there are; returns False, and does nothing, where they are of other tensors."""
        if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)) or self.displaced:
            return False
        self.again()
        return True

    def again(self) -> None:
        """The same, where it is known that they are the same tensors."""
        for flat_views, together in self._groups:
            torch.cat(flat_views, out=together)
        for tensor, copy in self._single:
            copy.copy_(tensor)

    @property
    def displaced(self) -> bool:
        """Whether one of the tensors has got other memory since it was copied first."""
        return _places(self._tensors) != self._places

    def _prepare(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self._copies, self._groups, self._single = [], [], [], []  # until it is done: there may be no room for copies
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for place, tensor in enumerate(tensors):
                if tensor.is_contiguous() and tensor.numel() <= TOGETHER:
                    groups.setdefault((tensor.dtype, tensor.device), []).append(place)
            together: dict[int, torch.Tensor] = {}
            for members in groups.values():
                views = [tensors[place].detach().view(-1) for place in members]
                block = torch.cat(views)
                self._groups.append((views, block))
                for place, piece in zip(members, block.split([view.numel() for view in views]), strict=True):
                    together[place] = piece.view(tensors[place].shape)
            for place, tensor in enumerate(tensors):
                copy = together.get(place)
                if copy is None:
                    copy = tensor.detach().clone()
                    self._single.append((tensor.detach(), copy))
                self._copies.append(copy)
        self._tensors, self._places = tensors, _places(tensors)


TOGETHER = 2**16
"""Largest tensor, in elements, that is copied together with others. For larger ones a kernel of their own costs nothing."""


def _places(tensors: Iterable[torch.Tensor]) -> list[tuple[int, torch.Size]]:
    """Where their values lie: a buffer may get other memory and stay the same object."""
    return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version
