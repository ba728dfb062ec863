"""Memory readings, and the two protocols behind them.

A sensor reads a device from outside, a meter its allocator from inside. A new kind of device gets a
module beside `accelerator.py` and `host.py` and a line in `devices.py`. Neither synchronises the
device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from elastic_mbs.errors import UsageError
from elastic_mbs.events import format_bytes
from elastic_mbs.memory.processes import Holder, describe

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True)
class Headroom:
    """A reading of a device's memory in bytes, with all figures taken at one time."""

    # bytes this process could still get from the device, besides its own allocator's reserve
    free: int
    total: int  # bytes of the device
    # bytes this process cannot get: co-tenants or the driver have them, or a cap on this process
    # keeps them away
    held_by_others: int
    source: str  # "nvml", "host", "cgroup", "budget", or a type of device such as "cuda"
    # time of the reading, in seconds of the reader's clock (monotonic unless another was injected)
    at: float
    # why growth must not rely on this reading, which is good enough for a message and for waiting;
    # None where it may
    doubt: str | None = None
    # other processes known to hold memory here, the biggest first; advisory, and often incomplete
    holders: tuple[Holder, ...] = ()

    @property
    def capacity(self) -> int:
        """Bytes this process could hold in all, free or held already: the bound of a peak."""
        return self.total - self.held_by_others

    def in_words(self) -> str:
        """Return the figures for an error's text, without a full stop."""
        free, total, others = map(format_bytes, (self.free, self.total, self.held_by_others))
        words = f"{free} of {total} were free at the last look, {others} held by others"
        if self.holders:
            words += f" (processes there: {describe(self.holders)})"
        return words if self.doubt is None else f"{words} (in doubt: {self.doubt})"


@dataclass(frozen=True)
class Unavailable:
    """The lack of a reading: why (in words), and when, in seconds of the reader's clock.

    It stops growth, never training.
    """

    reason: str
    at: float = 0.0

    def in_words(self) -> str:
        """Return that there are no figures, for an error's text, without a full stop."""
        return f"there is no memory reading ({self.reason})"


Reading = Headroom | Unavailable


def trouble_with(reading: Reading) -> str | None:
    """Return why growth must not rely on a reading: there is none, or it is in doubt.

    None where it may.
    """
    return reading.doubt if isinstance(reading, Headroom) else reading.reason


@dataclass(frozen=True)
class Usage:
    """Bytes of this process's tensors, by its own allocator's account.

    The peaks are those since they were last reset.
    """

    allocated: int  # in live tensors now
    reserved: int  # held by the allocator from the device now
    peak_allocated: int
    peak_reserved: int
    # how often the allocator has emptied its cache and tried again, since the process began
    retries: int
    idle: int = 0  # in its cache when the peaks were last reset

    @property
    def fragmentation(self) -> float:
        """Peak reserved over peak allocated, at least 1; multiplies a predicted peak of tensors."""
        return self._over_allocated(self.peak_reserved)

    @property
    def least_fragmentation(self) -> float:
        """Fragmentation without the memory that was cached when the peaks were reset.

        A failed attempt may have left it there, and half of it or less be of use now.
        """
        return self._over_allocated(self.peak_reserved - self.idle)

    def _over_allocated(self, reserved: int) -> float:
        return max(1.0, reserved / self.peak_allocated) if self.peak_allocated > 0 else 1.0


@runtime_checkable
class MemorySensor(Protocol):
    """A reader of one device's headroom."""

    def read(self) -> Reading:
        """Take one reading, now. Does not raise: whatever goes wrong becomes `Unavailable`."""


@runtime_checkable
class UsageMeter(Protocol):
    """A reader of this process's use of one device.

    Attributes:
        resets: number of calls of `reset_peak`, by which a reader knows whether a peak is its own.
    """

    resets: int

    def usage(self) -> Usage | None:
        """Return the figures now, or None where they are not known."""

    def reset_peak(self) -> None:
        """Start a new interval for the peaks."""


def parse_bytes(size: int | str) -> int:
    """Return the bytes, rounded down, of an int or of a string such as `"2GiB"` or `"500MB"`.

    KiB to TiB are powers of 1024; KB to TB are powers of 1000.

    Raises:
        UsageError: the text is no size, the unit is unknown, or the number is negative.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise UsageError(f"a size cannot be negative, got {size} bytes")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"cannot read {size!r} as a number of bytes: write an int, or a string such as '2GiB' "
            "(1024³) or '2GB' (1000³)"
        )
    return int(match[1]) * unit if "." not in match[1] else int(float(match[1]) * unit)
