"""What is known about one kind of call (a `Key`): its size, what failed, what was measured.

Sizes are in samples, limits in elements: samples of one shape class differ by up to two. Shape classes share no fit: attention can be quadratic.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from elastic_mbs.controller.fit import MemoryFit, TimeFit, checked
from elastic_mbs.controller.plan import Capacity

RECENT_CALLS = 16  # calls whose batches decide how large a batch and how long a sample must be expected
MAX_CEILINGS = 8
NEVER = float("-inf")


@dataclass
class Trial:
    """A size that has grown and has not proven itself yet."""

    before: int  # size that it grew from, in samples
    elements: int  # longest piece at that size, in elements
    calls: int  # clean calls with longer pieces that are still to come


@dataclass
class Ceiling:
    """A failure, and the evidence seen then."""

    elements: int  # what was attempted
    limit: int  # the largest number of elements that can still be tried: one less, or after a failed growth what it grew from
    capacity: int | None  # in bytes; None where no reading explains the failure
    at: float
    proven: int | None = None  # capacity with which as much had run clean before
    confirmed: bool = False  # by a reading made after the failure; the one at hand then can be from before the co-tenant came


@dataclass
class RunningCall:
    """The call that is running on a track."""

    size: int  # in use now, in samples
    epoch: int  # of the size that it began with
    samples: int  # length of the batch
    elements: int  # per sample
    learning: bool  # peaks are measured
    probing: bool  # it began while the track was probing
    ooms: int = 0
    longest: int = 0  # piece finished so far, in samples
    fallback: int | None = None  # size to return to when the call ends, after a failed growth


@dataclass
class Track:
    """Everything known about one kind of call."""

    size: int  # the micro-batch, in samples
    probing: bool  # the size doubles from piece to piece; else it stays until growth is earned
    patience: int  # clean calls at this size before it can grow (jitter drawn)
    resized_at: float  # when the size last changed
    decided_at: float  # readings up to this one are not looked at: older than the size, or already decided on
    trial: Trial | None = None
    epoch: int = 0  # counts the changes of size: a call that changed it is no clean call at the new one
    clean: int = 0  # clean calls at this size in a row
    calls: int = 0  # calls at this size
    calls_without_peak: int = 0  # calls in a row whose peak was wanted and not measured
    calls_with_retries: int = 0  # calls in a row in which the allocator thrashed
    failed_growths: int = 0  # in a row; each doubles the cooldown
    grown: bool = False  # the last growth has not run clean for long: a failure now is a failed growth
    cooldown_until: float = NEVER  # no growth before that
    fragmentation: float = 1.0  # peak reserved / peak allocated, when last seen
    proven: tuple[int, int] | None = None  # the most elements that have run clean since the last failure, and the capacity then
    call: RunningCall | None = None
    ceilings: list[Ceiling] = field(default_factory=list)  # fewest elements first
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT_CALLS))  # samples and elements per sample
    memory: MemoryFit = field(default_factory=MemoryFit)
    time: TimeFit = field(default_factory=TimeFit)

    def resize(self, size: int, now: float, patience: int) -> None:
        """Changes the size and discards the counts of calls at the old one."""
        self.size, self.patience, self.resized_at, self.decided_at = size, patience, now, now
        self.epoch += 1
        self.clean = self.calls = self.calls_without_peak = self.calls_with_retries = 0

    def expected(self) -> tuple[int, int]:
        """The largest batch (samples) and the longest sample (elements) among the recent calls."""
        return max(samples for samples, _ in self.recent), max(elements for _, elements in self.recent)

    def add_ceiling(self, ceiling: Ceiling) -> None:
        self.ceilings = sorted([*self.ceilings, ceiling], key=lambda c: c.elements)[:MAX_CEILINGS]

    def confirm_ceilings(self, capacity: Capacity, changed: float) -> None:
        """Considers the first reading after a failure: the one at hand then can be from before the co-tenant came. The lower one counts."""
        # Where neither shows less memory than as much had run with before, capacity explains nothing (a spike between readings): only time counts.
        for ceiling in self.ceilings:
            if ceiling.confirmed or capacity.at <= ceiling.at:
                continue
            ceiling.confirmed = True
            ceiling.capacity = capacity.bytes if ceiling.capacity is None else min(ceiling.capacity, capacity.bytes)
            if ceiling.proven is not None and ceiling.capacity * (1 + changed) >= ceiling.proven:
                ceiling.capacity = None

    def lift_ceilings(self, capacity: Capacity, changed: float) -> None:
        """Drops the ceilings whose evidence has changed: capacity has risen by the fraction `changed`, or was never known."""
        self.ceilings = [c for c in self.ceilings if c.capacity is not None and capacity.bytes <= c.capacity * (1 + changed)]

    def passed(self, elements: int, capacity: Capacity | None) -> None:
        """A clean call had this many elements on the device at once: ceilings at or below it are disproved, and a trial goes on."""
        if self.ceilings:
            self.ceilings = [c for c in self.ceilings if c.elements > elements]
        if self.trial is not None and elements > self.trial.elements:
            self.trial.calls -= 1
            if self.trial.calls <= 0:
                self.trial = None
        if self.trial is None and capacity is not None and (self.proven is None or elements >= self.proven[0]):
            self.proven = (elements, capacity.bytes)

    def saved(self, now: float) -> dict[str, object]:
        """What is worth saving, as JSON. Times become relative, because the next process has another clock."""
        return {
            "size": self.size,
            "probing": self.probing,
            "patience": self.patience,
            "epoch": self.epoch,
            "clean": self.clean,
            "calls": self.calls,
            "strikes": self.failed_growths,
            "young": self.grown,
            "cooldown_left": max(0.0, self.cooldown_until - now),
            "fragmentation": self.fragmentation,
            "passed_with": None if self.proven is None else list(self.proven),
            "trial": None if self.trial is None else [self.trial.before, self.trial.elements, self.trial.calls],
            "ceilings": [[c.elements, c.limit, c.capacity] for c in self.ceilings],
            "recent": [list(batch) for batch in self.recent],
            "memory": self.memory.state(),
            "time": self.time.state(),
        }

    @classmethod
    def restored(cls, row: Any, now: float) -> Track:
        """The track that `saved()` was taken from; KeyError, TypeError or ValueError if it is malformed. Older readings are stale for it."""
        probing, patience = checked(row["probing"], bool), checked(row["patience"], int, 1)
        track = cls(checked(row["size"], int, 1), probing, patience, resized_at=now, decided_at=now)
        if row["trial"] is not None:
            before, elements, calls = row["trial"]
            track.trial = Trial(checked(before, int, 1), checked(elements, int, 1), checked(calls, int))
        track.epoch, track.clean, track.calls, track.failed_growths = (checked(row[name], int) for name in ("epoch", "clean", "calls", "strikes"))
        track.grown = checked(row["young"], bool)
        left = checked(row["cooldown_left"], float)
        track.cooldown_until = now + left if left > 0 else NEVER
        track.fragmentation = checked(row["fragmentation"], float, 1.0)
        if row["passed_with"] is not None:
            elements, capacity = row["passed_with"]
            track.proven = checked(elements, int), checked(capacity, int)
        for elements, limit, capacity in row["ceilings"]:
            seen = None if capacity is None else checked(capacity, int)
            track.add_ceiling(Ceiling(checked(elements, int, checked(limit, int) + 1), limit, seen, now, confirmed=True))
        track.recent.extend((checked(samples, int, 1), checked(elements, int, 1)) for samples, elements in row["recent"])
        track.expected()  # of at least one batch
        track.memory, track.time = MemoryFit.restored(row["memory"]), TimeFit.restored(row["time"])
        return track
