"""A simulated device with simulated time: the engine's loop around a controller, without torch."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_mbs.batch.pieces import partition
from elastic_mbs.controller.controller import (
    CallOutcome,
    Capacity,
    Controller,
    Extent,
    Key,
    Move,
    Policy,
    shape_class,
)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Device:
    total: int
    clock: Clock = field(default_factory=Clock)
    others: Callable[[float], int] = lambda _: 0
    jobs: list["Job"] = field(default_factory=list)

    def capacity(self, job: "Job") -> int:
        return (
            self.total
            - self.others(self.clock.now)
            - sum(other.reserved for other in self.jobs if other is not job)
        )


@dataclass(frozen=True)
class Ran:
    """One call that has finished or was given up."""

    at: float
    size: int
    pieces: tuple[tuple[int, int], ...]
    ooms: int
    move: Move | None
    floor: bool


@dataclass
class Job:
    """One process on the device: `call` runs a batch, `history` has all calls so far."""

    device: Device
    need: Callable[[int], int]  # bytes by the elements of a piece
    # Bytes by the elements of a piece and of a sample, in place of `need`.
    need_at: Callable[[int, int], int] | None = None
    start: int | None = None
    policy: Policy = field(default_factory=Policy)
    seed: int = 0
    measured: bool = True
    sensed: bool = True
    per_piece: float = 0.1
    per_sample: float = 0.004
    rest: float = 0.0  # age at which a reading is renewed on request
    late: float = 0.0  # seconds from a failure to the reading after it
    wait: float = 0.0  # seconds that a call may wait at the floor for others' memory
    lost: float = 0.0  # seconds in failed attempts
    controller: Controller = field(init=False)
    history: list[Ran] = field(default_factory=list)
    reserved: int = 0
    oom_times: list[float] = field(default_factory=list)
    readings: list[float] = field(default_factory=list)  # times of readings
    _reading: Capacity | None = None

    def __post_init__(self) -> None:
        self.device.jobs.append(self)
        self.controller = self.fresh()

    def fresh(self) -> Controller:
        return Controller(
            start=self.start,
            policy=self.policy,
            clock=self.device.clock,
            random=random.Random(self.seed),
        )

    def reading(self) -> Capacity | None:
        """Return the monitor's latest reading, which is at most a second old."""
        now = self.device.clock.now
        if not self.sensed:
            return None
        if self._reading is None or now >= self._reading.at + 1:
            self._reading = Capacity(self.device.capacity(self), now)
            self.readings.append(now)
        return self._reading

    def ask_for_reading(self) -> None:
        if self._reading is not None and self.device.clock.now >= self._reading.at + self.rest:
            self.forget_reading()

    def forget_reading(self) -> None:
        self._reading = None

    def call(
        self,
        samples: int,
        elements: int = 1,
        *,
        retries: int = 0,
        name: str = "loss",
        stop_after: int | None = None,
    ) -> Ran:
        """Run a batch as the engine does: pieces, and smaller pieces of the rest after a failure.

        With `stop_after`, an exception ends the call after this number of pieces.
        """
        key = Key(name, "train", shape_class(elements))
        began = self.device.clock.now
        lost_before = self.lost
        decision = self.controller.begin(key, Extent(samples, elements, samples), self.reading)
        size = decision.size
        waiting = list(self._cut(0, samples, size))
        done: list[tuple[int, int]] = []
        peak = failures = 0
        waited = 0.0
        while waiting:
            self._check(size, samples)
            first, last = waiting.pop(0)
            length = last - first
            seconds = self.per_piece + self.per_sample * length
            self.device.clock.now += seconds
            need = self._need(length, elements)
            if need > self.device.capacity(self):
                failures += 1
                smaller = self._fail(key, length, seconds)
                if smaller is None and waited < self.wait:
                    waiting.insert(0, (first, last))
                    waited += self._nap(self.wait - waited)
                    continue
                if smaller is None:
                    self.controller.abandon(key, waited)
                    return self._ran(began, size, done, failures, None, floor=True)
                assert smaller < length
                size = smaller
                waiting = list(self._cut(first, samples, size))
                continue
            peak = max(peak, need)
            self.reserved = max(self.reserved, peak)
            done.append((first, last))
            if stop_after == len(done):
                self.controller.abandon(key)
                return self._ran(began, size, done, failures, None, floor=True)
        assert sum(last - first for first, last in done) == samples
        outcome = CallOutcome(
            samples=samples,
            elements=elements,
            pieces=len(done),
            peak=peak if decision.learning and self.measured and not failures else None,
            fragmentation=1.0,
            seconds=self.device.clock.now - began,
            retries=retries,
            ooms=failures,
            lost=self.lost - lost_before,
        )
        if decision.wants_reading:
            self.ask_for_reading()
        move = self.controller.end(key, outcome, self.reading())
        if failures:
            self.ask_for_reading()
        return self._ran(began, decision.size, done, failures, move, floor=False)

    def _need(self, samples: int, elements: int) -> int:
        size = samples * elements
        return self.need(size) if self.need_at is None else self.need_at(size, elements)

    def _check(self, size: int, samples: int) -> None:
        limits = self.policy.limits
        assert 1 <= size <= samples
        assert size % limits.align == 0 or size == samples
        assert size >= min(limits.minimum, samples)
        assert limits.maximum is None or size <= limits.maximum

    def _fail(self, key: Key, length: int, seconds: float) -> int | None:
        """Record a failed attempt, and return the controller's smaller size."""
        self.lost += seconds
        self.oom_times.append(self.device.clock.now)
        self.device.clock.now += self.late
        self.reserved = min(self.reserved, self.need(0))
        self.forget_reading()
        return self.controller.out_of_memory(key, length, self.reading())

    def _nap(self, most: float) -> float:
        """Wait at the floor until there is more memory; return the seconds."""
        began, seen = self.device.clock.now, self.device.capacity(self)
        while self.device.clock.now < began + most and self.device.capacity(self) <= seen:
            self.device.clock.now += 0.25
        return self.device.clock.now - began

    def _cut(self, begin: int, end: int, size: int) -> tuple[tuple[int, int], ...]:
        return partition(
            begin, end, size, minimum=self.policy.limits.minimum, align=self.policy.align
        )

    def _ran(
        self,
        at: float,
        size: int,
        done: list[tuple[int, int]],
        ooms: int,
        move: Move | None,
        *,
        floor: bool,
    ) -> Ran:
        self.history.append(Ran(at, size, tuple(done), ooms, move, floor))
        return self.history[-1]

    @property
    def ooms(self) -> int:
        return sum(ran.ooms for ran in self.history)

    @property
    def size(self) -> int:
        """Size of the latest call."""
        return self.history[-1].size
