"""A limit on this process's own memory, so that its allocator fails before the kernel kills it.

On a CPU there is no out-of-memory error: Linux hands out addresses freely, and kills when they are
written to and no page is left. RLIMIT_DATA limits the addresses themselves: beyond it torch's
allocator raises, and the piece is replayed in halves. The limit is the cgroup's memory, less the
others' and a margin. It is not the free memory on top of the mapped: memory that the heap has
handed back to the kernel is still mapped, and can be written to again without a request
(docs/internals/memory-counting.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from elastic_mbs.errors import UsageError
from elastic_mbs.events import format_bytes, logger
from elastic_mbs.memory.host import HostSensor
from elastic_mbs.memory.oom_patterns import ONEDNN
from elastic_mbs.memory.sensor import Unavailable, parse_bytes

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # a module elsewhere, absent on Windows

_NEEDS = "host_guard needs Linux, which holds all private memory of a process to RLIMIT_DATA"
# bytes, and a share of the limit: page tables grow with it, and the bytes that are counted late
_LEAST_MARGIN, _MARGIN_SHARE = 32 << 20, 128
_NEAR = 4  # an ambiguous error counts when less than this fraction (1/4) of the limit was left


class HostGuard:
    """A lower soft limit of RLIMIT_DATA around each piece: the memory left to this process.

    The cgroup leaves it, or the machine. `renew` before a piece, `lift` after it, so that
    everything between two pieces runs under the user's own limits, which are never exceeded. Guards
    nest and the lowest limit counts. Other threads and programs started from within a piece are
    under it, too; a forked child is not.

    What it cannot do:

    - The limit counts addresses, and those of freed memory that the heap keeps: a process may be
      refused memory somewhat before the group is full. If others grow into memory that our heap has
      mapped already, nothing holds them.
    - A thread that cannot be made ends the process. torch's own are made before the first piece;
      libraries with threads of their own, imports and `torch.compile` should run once before.
    - oneDNN crashes the process when it has no memory to make a convolution of a *new* shape, and a
      model with convolutions is warned.
    - Only pieces are guarded: `optimizer.step()` and the data loader run without a limit.

    Args:
        margin: bytes left to the kernel and to others while one piece runs, or a string such as
            `"64MiB"`. None: 1/128 of the limit, at least 32 MiB.
        modules: the model's modules, to be looked through for convolutions.
        warn: called with one sentence, once each, where the guard turns itself off, where others
            hold memory that we had, and where there are convolutions.
        root: the folder taken for `/` (in tests).

    Attributes:
        trouble: why the guard is off, or None.
        limit: the limit set by the latest `renew`, in bytes of addresses.

    Raises:
        UsageError: the margin is no size, or this system does not hold a process to RLIMIT_DATA
            (macOS, Windows, gVisor).
    """

    def __init__(
        self,
        margin: int | str | None = None,
        *,
        modules: Iterable[nn.Module] = (),
        warn: Callable[[str], object] = logger.warning,
        root: Path = Path("/"),
    ) -> None:
        self.trouble: str | None = None
        self.limit: int | None = None
        self._margin = None if margin is None else parse_bytes(margin)
        self._warn = warn
        self._sensor = HostSensor(root=root)
        self._ready: tuple[int, int] | None = None
        self._overrun = False
        if resource is None or sys.platform != "linux":
            raise UsageError(
                f"{_NEEDS}; this is {sys.platform}: leave it off (a MemoryBudget limits tensors "
                "anywhere)"
            )
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl has none
        try:
            enforced = _process.enforced()
        except (OSError, ValueError) as error:
            self._turn_off(error)
            return
        if not enforced:
            raise UsageError(
                f"{_NEEDS}, and this kernel maps memory beyond it (gVisor, or booted with "
                "ignore_rlimit_data): leave it off"
            )
        if torch.backends.mkldnn.enabled and any(map(_uses_onednn, modules)):
            self._warn(
                "the host guard and convolutions: oneDNN crashes the process when it has no "
                "memory to make a convolution of a new shape. Run every "
                "size that fits once without the guard and set max_micro_batch_size, or set "
                "torch.backends.mkldnn.enabled = False"
            )

    def __enter__(self) -> None:
        self.renew()

    def __exit__(self, *error: object) -> None:
        self.lift()

    def renew(self) -> None:
        """Set the limit from a new reading; about 0.1 ms.

        Does not raise: where the limit cannot be set the guard warns once and is off.
        """
        if self.trouble is not None:
            return
        self._make_threads()
        try:
            self.limit = _process.lower(self, self._allowed())
            mapped = own_memory()[1]
            if mapped > self.limit and self._trim is not None:
                self._trim(0)  # the heap gives back its free memory, which others may take now
                mapped = own_memory()[1]
        except (OSError, ValueError) as error:
            self._turn_off(error)
            self.lift()
            return
        if mapped > self.limit and not self._overrun:
            self._overrun = True
            ours, theirs = (
                format_bytes(self.limit),
                "others hold the rest, or its heap keeps memory that was freed",
            )
            self._warn(
                f"the host guard leaves {ours} to this process, which has mapped "
                f"{format_bytes(mapped)} already: {theirs}"
            )

    def lift(self) -> None:
        """Put the user's limit back, unless another guard is still up.

        May be called at any time; does not raise.
        """
        try:
            _process.release(self)
        except (OSError, ValueError) as error:
            self._turn_off(error)

    def explains(self, message: str) -> bool:
        """Return whether an ambiguous error of oneDNN is out-of-memory: little is left."""
        if self.trouble is not None or self.limit is None or not ONEDNN.search(message):
            return False
        try:
            return self.limit - own_memory()[1] < self.limit // _NEAR
        except (OSError, ValueError):
            return False

    def _allowed(self) -> int:
        """Return the bytes that this process may map: its own and those free, less the margin."""
        reading, (anonymous, _) = self._sensor.read(), own_memory()
        if isinstance(reading, Unavailable):
            raise OSError(reading.reason)
        margin = (
            max(_LEAST_MARGIN, reading.total // _MARGIN_SHARE)
            if self._margin is None
            else self._margin
        )
        return max(0, min(reading.total, anonymous + reading.free) - margin)

    def _make_threads(self) -> None:
        """Make torch's thread pools and import everything that a piece would.

        Neither can bear a refusal: libgomp ends the process.
        """
        ready = os.getpid(), torch.get_num_threads()
        if ready == self._ready:
            return
        # of a MemoryBudget
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            contextlib.suppress(torch.OutOfMemoryError),
        ):
            # torch gives at least this many elements to one thread
            torch.zeros((1 << 15) * ready[1], dtype=torch.uint8).add_(1)
            # autograd's threads, in a build that knows other devices; and the import of sympy by
            # the first backward with a given gradient, which would stay half done for the rest of
            # the process
            torch.autograd.backward(torch.zeros((), requires_grad=True).clone(), torch.ones(()))
        self._ready = ready

    def _turn_off(self, error: Exception) -> None:
        if self.trouble is not None:
            return
        self.trouble = (
            f"the host guard is off, its limit cannot be set here: {type(error).__name__}: {error}"
        )
        self._warn(self.trouble)


def _uses_onednn(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd) and module.weight.dtype != torch.float64


def margin_of(host_guard: bool | str) -> int | None:
    """Return the margin that the argument `host_guard` asks for, in bytes; None for the default.

    Raises:
        UsageError: it is neither a bool nor a size.
    """
    if isinstance(host_guard, bool):
        return None
    if not isinstance(host_guard, str):
        raise UsageError(
            f"host_guard={host_guard!r} is neither True nor False; a margin is a string with its "
            "unit, such as '64MiB'"
        )
    return parse_bytes(host_guard)


def refuse_devices(devices: Iterable[torch.device]) -> None:
    """Refuse a model with a part that is not on the CPU.

    A device's allocator raises by itself, and its driver may not survive a refused mapping.

    Raises:
        UsageError: a device is not the CPU.
    """
    for device in devices:
        if device.type != "cpu":
            raise UsageError(
                "host_guard is for models that train on the CPU, and this one is on "
                f"{str(device)!r}: leave it off"
            )


def own_memory() -> tuple[int, int]:
    """Return this process's bytes: resident and its own alone, and counted against RLIMIT_DATA.

    The kernel calls them RssAnon, and VmData with the stack.
    """
    _, resident, shared, _, _, data, *_ = [
        int(pages) * mmap.PAGESIZE for pages in Path("/proc/self/statm").read_bytes().split()
    ]
    return max(0, resident - shared), data


class _ProcessLimit:
    """The process's soft limit of RLIMIT_DATA: the user's, or the lowest of the active guards."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wanted: dict[object, int] = {}  # for each guard
        self._users = (0, 0)  # soft and hard, as they were before the first guard

    def lower(self, guard: object, limit: int) -> int:
        """Add a guard, or renew its limit; return the limit now in force.

        Raises:
            OSError: the system refuses, and nothing has changed. ValueError likewise.
        """
        with self._lock:
            users = self._users if self._wanted else resource.getrlimit(resource.RLIMIT_DATA)
            wanted = {**self._wanted, guard: limit}
            lowest = _lowest(*wanted.values(), *users)
            resource.setrlimit(resource.RLIMIT_DATA, (lowest, users[1]))
            self._wanted, self._users = wanted, users
            return lowest

    def release(self, guard: object) -> None:
        """Remove a guard, if it is up.

        The last one is removed without a new object: there may be no memory for any.
        """
        with self._lock:
            if self._wanted.pop(guard, None) is not None:
                others = self._wanted
                resource.setrlimit(
                    resource.RLIMIT_DATA,
                    (_lowest(*others.values(), *self._users), self._users[1])
                    if others
                    else self._users,
                )

    def enforced(self) -> bool:
        """Return whether the kernel refuses a mapping beyond the limit.

        It is tried out, far above the need of other threads meanwhile.
        """
        room = 64 << 20
        with self._lock:
            self.lower(self, own_memory()[1] + room)
            try:
                mmap.mmap(-1, 4 * room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
            except OSError as error:
                return error.errno == errno.ENOMEM
            finally:
                self.release(self)
            return False

    def leave_in_child(self) -> None:
        """Put the user's limit back in a forked child, which has memory of its own."""
        self._lock = threading.RLock()
        if self._wanted:
            self._wanted = {}
            resource.setrlimit(resource.RLIMIT_DATA, self._users)


def _lowest(*limits: int) -> int:
    finite = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(finite, default=resource.RLIM_INFINITY)


_process = _ProcessLimit()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.leave_in_child)
