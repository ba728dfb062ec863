"""What the worlds on a CPU have in common: a capacity, a co-tenant's share of it, and a sensor that tells of both."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import psutil
import torch

from elastic_mbs.errors import UsageError
from elastic_mbs.memory import Headroom, Reading, Unavailable, Usage
from elastic_mbs.memory.size import parse_bytes


class HostLimit(ABC):
    """A world on the CPU. It is the sensor and the meter of what is trained in it, see `HostGauge`.

    Attributes:
        capacity: bytes there are for all; None without a limit.
    """

    kind: str
    exact: bool

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.capacity: int | None = None
        self.sensor = HostGauge(self)
        self._highest = 0

    def __enter__(self) -> Self:
        """Opens it, without a limit yet."""
        return self

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Lifts every limit and ends the co-tenant."""

    def warm(self, run: Callable[[int], object], sizes: Iterable[int]) -> None:  # noqa: B027  # only one of them has something to do
        """Nothing to do here."""

    def resize(self, capacity: int | str | None) -> None:
        """Sets how many bytes there are for all (an int, or a string such as "64MiB"); None lifts the limit.

        Raises:
            UsageError: it is no size.
        """
        self.capacity = None if capacity is None else parse_bytes(capacity)
        self.apply()

    def fragment(self, largest: int | None) -> None:
        """Refuses: only some worlds can.

        Raises:
            UsageError: in this one an allocation fails for want of memory only.
        """
        raise UsageError(
            f"the world {self.kind!r} knows no fragmentation: in 'shim' and 'budget' single large allocations can fail while memory is free"
        )

    def total(self) -> int | None:
        """Bytes there are for all, now; None without a limit."""
        return self.capacity

    @abstractmethod
    def occupy(self, held: int) -> None:
        """Has the co-tenant hold so many bytes: at once what is free, the rest as soon as it is."""

    @abstractmethod
    def others(self) -> int:
        """Bytes that are not ours to have."""

    @abstractmethod
    def live(self) -> int:
        """Bytes this process holds now, as this world counts them."""

    def peak(self) -> int:
        """Most bytes it held since `reset_peak`, whatever a runtime has reset for itself meanwhile."""
        return max(self._highest, self.peak_of_interval())

    def reset_peak(self) -> None:
        """Starts a new interval."""
        self.begin_interval()
        self._highest = 0
        self.sensor.resets += 1

    @abstractmethod
    def failures(self) -> int | None:
        """Allocations that have failed so far in this process; None where nobody counts them."""

    @abstractmethod
    def apply(self) -> None:
        """Puts the limit in force, after it has changed."""

    @abstractmethod
    def peak_of_interval(self) -> int:
        """Most bytes held since `begin_interval`."""

    @abstractmethod
    def begin_interval(self) -> None:
        """Has the peak begin anew from what is live."""

    def _remember_peak(self) -> None:
        self._highest = max(self._highest, self.peak_of_interval())


def switch_onednn_off() -> Callable[[], None]:
    """Has torch do without oneDNN, which crashes where its own allocations fail; returns what puts it back."""
    was = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # torch has a descriptor there

    def put_back() -> None:
        torch.backends.mkldnn.enabled = was

    return put_back


class HostGauge:
    """Sensor and meter of a world on the CPU. May be read by any thread.

    Args:
        world: what is read.

    Attributes:
        resets: how often the peak was reset, by a runtime or by the world.
    """

    def __init__(self, world: HostLimit) -> None:
        self._world = world
        self.resets = 0

    def read(self) -> Reading:
        """What this process could still get. Without a limit the machine's memory is the capacity."""
        at = time.monotonic()
        try:
            live, others, capacity = self._world.live(), self._world.others(), self._world.total()
        except (OSError, ValueError) as error:
            return Unavailable(f"the world {self._world.kind!r} cannot be read: {error}", at)
        total = psutil.virtual_memory().total if capacity is None else capacity
        others = min(others, total)
        return Headroom(max(0, total - others - live), total, others, self._world.kind, at)

    def usage(self) -> Usage:
        """Live bytes and their peak. Nothing is kept in reserve: reserved is allocated."""
        live = self._world.live()
        peak = max(live, self._world.peak_of_interval())
        return Usage(live, live, peak, peak, 0)

    def reset_peak(self) -> None:
        """Starts a new interval for the runtime; the world's own goes on."""
        self._world._remember_peak()
        self._world.begin_interval()
        self.resets += 1
