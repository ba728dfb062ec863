"""What a memory reading is, and the two protocols behind it: a sensor reads a device from outside, a meter its allocator from inside.

Both are cheap and neither synchronises the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from elastic_mbs.events import format_bytes
from elastic_mbs.memory.processes import Holder, describe


@dataclass(frozen=True)
class Headroom:
    """One reading of a device's memory, all figures taken together.

    Attributes:
        free: bytes that this process could still get from the device. Memory that its own allocator keeps in reserve is not among them.
        total: bytes that the device has.
        held_by_others: bytes that this process cannot get: co-tenants or the driver have them, or a cap on this process keeps it from them.
        source: "nvml", "cuda", "host", "cgroup" or "budget".
        at: time of the reading, in seconds of the reader's clock (monotonic unless another was injected).
        doubt: why growth must not rely on this reading; None where it may. The figures are good enough for a message, and for waiting.
        holders: processes that are known to hold memory here, the biggest first, without this one; advisory, and often incomplete.
    """

    free: int
    total: int
    held_by_others: int
    source: str
    at: float
    doubt: str | None = None
    holders: tuple[Holder, ...] = ()

    @property
    def capacity(self) -> int:
        """Bytes this process could hold in all: what is free and what it holds already. Hold a predicted peak against this."""
        return self.total - self.held_by_others

    def in_words(self) -> str:
        """The figures for an error's text, without a full stop."""
        free, total, others = map(format_bytes, (self.free, self.total, self.held_by_others))
        words = f"{free} of {total} were free at the last look, {others} held by others"
        if self.holders:
            words += f" (processes there: {describe(self.holders)})"
        return words if self.doubt is None else f"{words} (in doubt: {self.doubt})"


@dataclass(frozen=True)
class Unavailable:
    """No reading, and why. It stops growth, never training.

    Attributes:
        reason: what went wrong, in words.
        at: time of the attempt, in seconds of the reader's clock.
    """

    reason: str
    at: float = 0.0

    def in_words(self) -> str:
        """That there are no figures, for an error's text, without a full stop."""
        return f"there is no memory reading ({self.reason})"


Reading = Headroom | Unavailable


def trouble_with(reading: Reading) -> str | None:
    """Why growth must not rely on a reading: there is none, or it is in doubt. None where it may."""
    return reading.doubt if isinstance(reading, Headroom) else reading.reason


@dataclass(frozen=True)
class Usage:
    """What the tensors of this process take, in bytes by its own allocator's account.

    Attributes:
        allocated: in live tensors now.
        reserved: that the allocator holds from the device now.
        peak_allocated: most allocated since the last reset of the peaks.
        peak_reserved: most reserved since then.
        retries: how often the allocator has had to empty its cache and try again, since the process began.
        idle: what its cache held when the peaks were last reset.
    """

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    retries: int
    idle: int = 0

    @property
    def fragmentation(self) -> float:
        """Peak reserved over peak allocated, at least 1: what a predicted peak of tensors must be multiplied by, at most."""
        return self._over_allocated(self.peak_reserved)

    @property
    def least_fragmentation(self) -> float:
        """The same without what was cached before, by an attempt that has failed, say: no more than half of it may be of use now."""
        return self._over_allocated(self.peak_reserved - self.idle)

    def _over_allocated(self, reserved: int) -> float:
        return max(1.0, reserved / self.peak_allocated) if self.peak_allocated > 0 else 1.0


@runtime_checkable
class MemorySensor(Protocol):
    """Reads the headroom of one device."""

    def read(self) -> Reading:
        """One reading, now. Does not raise: what goes wrong becomes `Unavailable`."""


@runtime_checkable
class UsageMeter(Protocol):
    """Reads what this process uses on one device.

    Attributes:
        resets: how often `reset_peak` was called, so that a reader can tell whether a peak belongs to its own interval.
    """

    resets: int

    def usage(self) -> Usage | None:
        """The figures now, or None where they are not known."""

    def reset_peak(self) -> None:
        """Starts a new interval for the peaks."""


class NoSensor:
    """The sensor of a device that has none: always `Unavailable`, with the reason given."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def read(self) -> Reading:
        """No reading."""
        return Unavailable(self._reason)


class NoMeter:
    """The meter of a device whose allocator cannot be read."""

    def __init__(self) -> None:
        self.resets = 0

    def usage(self) -> Usage | None:
        """Always None."""
        return None

    def reset_peak(self) -> None:
        """Counts the call; there is nothing to reset."""
        self.resets += 1
