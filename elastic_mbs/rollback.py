"""What a failed attempt changes besides gradients, and putting it back: random streams and buffers.

Random streams: torch's CPU generator, the generator of every device in use, Python's `random`, numpy's global one, and generators the user names.
Buffers: running statistics, spectral-norm vectors, codebooks. A piece's start and the call's start are both kept, because a recovery goes back to
either. Source: shared/reference/autograd.md, "State a failed attempt leaves behind".
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn


class StreamState(NamedTuple):
    """States of all random streams at one moment; `slow` is None where the host's streams were not read."""

    generators: tuple[torch.Tensor, ...]
    slow: tuple[Any, ...] | None


class RandomStreams:
    """Reads and restores every random stream that a step may draw from.

    torch's generators take 1.5 µs each; Python's and numpy's together 45 µs, so those are read at the call's start and, once they are known to be
    drawn from, before each piece as well.

    Args:
        generators: the user's own `torch.Generator`, `random.Random` or `numpy.random.Generator`/`RandomState` objects.
        devices: devices whose default generator may be drawn from.
    """

    def __init__(self, generators: Sequence[Any], devices: Iterable[torch.device]) -> None:
        self._torch: list[torch.Generator] = [torch.default_generator]
        for device in devices:
            if device.type == "cuda":  # cuda-only
                torch.cuda.init()
                self._torch.append(torch.cuda.default_generators[device.index or 0])
        self._hosts: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [(random.getstate, random.setstate)]
        for generator in generators:
            if isinstance(generator, torch.Generator):
                self._torch.append(generator)
            else:
                self._hosts.append(_accessors(generator))
        self._knows_numpy = False
        self.draws_on_host = False

    def _slow(self) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
        if not self._knows_numpy and (numpy := sys.modules.get("numpy.random")) is not None:
            self._hosts.append((partial(numpy.get_state, legacy=False), numpy.set_state))
            self._knows_numpy = True
        return self._hosts

    def read(self, *, slow: bool) -> StreamState:
        """The present states; `slow` asks for those of Python and numpy too."""
        generators = tuple([generator.get_state() for generator in self._torch])
        return StreamState(generators, tuple([get() for get, _ in self._slow()]) if slow else None)

    def restore(self, state: StreamState) -> None:
        """Puts every stream that was read back to where it was."""
        for generator, value in zip(self._torch, state.generators, strict=True):
            generator.set_state(value)
        if state.slow is not None:
            # numpy may have been imported since: its stream is then left alone, nothing was drawn from it before.
            for (_, put), value in zip(self._slow(), state.slow, strict=False):
                put(value)

    def moved(self, since: StreamState) -> bool:
        """Whether any stream that was read moved since then."""
        return self.moved_on_devices(since) or self.moved_on_host(since)

    def moved_on_devices(self, since: StreamState) -> bool:
        """Whether one of torch's generators moved since then."""
        return any(not torch.equal(generator.get_state(), value) for generator, value in zip(self._torch, since.generators, strict=True))

    def moved_on_host(self, since: StreamState) -> bool:
        """Whether Python's, numpy's or the user's own host stream moved since then."""
        if since.slow is None:
            return False
        now = [get() for get, _ in self._slow()]
        return len(now) > len(since.slow) or any(not _equal(a, b) for a, b in zip(now, since.slow, strict=False))


def _accessors(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    if hasattr(generator, "getstate"):
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):
        return generator.get_state, generator.set_state
    bits = generator.bit_generator

    def put(state: Any) -> None:
        bits.state = state

    return lambda: bits.state, put


def check_generators(generators: Sequence[Any]) -> str | None:
    """Why one of these cannot be rolled back, or None."""
    if not isinstance(generators, Sequence):
        return f"generators={generators!r} is no sequence of random generators"
    for generator in generators:
        try:
            (generator.get_state if isinstance(generator, torch.Generator) else _accessors(generator)[0])()
        except (AttributeError, NotImplementedError):
            return f"generators= has a {type(generator).__name__}, whose state cannot be read; give torch, random or numpy generators"
    return None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "tobytes"):  # a numpy array
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b)


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

    def now(self) -> torch.Tensor | None:
        return self.owner.get(self.key)

    def moved(self, since: _Mark) -> bool:
        tensor = self.now()
        return tensor is not since.tensor or _version(tensor) != since.version


