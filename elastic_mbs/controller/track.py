"""What the controller knows about one kind of call: its size, what failed, what was measured.

A track belongs to a `Key`: the loss function, train or eval, and the shape class of the samples. Sizes are in samples, because that is what is
compiled and what the user sees; limits are in elements (size × elements per sample), because samples of one shape class still differ by up to two.

Fits are kept per track, not shared between shape classes: at the same number of elements longer samples may need more (attention without a flash
kernel is quadratic), and a mixture of both would be neither convex nor an upper bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_mbs.controller.fit import MemoryFit, TimeFit
from elastic_mbs.controller.messages import Capacity
from elastic_mbs.errors import UsageError

RECENT_CALLS = 16
"""Calls whose batches count when it is asked how large a batch and how long a sample must be expected."""

MAX_CEILINGS = 8


@dataclass
class Ceiling:
    """Something that failed, and the evidence seen then.

    Attributes:
        elements: what was attempted.
        limit: the largest number of elements that may still be tried: one less, or after a failed growth what it grew from.
        capacity: capacity at the time, in bytes; None if there was no reading.
        at: when.
        passed_with: capacity with which as much had run clean before; None if it had not.
        settled: whether a reading made after the failure has been looked at (the one at hand then may have been made before the co-tenant came).
    """

    elements: int
    limit: int
    capacity: int | None
    at: float
    passed_with: int | None = None
    settled: bool = False

    @property
    def bisects(self) -> bool:
        """Whether sizes between the last good one and this one are still open."""
        return self.limit == self.elements - 1

    def covers(self, other: Ceiling) -> bool:
        """Whether this failure says all that `other` says: no more was attempted, and no less memory was there."""
        if self.elements > other.elements or self.limit > other.limit or other.capacity is None:
            return False
        return self.capacity is not None and self.capacity >= other.capacity


@dataclass
class Trial:
    """A growth that has not proven itself yet.

    Attributes:
        before: size that it grew from, in samples.
        elements: longest piece at that size, in elements.
        calls: calls that it still has to come through.
    """

    before: int
    elements: int
    calls: int


@dataclass
class Call:
    """The call that is running on a track.

    Attributes:
        size: size in use now, in samples.
        samples: length of the batch.
        elements: elements per sample.
        learning: whether its peaks are measured.
        probing: whether it began while the track was probing.
        started: the track's size at its start.
        ooms: failures so far.
        largest: longest piece finished so far, in samples.
        fallback: size to return to when the call ends, after a failed growth.
    """

    size: int
    samples: int
    elements: int
    learning: bool
    probing: bool
    started: int
    ooms: int = 0
    largest: int = 0
    fallback: int | None = None


@dataclass
class Track:
    """Everything known about one kind of call.

    Attributes:
        size: the micro-batch, in samples.
        probing: whether it still doubles from piece to piece.
        resized_at: when the size last changed; capacity read before that is stale.
        patience: clean calls at this size before it may grow (jitter drawn).
        epoch: counts the changes of size; observations of an earlier one are discarded.
        clean: clean calls at this size, one after the other.
        calls: calls at this size.
        blind: calls in a row that should have given a peak and did not.
        thrashed: calls in a row with allocator retries.
        strikes: failed growths in a row; each doubles the cooldown.
        young: whether the last growth has not run clean for long yet.
        cooldown_until: no growth before that.
        due: when a growth that has become possible through a change of memory may be made.
        fragmentation: peak reserved / peak allocated, when last seen.
        trial: the last growth, while it may still fail.
        passed_with: the most elements that have run clean since the last failure, and the capacity then.
        call: the one that is running.
        judged: the reading that growth was last decided on.
        ceilings: what failed and may not be tried again, fewest elements first.
        recent: samples and elements per sample of the recent calls.
    """

    size: int
    probing: bool
    resized_at: float
    patience: int
    epoch: int = 0
    clean: int = 0
    calls: int = 0
    blind: int = 0
    thrashed: int = 0
    strikes: int = 0
    young: bool = False
    cooldown_until: float = float("-inf")
    due: float | None = None
    fragmentation: float = 1.0
    trial: Trial | None = None
    passed_with: tuple[int, int] | None = None
    call: Call | None = None
    judged: Capacity | None = None
    ceilings: list[Ceiling] = field(default_factory=list)
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT_CALLS))
    memory: MemoryFit = field(default_factory=MemoryFit)
    time: TimeFit = field(default_factory=TimeFit)

    def resize(self, size: int, now: float, patience: int) -> None:
        """Changes the size: what was observed at the old one counts no more."""
        self.size, self.resized_at, self.patience = size, now, patience
        self.epoch += 1
        self.clean = self.calls = self.blind = self.thrashed = 0
        self.due = None

    def expected(self) -> tuple[int, int]:
        """The largest batch (samples) and the longest sample (elements) among the recent calls."""
        return max(samples for samples, _ in self.recent), max(elements for _, elements in self.recent)

    def lowest(self) -> Ceiling | None:
        """The ceiling that binds most, if one stands."""
        return min(self.ceilings, key=lambda ceiling: (ceiling.limit, ceiling.elements), default=None)

    def failed_at(self) -> int | None:
        """The fewest elements that are known to fail, if a ceiling stands."""
        return min((ceiling.elements for ceiling in self.ceilings), default=None)

    def add_ceiling(self, ceiling: Ceiling) -> None:
        """Remembers a failure."""
        self.ceilings = sorted([*self.ceilings, ceiling], key=lambda c: c.elements)[:MAX_CEILINGS]

    def see(self, capacity: Capacity, changed: float) -> None:
        """Looks at the first reading made after a failure: the lower of it and the one at hand then is the evidence.

        The reading at hand may be from before the co-tenant came. Left alone, it would make the memory's return look like no change. Where neither
        shows less memory than as much had run with before, capacity explains nothing (a spike between two readings): then only time counts. Once
        judged, ceilings that another one covers are forgotten. Others stay: they were seen with more memory, and count again when it is back.
        """
        for ceiling in self.ceilings:
            if ceiling.settled or capacity.at <= ceiling.at:
                continue
            ceiling.settled = True
            ceiling.capacity = capacity.bytes if ceiling.capacity is None else min(ceiling.capacity, capacity.bytes)
            if ceiling.passed_with is not None and ceiling.capacity * (1 + changed) >= ceiling.passed_with:
                ceiling.capacity = None
        kept: list[Ceiling] = []
        for ceiling in self.ceilings:  # fewest elements first: what covers comes before what is covered
            if not any(other.settled and other.covers(ceiling) for other in kept):
                kept = [other for other in kept if not (ceiling.settled and ceiling.covers(other))]
                kept.append(ceiling)
        self.ceilings = kept

    def lift(self, capacity: Capacity, changed: float) -> None:
        """Drops the ceilings whose evidence has changed: capacity has risen by the fraction `changed`, or was never known."""
        self.ceilings = [c for c in self.ceilings if c.capacity is not None and capacity.bytes <= c.capacity * (1 + changed)]

    def passed(self, elements: int, capacity: Capacity | None) -> None:
        """A clean call had this many elements on the device at once: ceilings at or below it are disproved, and a trial goes on."""
        self.ceilings = [c for c in self.ceilings if c.elements > elements]
        if self.trial is not None and elements > self.trial.elements:
            self.trial.calls -= 1
            if self.trial.calls <= 0:
                self.trial = None
        if self.trial is None and capacity is not None and (self.passed_with is None or elements >= self.passed_with[0]):
            self.passed_with = (elements, capacity.bytes)

    def state(self, now: float) -> dict[str, object]:
        """What is worth saving, as JSON. Times become relative, because the next process has another clock."""
        return {
            "size": self.size,
            "probing": self.probing,
            "patience": self.patience,
            "epoch": self.epoch,
            "clean": self.clean,
            "calls": self.calls,
            "strikes": self.strikes,
            "young": self.young,
            "cooldown_left": max(0.0, self.cooldown_until - now),
            "fragmentation": self.fragmentation,
            "passed_with": None if self.passed_with is None else list(self.passed_with),
            "trial": None if self.trial is None else [self.trial.before, self.trial.elements, self.trial.calls],
            "ceilings": [[c.elements, c.limit, c.capacity] for c in self.ceilings],
            "recent": [list(batch) for batch in self.recent],
            "memory": self.memory.state(),
            "time": self.time.state(),
        }

    @classmethod
    def restored(cls, state: dict[str, object], now: float) -> Track:
        """The track that `state()` was taken from. Readings from before `now` are stale for it.

        Raises:
            UsageError: a value is missing, of the wrong type, or out of range.
        """
        trial = None if state.get("trial") is None else Trial(*_integers(state, "trial", 3))
        track = cls(_integer(state, "size", 1), _flag(state, "probing"), now, _integer(state, "patience", 1), trial=trial)
        if state.get("passed_with") is not None:
            elements, capacity = _integers(state, "passed_with", 2)
            track.passed_with = (elements, capacity)
        track.epoch, track.clean, track.calls = (_integer(state, name) for name in ("epoch", "clean", "calls"))
        track.strikes, track.young = _integer(state, "strikes"), _flag(state, "young")
        left = _number(state, "cooldown_left")
        track.cooldown_until = now + left if left > 0 else float("-inf")
        track.fragmentation = max(1.0, _number(state, "fragmentation"))
        for row in _rows(state, "ceilings", 3):
            attempted, limit, seen = row
            if not (isinstance(attempted, int) and isinstance(limit, int) and isinstance(seen, int | None) and 0 <= limit < attempted):
                raise UsageError(f"{row!r} is no saved ceiling")
            track.ceilings.append(Ceiling(attempted, limit, seen, now, settled=True))
        for row in _rows(state, "recent", 2):
            samples, length = row
            if not (isinstance(samples, int) and isinstance(length, int) and samples >= 1 and length >= 1):
                raise UsageError(f"{row!r} is no saved batch")
            track.recent.append((samples, length))
        if not track.recent:
            raise UsageError("a saved track has seen no batch")
        track.memory = MemoryFit.restored(_rows(state, "memory", 3))
        track.time = TimeFit.restored(_rows(state, "time", 2))
        return track


def _integer(state: dict[str, object], name: str, least: int = 0) -> int:
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"saved {name}={value!r} must be an integer of at least {least}")
    return value


def _number(state: dict[str, object], name: str) -> float:
    value = state.get(name)
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UsageError(f"saved {name}={value!r} must be a number that is not negative")
    return float(value)


def _flag(state: dict[str, object], name: str) -> bool:
    value = state.get(name)
    if not isinstance(value, bool):
        raise UsageError(f"saved {name}={value!r} must be true or false")
    return value


def _integers(state: dict[str, object], name: str, length: int) -> list[int]:
    value = state.get(name)
    if not isinstance(value, list) or len(value) != length or not all(isinstance(item, int) for item in value):
        raise UsageError(f"saved {name}={value!r} must be a list of {length} integers")
    return value


def _rows(state: dict[str, object], name: str, width: int) -> list[Sequence[object]]:
    value = state.get(name)
    if not isinstance(value, list) or not all(isinstance(row, list | tuple) and len(row) == width for row in value):
        raise UsageError(f"saved {name}={value!r} must be a list of rows of {width}")
    return value
