"""Memory limits in general: memory of a given size, and a co-tenant that takes part of it."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable

import psutil
import torch

from elastic_mbs.errors import UsageError
from elastic_mbs.memory import Headroom, MemorySensor, Reading, Unavailable, Usage


class MemoryLimit(contextlib.AbstractContextManager["MemoryLimit"]):
    """A device's memory during one run.

    The co-tenant has `others()` of its capacity, this process the rest. The end of the block lifts
    every limit.
    """

    # "budget" (counted tensors), "shim" (the allocator itself fails), "rlimit" (the process limit),
    # "cuda"
    kind: str
    device: torch.device  # where the model is trained
    # the sensor and meter that ElasticMBS is given; None where it finds both by itself
    sensor: MemorySensor | None

    def __init__(self) -> None:
        self.capacity: int | None = None  # bytes for all; None without a limit
        self._held = 0  # bytes that the co-tenant was made to hold
        self._undo = contextlib.ExitStack()

    def __exit__(self, *error: object) -> None:
        self._undo.close()
        self.capacity, self._held = None, 0
        self.lift()

    @abstractmethod
    def lift(self) -> None:
        """Take back every change of the limit's, when it is left."""

    # only the process limit has something to do
    def warm(self, run: Callable[[int], object], sizes: Iterable[int]) -> None:
        """Run a piece of each size once: a first time under pressure could end the process."""

    @abstractmethod
    def resize(self, capacity: int | None) -> None:
        """Set the bytes that there are for all; None lifts the limit."""

    def fragment(self, largest: int | None) -> None:
        """Make single allocations above `largest` bytes fail, whatever is free; None ends that.

        Raises:
            UsageError: this kind of limit cannot.
        """
        raise UsageError(
            f"the limit {self.kind!r} knows no fragmentation: under 'shim' and 'budget' single "
            "large allocations can fail"
        )

    @abstractmethod
    def occupy(self, held: int) -> None:
        """Make the co-tenant hold so many bytes: the free ones at once, the rest when it can."""

    def others(self) -> int:
        """Return the co-tenant's bytes; some limits count the bytes that it waits for as well."""
        return self._held

    def share(self, size: int) -> None:  # a fence says so itself
        """Note that the device was given `size` bytes for all processes on it."""

    @abstractmethod
    def live(self) -> int:
        """Return the bytes that this process holds now."""

    def reserved(self) -> int:
        """Return the device's bytes that this process has, by its allocator's account."""
        return self.live()

    def expandable(self) -> bool:
        """Return True if the allocator mends fragmented memory."""
        return False

    @abstractmethod
    def peak(self) -> int:
        """Return the most bytes held since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new interval."""

    @abstractmethod
    def failures(self) -> int | None:
        """Return the failed allocations so far in this process; None where they are not counted."""


class HostLimit(MemoryLimit):
    """A limit on the CPU. `sensor` is both sensor and meter of the model that trains under it."""

    sensor: HostGauge

    def __init__(self) -> None:
        super().__init__()
        self.device, self.sensor = torch.device("cpu"), HostGauge(self)
        self.highest = 0  # of the intervals before a runtime began its own

    def resize(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.apply()

    def occupy(self, held: int) -> None:
        self._held = held
        self.apply()

    def lift(self) -> None:
        self.apply()

    def total(self) -> int | None:
        """Return the bytes that there are for all, now; None without a limit."""
        return self.capacity

    def peak(self) -> int:
        return max(self.highest, self.peak_of_interval())

    def reset_peak(self) -> None:
        self.begin_interval()
        self.highest = 0
        self.sensor.resets += 1

    @abstractmethod
    def apply(self) -> None:
        """Put the limit in force, after it has changed."""

    @abstractmethod
    def peak_of_interval(self) -> int:
        """Return the most bytes held since `begin_interval`."""

    @abstractmethod
    def begin_interval(self) -> None:
        """Make the peak start again from the live bytes."""


class HostGauge:
    """Sensor and meter of a limit on the CPU. May be read by any thread."""

    def __init__(self, memory: HostLimit) -> None:
        self._memory = memory
        self.resets = 0  # of the peak, by a runtime or by the limit's user

    def read(self) -> Reading:
        """Return the bytes that this process could still get.

        Without a limit the machine's memory is the capacity.
        """
        at = time.monotonic()
        try:
            live, others, capacity = (
                self._memory.live(),
                self._memory.others(),
                self._memory.total(),
            )
        except (OSError, ValueError) as error:
            return Unavailable(f"the limit {self._memory.kind!r} cannot be read: {error}", at)
        total = psutil.virtual_memory().total if capacity is None else capacity
        others = min(others, total)
        return Headroom(max(0, total - others - live), total, others, self._memory.kind, at)

    def usage(self) -> Usage:
        """Return live bytes and their peak. Nothing is kept in reserve: reserved is allocated."""
        live = self._memory.live()
        peak = max(live, self._memory.peak_of_interval())
        return Usage(live, live, peak, peak, 0)

    def reset_peak(self) -> None:
        """Start an interval for a runtime; the limit's own goes on."""
        self._memory.highest = self._memory.peak()
        self._memory.begin_interval()
        self.resets += 1


def switch_onednn_off() -> Callable[[], None]:
    """Disable oneDNN, which crashes where its allocations fail; return its restoration."""
    was = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # torch has a descriptor there
    return lambda: setattr(torch.backends.mkldnn, "enabled", was)