class BufferCopies:
    """Copies of the buffers that the forward changes, taken before each piece and at the call's start.

    Which ones those are is learned for each loss function: running statistics of modules in training mode always (eager BatchNorm changes their
    values and not their version), others once a version or an identity has moved. Its first call copies all of them to the host.
    """

    def __init__(self) -> None:
        self._changing: set[tuple[int, str]] = set()
        self._learned: set[object] = set()
        self._key: object = None
        self._modules: Sequence[nn.Module] = ()
        self._slots: list[_Slot] = []
        self._still: list[_Slot] = []
        self._spare: dict[str, list[torch.Tensor]] = {"call": [], "piece": []}
        self._plain: list[nn.Module] = []
        self._attributes: dict[str, list[dict[str, Any]]] = {}

    def begin_call(self, modules: Sequence[nn.Module], key: object = None) -> None:
        """Remembers every buffer as it is now, and copies those that change.

        Args:
            modules: whose buffers.
            key: the loss function; what is known of one says nothing of another.
        """
        self._modules = modules
        self._slots = []
        flags, plain = [], []
        for module in modules:
            buffers = module._buffers
            if buffers:
                flags.append(module.training)
                statistics = module.training and "running_mean" in buffers
                if "running_mean" not in buffers:
                    plain.append(module)
                for name, tensor in buffers.items():
                    mark = _Mark(tensor, _version(tensor))
                    changing = (statistics and _copyable(tensor)) or (id(buffers), name) in self._changing
                    self._slots.append(_Slot(buffers, name, f"{type(module).__name__}.{name}", changing, mark, mark))
        self._key = key, tuple(flags)  # a codebook, say, is moved in training mode only
        self._plain = list(modules) if self._key not in self._learned else plain
        self._attributes = {"call": _attributes(self._plain)}
        self._still = [slot for slot in self._slots if not slot.changing]
        if len(self._still) < len(self._slots):
            self._take("call", [slot.at_call for slot in self._slots if slot.changing])
        if self._key not in self._learned:
            with torch.inference_mode(False):
                for slot in self._still:
                    if _copyable(slot.at_call.tensor):
                        slot.at_call.copy = slot.at_call.tensor.detach().to("cpu", copy=True)

    @property
    def busy(self) -> bool:
        """Whether there is something to copy before each piece."""
        return bool(self._plain) or len(self._still) < len(self._slots)

    @property
    def watched(self) -> bool:
        """Whether there is something to compare after each piece."""
        return bool(self._slots) or self._key not in self._learned

    def begin_piece(self) -> None:
        """Copies the buffers that change, before a piece that is not the call's first (whose start is the call's)."""
        if self._plain:
            self._attributes["piece"] = _attributes(self._plain)
        if len(self._still) < len(self._slots):
            changing = [slot for slot in self._slots if slot.changing]
            for slot in changing:
                tensor = slot.now()
                slot.at_piece = _Mark(tensor, _version(tensor))
            self._take("piece", [slot.at_piece for slot in changing])

    def _take(self, where: str, marks: list[_Mark]) -> None:
        """Fills in the copies in few kernels, into the tensors of an earlier copy where they still fit."""
        wanted = [mark for mark in marks if _copyable(mark.tensor)]
        copies = self._spare[where] = _copy_into(self._spare[where], [mark.tensor for mark in wanted if mark.tensor is not None])
        for mark, copy in zip(wanted, copies, strict=True):
            mark.copy = copy

    def end_clean_piece(self) -> bool:
        """Learns which buffers the forward changes; returns whether it changes any.

        After the first clean piece of a loss function values are compared too, so that a change that moves no version is seen, and buffers that the
        forward has made are taken in.
        """
        first = self._key not in self._learned
        for slot in self._still:
            mark = slot.at_piece
            if slot.moved(mark) or (first and not _same(mark)):
                slot.changing = True
                self._changing.add((id(slot.owner), slot.key))
        if first:
            self._learned.add(self._key)
            for slot in self._new_slots():
                self._changing.add((id(slot.owner), slot.key))
                self._slots.append(slot)
        self._still = [slot for slot in self._still if not slot.changing]
        return len(self._still) < len(self._slots)

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
        return any(slot.moved(slot.at_piece) or not _same(slot.at_piece) for slot in self._slots) or bool(self._new_slots())

    def restore(self, *, to_call_start: bool) -> str | None:
        """Puts every buffer back, as an object and in value; one that the forward has made is taken away.

        Returns:
            The label of a buffer whose earlier value nobody kept (it changed for the first time in this very call), or None.
        """
        lost = None
        with torch.no_grad():
            for slot in self._new_slots():
                if self._key in self._learned and not to_call_start:
                    lost = slot.label  # made by this attempt, or by an earlier piece: nobody looked
                del slot.owner[slot.key]
            for slot in self._slots:
                if to_call_start:
                    slot.at_piece = slot.at_call
                if not slot.at_piece.put_back(slot.owner, slot.key):
                    lost = slot.label
        if to_call_start:
            self._attributes.pop("piece", None)
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


def _copy_into(copies: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies `tensors` in few kernels, into the tensors of an earlier copy where they still fit."""
    with torch.inference_mode(False), torch.no_grad():
        fits = len(copies) == len(tensors) and all(
            a.shape == b.shape and a.dtype == b.dtype and a.device == b.device for a, b in zip(copies, tensors, strict=True)
        )
        if not fits:
            return [tensor.detach().clone() for tensor in tensors]
        if tensors:
            torch._foreach_copy_(copies, tensors)
        return copies


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version
