"""What is known about one kind of call (a `Key`): its size, what failed, what was measured.

Sizes are in samples, limits in elements: samples of one shape class differ by up to two. Shape
classes share no fit: attention can be quadratic.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from elastic_mbs.controller.fit import MemoryFit, TimeFit, checked
from elastic_mbs.controller.messages import Capacity
from elastic_mbs.controller.peak import PeakModel
from elastic_mbs.controller.policy import Policy

# calls whose batches decide how large a batch and how long a sample must be expected
RECENT_CALLS = 16
MAX_CEILINGS = 8
NEVER = float("-inf")
WHOLE = 2**62  # a size above any batch


@dataclass
class Trial:
    """The latest growth."""

    before: int  # size that it grew from, in samples
    elements: int  # longest piece at that size, in elements
    calls: int  # clean calls with longer pieces that are still to come before it has proven itself
    run: int = 0  # elements that calls with longer pieces have run since


@dataclass
class Ceiling:
    """A failure, and the evidence seen then."""

    elements: int  # what was attempted
    # the largest number of elements that can still be tried: one less, or after a failed growth
    # what it grew from
    limit: int
    at: float
    proven: int | None = None  # capacity with which as much had run clean before
    capacity: int | None = None  # in bytes; None where no reading explains the failure
    lost: float = 0.0  # seconds by the failure
    explained: bool = False  # there was a reading after the failure

    def explain(self, capacity: Capacity, changed: float) -> None:
        """Takes the first reading after the failure, which explains it unless it shows as much memory as as much had run clean with before."""
        self.explained = True
        if self.proven is None or capacity.bytes * (1 + changed) < self.proven:
            self.capacity = capacity.bytes

    @property
    def is_spike(self) -> bool:
        """Whether as much memory was there right after the failure as before."""
        return self.explained and self.capacity is None


@dataclass
class RunningCall:
    """The call that is running on a track."""

    size: int  # in use now, in samples
    before: int  # of the track when it began
    epoch: int  # of the size that it began with
    samples: int  # length of the batch
    elements: int  # per sample
    learning: bool  # peaks are measured
    began: float
    length: int  # of the longest piece at the size that it began with, in samples
    ooms: int = 0
    failed_trial: Trial | None = None  # the growth that has failed by the first of them
    failed: Ceiling | None = None  # the first of them


@dataclass
class Track:
    """Everything known about one kind of call."""

    size: int  # the micro-batch, in samples
    patience: int  # clean calls at this size before it can grow (jitter drawn)
    # readings up to this one are not looked at: older than the size, or already decided on
    decided_at: float
    trial: Trial | None = None
    # counts the changes of size: a call that changed it is no clean call at the new one
    epoch: int = 0
    clean: int = 0  # clean calls at this size in a row
    calls: int = 0  # calls at this size
    calls_without_peak: int = 0  # calls in a row whose peak was wanted and not measured
    calls_with_retries: int = 0  # calls in a row in which the allocator thrashed
    cooldown_until: float = NEVER  # no growth before that
    fragmentation: float = 1.0  # peak reserved / peak allocated, when last seen
    # the most elements that have run clean, and the capacity then; until as much fails with as much
    proven: tuple[int, int] | None = None
    # with a newer one the latest call could have been followed by a growth
    wants_reading: bool = False
    call: RunningCall | None = None
    ceilings: list[Ceiling] = field(default_factory=list)  # fewest elements first
    # samples and elements per sample
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT_CALLS))
    memory: MemoryFit | PeakModel = field(default_factory=MemoryFit)  # fitted, or planned
    time: TimeFit = field(default_factory=TimeFit)

    def resize(self, size: int, now: float, patience: int) -> None:
        """Changes the size and discards the counts of calls at the old one."""
        self.size, self.patience, self.decided_at = size, patience, now
        self.epoch += 1
        self.clean = self.calls = self.calls_without_peak = self.calls_with_retries = 0

    def forget(self) -> None:
        """Discards what was learned of memory and time; the size stays."""
        self.ceilings, self.proven, self.trial = [], None, None
        self.memory, self.time, self.fragmentation = MemoryFit(), TimeFit(), 1.0
        self.clean = self.calls = self.calls_without_peak = self.calls_with_retries = 0

    def expected(self) -> tuple[int, int]:
        """The largest batch (samples) and the longest sample (elements) among the recent calls."""
        return max(samples for samples, _ in self.recent), max(
            elements for _, elements in self.recent
        )

    def add_ceiling(self, ceiling: Ceiling) -> None:
        self.ceilings = sorted([*self.ceilings, ceiling], key=lambda c: c.elements)[:MAX_CEILINGS]

    def drop_ceiling(self, ceiling: Ceiling) -> None:
        """Drops this one, if it is still there."""
        self.ceilings = [each for each in self.ceilings if each is not ceiling]

    def explain_ceilings(self, capacity: Capacity, changed: float) -> None:
        """Takes a reading for the failures after which there was none in time."""
        for ceiling in self.ceilings:
            if not ceiling.explained and capacity.at > ceiling.at:
                ceiling.explain(capacity, changed)

    def lift_ceilings(self, capacity: Capacity, present: int, policy: Policy, now: float) -> None:
        """Drops the ceilings whose evidence has changed: capacity has risen by the fraction `changed`, or was never known, and time has passed.

        That is until pieces of the `present` elements have lost as much time as the failure, but no
        longer than a cooldown.
        """

        def stands(ceiling: Ceiling) -> bool:
            if ceiling.capacity is not None:
                return capacity.bytes <= ceiling.capacity * (1 + policy.changed)
            slower = self.time.gain(present, ceiling.elements) or 0.0
            return now - ceiling.at < ceiling.lost * (
                min(policy.cooldown, 1 / slower) if slower > 0 else policy.cooldown
            )

        self.ceilings = list(filter(stands, self.ceilings))

    def without_growth(self, capacity: Capacity) -> Capacity | None:
        """The least capacity that a failure has shown: what is fit for a co-tenant that comes and goes. None where none is known."""
        least = min(
            (ceiling.capacity for ceiling in self.ceilings if ceiling.capacity is not None),
            default=None,
        )
        return None if least is None else capacity._replace(bytes=min(capacity.bytes, least))

    def proven_with(self, capacity: Capacity, changed: float) -> int:
        """The most elements that have run clean with as much memory; 0 if none."""
        return (
            self.proven[0]
            if self.proven is not None and capacity.bytes * (1 + changed) >= self.proven[1]
            else 0
        )

    def passed(self, elements: int, batch: int, capacity: Capacity | None) -> None:
        """A clean call had this many of its elements on the device at once: ceilings at or below it are disproved, and a trial goes on."""
        if self.ceilings:
            self.ceilings = [c for c in self.ceilings if c.elements > elements]
        if self.trial is not None and elements > self.trial.elements:
            self.trial.calls = max(0, self.trial.calls - 1)
            self.trial.run += batch
        if (
            (self.trial is None or not self.trial.calls)
            and capacity is not None
            and (self.proven is None or elements >= self.proven[0])
        ):
            self.proven = (elements, capacity.bytes)

    def saved(self, now: float) -> dict[str, object]:
        """What is worth saving, as JSON.

        Times become relative, because the next process has another clock.
        """
        return {
            "size": self.size,
            "patience": self.patience,
            "epoch": self.epoch,
            "clean": self.clean,
            "calls": self.calls,
            "cooldown_left": max(0.0, self.cooldown_until - now),
            "fragmentation": self.fragmentation,
            "passed_with": None if self.proven is None else list(self.proven),
            "trial": None
            if self.trial is None
            else [self.trial.before, self.trial.elements, self.trial.calls, self.trial.run],
            "ceilings": [[c.elements, c.limit, c.capacity, c.lost] for c in self.ceilings],
            "recent": [list(batch) for batch in self.recent],
            "memory": self.memory.state(),
            "time": self.time.state(),
        }

    @classmethod
    def restored(cls, row: Any, now: float) -> Track:
        """The track that `saved()` was taken from; KeyError, TypeError or ValueError if it is malformed. Older readings are stale for it."""
        track = cls(checked(row["size"], int, 1), checked(row["patience"], int, 1), decided_at=now)
        if row["trial"] is not None:
            before, elements, calls, run = row["trial"]
            track.trial = Trial(
                checked(before, int, 1),
                checked(elements, int, 1),
                checked(calls, int),
                checked(run, int),
            )
        track.epoch, track.clean, track.calls = (
            checked(row[name], int) for name in ("epoch", "clean", "calls")
        )
        track.cooldown_until = now + checked(row["cooldown_left"], float)
        track.fragmentation = checked(row["fragmentation"], float, 1.0)
        if row["passed_with"] is not None:
            elements, capacity = row["passed_with"]
            track.proven = checked(elements, int), checked(capacity, int)
        for elements, limit, capacity, lost in row["ceilings"]:
            seen = None if capacity is None else checked(capacity, int)
            failed = checked(elements, int, checked(limit, int) + 1)
            track.add_ceiling(
                Ceiling(
                    failed, limit, now, capacity=seen, lost=checked(lost, float), explained=True
                )
            )
        track.recent.extend(
            (checked(samples, int, 1), checked(elements, int, 1))
            for samples, elements in row["recent"]
        )
        track.expected()  # of at least one batch
        planned = isinstance(row["memory"], dict)
        track.memory = (
            PeakModel.restored(row["memory"]) if planned else MemoryFit.restored(row["memory"])
        )
        track.time = TimeFit.restored(row["time"])
        return track
