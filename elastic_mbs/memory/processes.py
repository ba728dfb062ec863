"""The other processes that have memory on a GPU, as far as NVML knows.

Advisory: for messages, never for a decision.

On Windows (WDDM) and WSL the bytes of a process are not known. In a container the list is empty or
has the host's PIDs, which mean nothing there: no name is looked up then (it would be another
process's), and our own entry cannot be told from the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil

from elastic_mbs.events import format_bytes

SHOWN = 3  # holders that are named in a message, the biggest
# the kernel gives the host's own PID namespace this fixed number (PROC_PID_INIT_INO)
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class Holder:
    """A process that has memory on the device."""

    pid: int  # its process id for the driver, which in a container is the host's
    # the program's; None where it cannot be read, or the PID means nothing here
    name: str | None = None
    bytes: int | None = None  # on the device; None where the driver does not know


def describe(holders: Iterable[Holder]) -> str:
    """Return the first holders in words; empty where none is known.

    As in `python (PID 4711) 3.2 GiB, PID 88, and 2 more`.
    """
    words = []
    for holder in holders:
        name = f"PID {holder.pid}" if holder.name is None else f"{holder.name} (PID {holder.pid})"
        words.append(name if holder.bytes is None else f"{name} {format_bytes(holder.bytes)}")
    return ", ".join(
        words if len(words) <= SHOWN else [*words[:SHOWN], f"and {len(words) - SHOWN} more"]
    )


def holders_on(pynvml: Any, handle: Any) -> tuple[Holder, ...]:
    """Return the other processes on a device, the biggest first, unknown sizes last.

    Raises:
        NVMLError: as the binding does.
    """
    found: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics"):
        for process in getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses")(handle):
            # one with both kinds of context is in both lists, with the same figure
            sizes = [
                size for size in (process.usedGpuMemory, found.get(process.pid)) if size is not None
            ]
            found[process.pid] = max(sizes, default=None)
    ours = os.getpid()
    named = ours in found or pids_are_ours()
    found.pop(ours, None)
    by_size = sorted(found.items(), key=lambda item: (1 if item[1] is None else -item[1], item[0]))
    return tuple(Holder(pid, name_of(pid) if named else None, size) for pid, size in by_size)


def pids_are_ours() -> bool:
    """Return whether the driver's PIDs are those of this process's namespace."""
    if sys.platform != "linux":
        return True
    try:
        return os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def name_of(pid: int) -> str | None:
    """Return the name of a process, or None."""
    try:
        return psutil.Process(pid).name() or None
    except (psutil.Error, OSError, ValueError, OverflowError):
        return None
