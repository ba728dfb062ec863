"""The track of one kind of call (a `Key`): its size, its failures and its measurements.

Sizes are in samples. Limits are in elements, because samples of one shape class differ in length
by up to a factor of two. Shape classes share no fit: the operation at the peak can be another one
where samples are much longer.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from elastic_mbs.controller.fit import MemoryFit, TimeFit
from elastic_mbs.controller.memory_model import MemoryModel
from elastic_mbs.controller.messages import CallOutcome, Capacity, Extent
from elastic_mbs.controller.peak import PeakModel
from elastic_mbs.controller.policy import Limits, Policy
from elastic_mbs.controller.proven import Proven
from elastic_mbs.controller.saved import checked

# The batches of this many calls show the largest batch and the longest sample to expect.
RECENT_CALLS = 16
MAX_CEILINGS = 8
MOST_SAMPLES = 2**24  # of a batch in a saved state: its pieces are listed, to see the longest
NEVER = float("-inf")
WHOLE = 2**62  # a size above any batch


@dataclass
class Trial:
    """The latest growth of a track; it has proven itself when `calls` is 0."""

    before: int  # size that it grew from, in samples
    elements: int  # of the longest piece at that size
    calls: int  # clean calls with longer pieces that are still to come
    capacity: int | None  # seen when it grew, in bytes; None where it was not known
    run: int = 0  # elements run in calls with longer pieces
    again: bool = False  # back to a size that has failed while as much memory was there

    def saved(self) -> list[int | None]:
        """Return the trial as JSON."""
        return [self.before, self.elements, self.calls, self.capacity, self.run, self.again]

    @classmethod
    def restored(cls, row: Any) -> Trial:
        """Make the trial that `saved()` describes; TypeError or ValueError if it is malformed."""
        before, elements, calls, capacity, run, again = row
        return cls(
            checked(before, int, 1),
            checked(elements, int, 1),
            checked(calls, int),
            None if capacity is None else checked(capacity, int),
            checked(run, int),
            checked(again, bool),
        )


@dataclass
class Ceiling:
    """A failure, with the memory that was seen after it."""

    elements: int  # of the piece that failed
    # The most elements that may still be tried: one less, or after a failed growth those of the
    # size that it grew from.
    limit: int
    at: float  # when it failed
    needed: int | None = None  # least capacity at which this size has succeeded
    seen: int | None = None  # capacity by the first reading after the failure, in bytes
    capacity: int | None = None  # the same; None where it does not explain the failure
    lost: float = 0.0  # seconds that the failure cost

    def explain(self, seen: int | None, changed: float) -> None:
        """Take the first reading after the failure; None where there is none yet.

        It explains the failure where it shows less memory than this size last succeeded with, or
        where this size has never succeeded.
        """
        self.seen = seen
        explains = seen is not None and (self.needed is None or seen * (1 + changed) < self.needed)
        self.capacity = seen if explains else None

    @property
    def is_spike(self) -> bool:
        """Memory that was short for a moment: the reading after it does not explain the failure."""
        return self.seen is not None and self.capacity is None

    @property
    def had_enough(self) -> bool:
        """The reading after the failure shows all the memory that this size has succeeded with."""
        return self.seen is not None and self.needed is not None and self.seen >= self.needed

    def saved(self) -> list[int | float | None]:
        """Return the ceiling as JSON."""
        return [self.elements, self.limit, self.capacity, self.lost]

    @classmethod
    def restored(cls, row: Any, now: float) -> Ceiling:
        """Make the ceiling that `saved()` describes; TypeError or ValueError if it is malformed."""
        elements, limit, capacity, lost = row
        limit = checked(limit, int)
        capacity = None if capacity is None else checked(capacity, int)
        return cls(
            checked(elements, int, limit + 1),
            limit,
            now,
            seen=capacity or 0,  # the reading is long past: none after it counts
            capacity=capacity,
            lost=checked(lost, float),
        )


@dataclass
class RunningCall:
    """The call that is running on a track."""

    before: int  # size of the track when the call began, in samples
    epoch: int  # epoch of the track when the call began
    batch: Extent
    learning: bool  # its peak is measured
    began: float
    length: int  # of the longest piece at the size that it began with, in samples
    ooms: int = 0
    failed_trial: Trial | None = None  # the growth that the first failure has ended
    excused: Trial | None = None  # the same, where it was no cause of the failures
    failed: Ceiling | None = None  # the first failure


@dataclass
class Track:
    """Everything known about one kind of call."""

    size: int  # the micro-batch, in samples
    patience: int  # clean calls at this size before it may grow, jitter included
    # Readings up to this time do not count: they are older than the size, or were used already.
    decided_at: float
    trial: Trial | None = None
    # Changes of size so far. A call in which the size changed is no clean call at the new one.
    epoch: int = 0
    clean: int = 0  # consecutive clean calls at this size
    calls: int = 0  # calls at this size
    calls_without_peak: int = 0  # consecutive calls whose peak was wanted but not measured
    calls_with_retries: int = 0  # consecutive calls with allocator retries
    cooldown_until: float = NEVER  # end of the cooldown
    no_excuse_until: float = NEVER  # a growth that could be excused costs a cooldown until then
    fragmentation: float = 1.0  # peak reserved / peak allocated, when last seen
    released: bool = False  # memory was handed to another phase since the last call
    wants_reading: bool = False  # with a newer reading the latest call could have led to a growth
    call: RunningCall | None = None
    ceilings: list[Ceiling] = field(default_factory=list)  # fewest elements first
    proven: Proven = field(default_factory=Proven)
    # samples and elements per sample of the latest batches
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT_CALLS))
    memory: MemoryModel = field(default_factory=MemoryFit)
    time: TimeFit = field(default_factory=TimeFit)

    def resize(self, size: int, now: float, patience: int) -> None:
        """Change the size, and start counting calls anew."""
        self.size = size
        self.patience = patience
        self.decided_at = now
        self.epoch += 1
        self._count_anew()

    def forget(self) -> None:
        """Discard everything learned about memory and time; the size stays."""
        self.ceilings = []
        self.proven = Proven()
        self.trial = None
        self.memory = MemoryFit()
        self.time = TimeFit()
        self.fragmentation = 1.0
        self._count_anew()

    def believe(self, elements: int) -> None:
        """Take a plan's word that this many elements fit, against failures before it."""
        self.trial = None
        self.ceilings = [ceiling for ceiling in self.ceilings if ceiling.limit >= elements]

    def _count_anew(self) -> None:
        self.clean = self.calls = self.calls_without_peak = self.calls_with_retries = 0

    def expected(self) -> tuple[int, int]:
        """Return the largest batch in samples, and the longest sample in elements, of late."""
        samples = max(samples for samples, _ in self.recent)
        elements = max(elements for _, elements in self.recent)
        return samples, elements

    def add_ceiling(self, ceiling: Ceiling) -> None:
        """Record a failure; beyond `MAX_CEILINGS` those with the most elements are dropped."""
        self.ceilings = sorted([*self.ceilings, ceiling], key=lambda c: c.elements)[:MAX_CEILINGS]

    def drop_ceiling(self, ceiling: Ceiling) -> None:
        """Remove a failure, if it is still recorded."""
        self.ceilings = [each for each in self.ceilings if each is not ceiling]

    def size_below_ceilings(
        self, limits: Limits, samples: int, elements: int, largest: int
    ) -> tuple[int, int]:
        """Return the size for a call, `largest` at most, and the length of its longest piece.

        It is below the size of the track where samples are so long that a ceiling would be hit.
        """
        size = min(self.size, largest)
        length = largest if size == largest else limits.longest(samples, size)
        if self.ceilings and length * elements >= self.ceilings[0].elements:
            below = (self.ceilings[0].elements - 1) // elements
            size = min(size, limits.clamp(below))
            length = limits.longest(samples, size)
        return size, length

    def explain_ceilings(self, capacity: Capacity, changed: float) -> None:
        """Take a reading for the failures that had none so far."""
        for ceiling in self.ceilings:
            if ceiling.seen is None and capacity.at > ceiling.at:
                ceiling.explain(capacity.bytes, changed)

    def lift_ceilings(self, capacity: Capacity, present: int, policy: Policy, now: float) -> None:
        """Remove the ceilings whose evidence has changed.

        A ceiling with a known capacity stands until the capacity has risen by the fraction
        `changed`. One without stands until smaller pieces, of `present` elements, have cost as
        much time as the failure did, and at most one cooldown.
        """

        def stands(ceiling: Ceiling) -> bool:
            if ceiling.capacity is not None:
                return capacity.bytes <= ceiling.capacity * (1 + policy.changed)
            slower = self.time.gain(present, ceiling.elements) or 0.0
            wait = min(policy.cooldown, 1 / slower) if slower > 0 else policy.cooldown
            return now - ceiling.at < ceiling.lost * wait

        self.ceilings = list(filter(stands, self.ceilings))

    def capacity_in_cooldown(self, capacity: Capacity) -> Capacity | None:
        """Return the capacity that counts during a cooldown; None where none is known.

        It is the least one at which a call has failed, because a co-tenant that comes and goes can
        take the rest again.
        """
        known = [each.capacity for each in self.ceilings if each.capacity is not None]
        if not known:
            return None
        return capacity._replace(bytes=min(capacity.bytes, *known))

    def growth_failed(self, trial: Trial, ceiling: Ceiling, changed: float) -> None:
        """Record that a growth has failed: nothing beyond the size before it works with the memory.

        The failure is explained by whatever reading follows it.
        """
        ceiling.limit = trial.elements
        ceiling.needed = None
        ceiling.explain(ceiling.seen, changed)
        seen = trial.capacity if ceiling.seen is None else ceiling.seen
        self.proven.disprove(trial.elements, math.inf if seen is None else seen * (1 + changed))

    def growth_was_no_cause(self, trial: Trial, since: float, changed: float) -> None:
        """Record that a growth is no cause of the failures of a call that began at `since`.

        With the memory seen when it grew the size before it had worked. So a reading that shows as
        much again explains none of them.
        """
        if trial.capacity is None:
            return
        self.proven.add(trial.elements, trial.capacity)
        for ceiling in self.ceilings:
            if ceiling.at >= since:
                known = self.proven.needed(ceiling.elements)
                ceiling.needed = trial.capacity if known is None else min(known, trial.capacity)
                ceiling.explain(ceiling.seen, changed)

    def passed(self, elements: int, batch: int, capacity: Capacity | None) -> None:
        """Record a clean call: the elements of its longest piece, and of its batch.

        It disproves the ceilings that are not above its longest piece, and counts for a trial whose
        size it has used.
        """
        if self.ceilings:
            self.ceilings = [c for c in self.ceilings if c.elements > elements]
        if self.trial is not None and elements > self.trial.elements:
            self.trial.calls = max(0, self.trial.calls - 1)
            self.trial.run += batch
        on_trial = self.trial is not None and self.trial.calls > 0
        if capacity is not None and not on_trial:
            self.proven.add(elements, capacity.bytes)

    def measure(self, call: RunningCall, outcome: CallOutcome) -> None:
        """Feed the fits with a call that did not fail.

        After a failure, peak and time would be those of the failed attempt, too.
        """
        self.calls += 1
        if outcome.peak is not None:
            self.memory.add(
                call.length * call.batch.elements,
                outcome.peak,
                elements=call.batch.elements,
                first=outcome.fresh,
            )
            self.calls_without_peak = 0
        elif call.learning:
            self.calls_without_peak += 1
        if 1 <= outcome.fragmentation != self.fragmentation:
            # The allocator's cache from before the call may have served this size or not, so only
            # bounds are known. Between them, the old value stays.
            least = outcome.least_fragmentation or outcome.fragmentation
            self.fragmentation = min(max(self.fragmentation, least), outcome.fragmentation)
        self.measure_time(outcome)

    def measure_time(self, outcome: CallOutcome) -> None:
        """Feed the fit of time with a call whose seconds are known."""
        pieces = outcome.pieces
        seconds = outcome.seconds
        if pieces and seconds is not None and 0 < seconds < math.inf and not outcome.retries:
            self.time.add(round(outcome.samples * outcome.elements / pieces), seconds / pieces)

    def saved(self, now: float) -> dict[str, object]:
        """Return everything worth saving, as JSON.

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
            "proven": self.proven.state(),
            "trial": None if self.trial is None else self.trial.saved(),
            "ceilings": [ceiling.saved() for ceiling in self.ceilings],
            "recent": [list(batch) for batch in self.recent],
            "memory": self.memory.state(),
            "time": self.time.state(),
        }

    @classmethod
    def restored(cls, row: Any, now: float) -> Track:
        """Make the track that `saved()` describes; readings from before `now` do not count.

        Raises:
            KeyError, TypeError, ValueError: the row is malformed.
        """
        track = cls(checked(row["size"], int, 1), checked(row["patience"], int, 1), decided_at=now)
        track.epoch = checked(row["epoch"], int)
        track.clean = checked(row["clean"], int)
        track.calls = checked(row["calls"], int)
        track.cooldown_until = now + checked(row["cooldown_left"], float)
        track.fragmentation = checked(row["fragmentation"], float, 1.0)
        track.proven = Proven.restored(row["proven"])
        if row["trial"] is not None:
            track.trial = Trial.restored(row["trial"])
        for failure in row["ceilings"]:
            track.add_ceiling(Ceiling.restored(failure, now))
        for samples, elements in row["recent"]:
            batch = checked(samples, int, 1, MOST_SAMPLES), checked(elements, int, 1)
            track.recent.append(batch)
        track.expected()  # raises where there is no batch
        planned = isinstance(row["memory"], dict)
        track.memory = (PeakModel if planned else MemoryFit).restored(row["memory"])
        track.time = TimeFit.restored(row["time"])
        return track
