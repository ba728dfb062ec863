"""The largest tensors of an attempt, with the module and the line of the user's code they are from.

It looks at every new tensor, so it is in place only while a piece runs that did not fit before. It
keeps shapes and names, and no tensor alive.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from elastic_mbs.dispatch import VersionedMode, run
from elastic_mbs.escalation.checkpoint import in_module
from elastic_mbs.events import format_bytes
from elastic_mbs.memory.budget import makes_host_memory

SHOWN = 3  # tensors in a message
_LEAST = 1024  # bytes; a smaller tensor is not looked at
_PART = 64  # likewise one below this part of the largest

_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_MODULE = str(Path(nn.Module.__module__.replace(".", os.sep) + ".py"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep

Names = Mapping[int, str]  # of modules, by their `id`


def names_of(roots: Iterable[nn.Module]) -> Names:
    """Return the qualified names of modules; a root has that of its class."""
    return {
        id(module): name or type(module).__name__
        for root in roots
        for name, module in root.named_modules()
    }


class Origin(NamedTuple):
    """The place where a tensor is made, or where an error is raised."""

    module: str = ""  # its qualified name; empty where none was running
    line: str = ""  # "file:number" in the user's code; empty where none was running
    in_backward: bool = False  # without a line: the engine of backward was running

    def __str__(self) -> str:
        module = [f"module {self.module!r}"] if self.module else []
        line = [f"at {self.line}"] if self.line else ["in backward"] if self.in_backward else []
        return " ".join([*module, *line])


class LargeTensor(NamedTuple):
    """A tensor that was alive when its attempt ended."""

    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    origin: Origin

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        known = [f"{kind} {self.shape}", format_bytes(self.nbytes), str(self.origin)]
        return ", ".join(filter(None, known))


class Share(NamedTuple):
    """The bytes that one module has of an attempt's memory."""

    module: str
    nbytes: int

    def __str__(self) -> str:
        return f"{format_bytes(self.nbytes)} in module {self.module!r} alone"


def largest_share(tensors: Iterable[LargeTensor], asked: Share) -> Share | None:
    """Return the module whose tensors take the most; None where no tensor is of a module.

    Args:
        tensors: those that are alive.
        asked: the request that failed, and the module that made it.
    """
    sums = Counter[str]({asked.module: asked.nbytes})
    for tensor in tensors:
        sums[tensor.origin.module] += tensor.nbytes
    del sums[""]  # the loss, and backward
    return Share(*sums.most_common(1)[0]) if sums.total() else None


def origin_of_error(error: BaseException, names: Names) -> Origin:
    """Return the place where an error was raised."""
    return _origin(reversed(list(traceback.walk_tb(error.__traceback__))), names)


def _origin(
    frames: Iterable[tuple[FrameType, int]], names: Names, *, in_backward: bool = False
) -> Origin:
    """Return the module and the line of these frames, given from the innermost outwards.

    A thread of a device's backward has no frame of the engine: `in_backward` says it.
    """
    module = line = installed = ""
    for frame, number in frames:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if file.startswith(_TORCH):
            if name == "_engine_run_backward":
                in_backward = True
                break
            # The locals of no other frame are read: Python 3.11 would keep them alive with it.
            if not module and name == "_call_impl" and file.endswith(_MODULE):
                module = names.get(id(frame.f_locals.get("self")), "")
        elif not module and frame.f_code is in_module.__code__:
            module = names.get(id(frame.f_locals["module"]), "")
        elif any(part in file for part in _INSTALLED):
            installed = installed or f"{_short(file)}:{number}"
        elif not line and not file.startswith((_OURS, _PYTHON, "<")):
            line = f"{_short(file)}:{number}"
        if module and line:
            break
    line = line or installed
    return Origin(module, line, in_backward and not line)


def _short(file: str) -> str:
    """Return a path from the working directory on, or from that of the installed packages on."""
    for part in _INSTALLED:
        file = file.rpartition(part)[2]
    return file.removeprefix(os.getcwd() + os.sep)


def _running() -> Iterator[tuple[FrameType, int]]:
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


class _Seen(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    tensor: LargeTensor


class _Watch(VersionedMode):
    """The mode that sees new tensors."""

    def __init__(self, names: Names, devices: Collection[torch.device]) -> None:
        super().__init__()
        self._names = names
        self._devices = devices
        self._largest = 0
        self._seen: dict[int, _Seen] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # a subclass runs plain operations in its own handler, and those come back to here
            if any(issubclass(kind, FakeTensor) for kind in types):
                return func(*args, **(kwargs or {}))
            return NotImplemented
        out = run(func, args, kwargs)
        if _makes(func):
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor) and _has_shape(tensor):
                    self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < max(_LEAST, self._largest // _PART):
            return
        if tensor.device not in self._devices or makes_host_memory():
            return  # a copy that waits on the host
        self._largest = max(self._largest, nbytes)
        in_backward = torch._C._current_graph_task_id() >= 0
        origin = _origin(_running(), self._names, in_backward=in_backward)
        made = LargeTensor(nbytes, tensor.dtype, tuple(tensor.shape), origin)
        self._seen.pop(id(storage), None)  # of one that is gone: the order is that of making
        self._seen[id(storage)] = _Seen(weakref.ref(storage), made)

    def alive(self) -> list[LargeTensor]:
        """Return the tensors that are alive, the largest first, and the oldest of one size."""
        found = [seen.tensor for seen in self._seen.values() if seen.storage() is not None]
        return sorted(found, key=lambda tensor: -tensor.nbytes)


def _has_shape(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _makes(func: Any) -> bool:
    """Return whether an operation returns tensors of its own, and no views."""
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    return schema is not None and all(value.alias_info is None for value in schema.returns)


class LargestTensors:
    """A context manager: the new tensors of an attempt are looked at.

    Args:
        names: returns the names of modules.
        devices: the devices whose tensors are looked at.
    """

    def __init__(self, names: Callable[[], Names], devices: Collection[torch.device]) -> None:
        self._names = names
        self._devices = devices
        self._mode: _Watch | None = None
        self._entered = False

    def __enter__(self) -> None:
        self._mode = _Watch(self._names(), self._devices)
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._entered = True

    def __exit__(self, *error: object) -> None:
        """Stop looking; the tensors seen stay known. May be repeated."""
        entered, self._entered = self._entered, False
        # One that the user has left open lies above it, and would be taken off in its place.
        if entered and _get_current_dispatch_mode_stack()[-1:] == [self._mode]:
            self._mode.__exit__(*error)  # type: ignore[union-attr]  # it is one

    def alive(self) -> list[LargeTensor]:
        """Return the tensors of the latest attempt that are alive, the largest first."""
        return [] if self._mode is None else self._mode.alive()
