"""The controller: a state machine that chooses the micro-batch size.

It is pure: the clock, the random numbers and the memory readings are handed to it.

```
                 patience, memory, time gain, no cooldown
            ┌── grow (≤ double, bisecting below a ceiling; at once to what is proven) ──► Trial
  Whole     │                                                                               │
  batch ─► Settled ◄───────── came through `patience` calls ────────────────────────────────┤
           │   ▲ ▲                                                                          │
           OOM,│ └─────────── back to the size before, ceiling, cooldown ◄───────────── OOM ┘
      thrashing│
           └ the largest size that fits in what is left, or half
```

Where to find it: `out_of_memory` shrinks. At the end of a call `_end_clean` may grow, `_end_failed`
may go back to a larger size, and `_end_thrashing` may shrink. Shrinking needs no evidence but the
failure. Growing needs all of it: `growth.is_due` says when, `growth.next_size` how far.

A failure is remembered as a ceiling, with the capacity seen then, and tried again only when the
capacity has risen. There can be several ceilings: one seen while a co-tenant was there is lifted
when it leaves, and an older one, seen with all the memory, counts again. Where a reading after the
failure shows as much memory as before, the size comes back at once, but only once.

A failed growth that cost more time than it had saved starts a cooldown of `cooldown` times the
difference. Until it ends, sizes are chosen as if there were no more memory than at the failure.
Where the size before the growth fails in the same call, too, a co-tenant has come: that is no fault
of the growth, and full size is back with the memory. Only where it happens again within the time of
a cooldown, one starts.

With `grow=False` only the lower arrow is left: failures and thrashing lower the size, and nothing
raises it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random

from elastic_mbs.controller.growth import (
    Margin,
    first_size,
    is_due,
    is_squeezed,
    next_size,
    size_of_call,
    smaller_size,
)
from elastic_mbs.controller.memory_model import MemoryModel
from elastic_mbs.controller.messages import (
    CallOutcome,
    Capacity,
    Decision,
    Extent,
    Key,
    Move,
    Reading,
    no_reading,
    shape_class,
)
from elastic_mbs.controller.policy import Limits, Policy
from elastic_mbs.controller.saved import checked
from elastic_mbs.controller.size_model import SizeModel
from elastic_mbs.controller.track import WHOLE, Ceiling, RunningCall, Track, Trial
from elastic_mbs.errors import UsageError

__all__ = [
    "CallOutcome",
    "Capacity",
    "Controller",
    "Decision",
    "Extent",
    "Key",
    "Limits",
    "Move",
    "Policy",
    "shape_class",
]

VERSION = 4  # of a saved state


class Controller:
    """The micro-batch size of every kind of call.

    A call is `begin`, any number of `out_of_memory`, then `end` or `abandon`.

    Args:
        start: the size to start with, in samples; None for the whole batch.
        policy: the sizes that are allowed, and the rules of growth.
        clock: seconds that never go back; the clock of `Capacity.at`.
        random: draws the jitter.
    """

    def __init__(
        self, *, start: int | None, policy: Policy, clock: Callable[[], float], random: Random
    ) -> None:
        self._start = start
        self._policy = policy
        self._limits = policy.limits
        self._largest = self._limits.clamp(WHOLE)
        self._clock = clock
        self._random = random
        self._margin = Margin(policy.margin)
        self._tracks: dict[Key, Track] = {}

    def planned(
        self, key: Key, samples: int, elements: int, memory: MemoryModel, size: int
    ) -> None:
        """Take over a plan for batches of `samples` samples with `elements` elements each.

        Args:
            key: the kind of call.
            samples: length of the batch that was planned.
            elements: elements per sample.
            memory: the predicted peak by size.
            size: the largest size that fits; 0 where only a trial can show one.
        """
        batch = Extent(samples, elements, samples)
        track = self._tracks.get(key) or self._new_track(key, batch, no_reading)
        self._tracks[key] = track
        track.recent.append((samples, elements))
        track.memory = memory
        if size >= samples:  # the whole batch fits, and is never cut to be aligned
            size = samples + self._limits.align - 1
        if self._start is not None:
            size = min(size, self._start)
        size = self._limits.clamp(size)
        track.believe(min(size, samples) * elements)
        self._resize(track, size)

    def released(self) -> None:
        """Note that memory was handed to another phase, which may keep some of it."""
        for track in self._tracks.values():
            track.released = True

    def is_back(self, key: Key) -> bool:
        """Return whether the next call is the first since memory was handed over."""
        track = self._tracks.get(key)
        return track is not None and track.released

    def resume(self, key: Key, batch: Extent, capacity: Capacity | None, held: int | None) -> None:
        """Take over what another phase has left, before the first call after it.

        `capacity` is a reading made now. `held` are the bytes in use now, outside the call's own
        needs; None where they are not known.
        """
        track = self._tracks[key]
        track.released = False
        if held is not None:
            track.memory.hold(held)
        if capacity is None or not self._policy.grow:
            return
        self._margin.follow(capacity)
        _, longest = track.size_below_ceilings(self._limits, *batch)
        budget = self._margin.budget(track, capacity)
        size = smaller_size(track, batch, longest, self._limits, budget)
        if size is not None:
            self._resize(track, min(track.size, self._limits.clamp(size)))

    # ------------------------------------------------------------------ one call

    def begin(self, key: Key, batch: Extent, reading: Reading = no_reading) -> Decision:
        """Open a call; `reading` returns the latest reading, which is asked for longer samples.

        A call that is still open on this track is abandoned.
        """
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = self._new_track(key, batch, reading)
        elif track.call is not None:
            self.abandon(key)
        track.recent.append(batch[:2])
        size, length = size_of_call(
            track, batch, self._limits, partial(self._budget, track, reading)
        )
        known = track.calls >= self._policy.patience and track.memory.covers(
            length * batch.elements, batch.elements
        )
        # Measuring resets the peak statistics of the process, which would disturb others who read
        # them. So it is given up after a few calls in which no peak could be measured.
        learning = (
            self._policy.grow and not known and track.calls_without_peak < self._policy.patience
        )
        track.call = RunningCall(
            before=track.size,
            epoch=track.epoch,
            batch=batch,
            learning=learning,
            began=self._clock(),
            length=length,
        )
        return Decision(size, learning, track.wants_reading)

    def holds(self, key: Key, held: int | None) -> None:
        """Take the bytes in use outside the call's own needs; None where they are not known.

        Called as a call begins whose peak is to be measured.
        """
        if held is not None:
            self._running(key)[0].memory.hold(held)

    def out_of_memory(self, key: Key, attempted: int, capacity: Capacity | None) -> int | None:
        """Record the failure of a piece, and return the smaller size to go on with.

        Args:
            key: the kind of call.
            attempted: samples of the piece.
            capacity: a reading made after the failure; None where there is none yet.

        Returns:
            The size, or None where the piece cannot be cut further.
        """
        track, call = self._running(key)
        elements = attempted * call.batch.elements
        budget = fitting = None
        if capacity is not None and not call.ooms:
            budget = self._margin.budget(track, capacity)
            fitting = smaller_size(track, call.batch, attempted, self._limits, budget)
        self._margin.follow(capacity)
        after = min(track.size, self._limits.clamp(fitting or attempted // 2))
        trial, ceiling = self._record_failure(track, elements, capacity)
        if not call.ooms:
            call.failed, call.failed_trial = ceiling, trial
        trial = call.failed_trial
        if trial is not None and (
            elements <= trial.elements  # the size that it grew from fails, too, or would have
            or (budget is not None and is_squeezed(track, trial, call.batch.elements, budget))
            or (ceiling.had_enough and not trial.again)
        ):
            call.failed_trial, call.excused = None, trial
            track.growth_was_no_cause(trial, call.began, self._policy.changed)
        self._resize(track, after)
        call.ooms += 1
        return after if self._limits.pieces(attempted, after) > 1 else None

    def end(self, key: Key, outcome: CallOutcome, capacity: Capacity | None) -> Move | None:
        """Close a call that has finished, and return the change of size that follows, if any."""
        track, call = self._running(key)
        if capacity is not None and track.ceilings:
            track.explain_ceilings(capacity, self._policy.changed)
        track.wants_reading = False
        self._margin.follow(capacity)
        if call.ooms:
            return self._end_failed(track, call, outcome.lost)
        track.call = None
        track.measure(call, outcome)
        if outcome.retries:
            return self._end_thrashing(track, call, capacity)
        return self._end_clean(track, call, capacity)

    def abandon(self, key: Key, waited: float = 0.0) -> None:
        """Close a call that ended by an exception.

        Its failures stay known; its measurements do not count. The seconds that it has waited for
        others' memory are not lost to its failures.
        """
        track = self._tracks.get(key)
        if track is not None and track.call is not None:
            call, track.call = track.call, None
            if call.ooms:
                self._end_failed(track, call, self._clock() - call.began - waited)

    def timed(self, key: Key, outcome: CallOutcome) -> None:
        """Take the time of an earlier call, once it is known.

        Device events are read when they are done, and never waited for.
        """
        track = self._tracks.get(key)
        if track is not None and not outcome.ooms:
            track.measure_time(outcome)

    def needs_other(self, key: Key, *, alone: bool = False) -> None:
        """Forget the measurements of all calls of this name and mode; `alone`, of this kind.

        They need other memory and time from now on: a step of `escalate` was taken or left.
        """
        for other, track in self._tracks.items():
            if other == key or (not alone and other[:2] == key[:2]):  # name and mode
                track.forget()

    # ------------------------------------------------------------------ what is known

    def time(self, key: Key) -> tuple[float, float] | None:
        """Return γ in seconds per element and δ in seconds per piece; None while unknown."""
        track = self._tracks.get(key)
        return None if track is None else track.time.coefficients()

    def models(self) -> dict[str, SizeModel]:
        """Return the size model of each kind of call, by its key."""
        return {str(key): SizeModel.of(track) for key, track in self._tracks.items()}

    def state_dict(self) -> dict[str, object]:
        """Return everything learned (sizes, ceilings, fits, rests of cooldowns), as JSON."""
        now = self._clock()
        return {
            "version": VERSION,
            "tracks": [
                {**key._asdict(), **track.saved(now)} for key, track in self._tracks.items()
            ],
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take over the state of another controller; present limits win over saved sizes.

        Raises:
            UsageError: the state is malformed or of another version; nothing has changed.
        """
        version = state.get("version") if isinstance(state, dict) else state
        if version != VERSION:
            raise UsageError(
                f"controller state of version {version!r} cannot be loaded (this is {VERSION}): "
                "start without it"
            )
        try:
            self._tracks = dict(map(self._restored, state["tracks"]))  # type: ignore[call-overload]  # it is checked as it is read
        except (LookupError, TypeError, ValueError) as error:
            raise UsageError(
                f"malformed controller state ({type(error).__name__}: {error}): start without it"
            ) from error

    def _restored(self, row: dict[str, object]) -> tuple[Key, Track]:
        key = Key(checked(row["name"], str), checked(row["mode"], str), checked(row["shape"], int))
        track = Track.restored(row, self._clock())
        if not self._policy.grow:
            track.trial = None  # its failure would bring the size before it back
            if self._start is not None:
                track.size = min(track.size, self._start)
        track.size = self._limits.clamp(track.size)
        return key, track

    # ------------------------------------------------------------------ tracks

    def _running(self, key: Key) -> tuple[Track, RunningCall]:
        track = self._tracks.get(key)
        if track is None or track.call is None:
            raise UsageError(f"no call of {key} is running: begin() comes first")
        return track, track.call

    def _new_track(self, key: Key, batch: Extent, reading: Reading) -> Track:
        """Make a track: it starts as large, in elements, as the one of the nearest shape class."""
        near = key.nearest(self._tracks)
        if self._start is not None:
            size = self._start
        elif near is not None:
            track = self._tracks[near]
            size = first_size(track, batch, self._limits, partial(self._budget, track, reading))
        else:
            size = WHOLE
        return Track(self._limits.clamp(size), self._patience(), decided_at=self._clock())

    def _budget(self, track: Track, reading: Reading) -> float | None:
        """Return the bytes that a call may reach as it begins; None where they do not count."""
        capacity = reading() if self._policy.grow else None
        return None if capacity is None else self._margin.budget(track, capacity)

    def _patience(self) -> int:
        patience = self._policy.patience
        return patience + self._random.randint(0, math.ceil(patience * self._policy.jitter))

    def _resize(self, track: Track, size: int) -> None:
        if size != track.size:
            track.resize(size, self._clock(), self._patience())

    def _move(self, track: Track, call: RunningCall, after: int, reason: str) -> Move:
        longest = max(call.batch.largest, track.expected()[0])  # WHOLE is no number to show
        move = Move(min(track.size, longest), min(after, longest), reason)
        self._resize(track, after)
        return move

    # ------------------------------------------------------------------ failures

    def _record_failure(
        self, track: Track, elements: int, capacity: Capacity | None
    ) -> tuple[Trial | None, Ceiling]:
        """Record a failure at this many elements, with a reading made after it, as a ceiling.

        Returns:
            The growth that the failure has ended, if any, and the ceiling.
        """
        trial, track.trial = track.trial, None
        failed = trial if trial is not None and elements > trial.elements else None
        ceiling = Ceiling(elements, elements - 1, self._clock(), track.proven.needed(elements))
        if capacity is not None:
            ceiling.explain(capacity.bytes, self._policy.changed)
        track.add_ceiling(ceiling)
        return failed, ceiling

    def _record_loss(
        self, track: Track, lost: float, since: float, trial: Trial | None, first: Ceiling
    ) -> None:
        """Record the seconds that the failures since a time have cost.

        Where the first one ended a growth (`trial`), a cooldown makes up for the seconds that the
        growth had not saved before.
        """
        for ceiling in track.ceilings:
            if ceiling.at >= since:
                ceiling.lost = lost
        if trial is None:
            return
        if trial.calls:
            track.growth_failed(trial, first, self._policy.changed)
        self._cool_down(track, lost, trial, first)

    def _cool_down(self, track: Track, lost: float, trial: Trial, first: Ceiling) -> None:
        """Start a cooldown for the seconds that a growth has cost and not saved before."""
        net = lost - track.time.saved(trial.run, trial.elements, first.elements)
        if net > 0:
            track.cooldown_until = max(track.cooldown_until, self._cooldown_end(net))

    def _cooldown_end(self, lost: float) -> float:
        """Return the time at which another loss of this many seconds is acceptable."""
        jitter = 1 + self._random.uniform(0, self._policy.jitter)
        return self._clock() + self._policy.cooldown * lost * jitter

    def _end_failed(self, track: Track, call: RunningCall, lost: float) -> Move | None:
        """Close a call with failures; its size may come back after a single one.

        After the failure of a growth the size goes back to the one before it. After a failure that
        memory does not explain, the size that failed is tried once more. In all other cases, and
        with `grow=False`, the size stays where the failures have left it.
        """
        track.call = None
        track.clean = track.calls_with_retries = 0
        trial = call.failed_trial
        first = call.failed
        assert first is not None
        self._record_loss(track, lost, call.began, trial, first)
        if call.excused is not None and self._clock() < track.no_excuse_until:
            self._cool_down(track, lost, call.excused, first)
        elif call.excused is not None:
            track.no_excuse_until = self._cooldown_end(lost)
        if call.ooms > 1 or not self._policy.grow:  # several: memory has changed
            return None
        if trial is not None and trial.calls:
            larger = trial.before > track.size
            return self._move(track, call, trial.before, "limit") if larger else None
        if not first.is_spike or track.size >= call.before:
            return None
        track.drop_ceiling(first)
        length = self._limits.longest(call.batch.samples, track.size)
        track.trial = Trial(
            track.size, length * call.batch.elements, self._policy.patience, first.seen, again=True
        )
        return self._move(track, call, call.before, "grow")

    def _end_thrashing(
        self, track: Track, call: RunningCall, capacity: Capacity | None
    ) -> Move | None:
        """Close a call in which the allocator had to retry; several in a row are a failure."""
        track.clean = 0
        track.calls_with_retries += 1
        if track.calls_with_retries < self._policy.thrash_calls:
            return None
        track.calls_with_retries = 0
        after = min(track.size, self._limits.clamp(call.length // 2))
        if self._limits.pieces(call.length, after) == 1:
            return None
        elements = call.length * call.batch.elements
        trial, ceiling = self._record_failure(track, elements, capacity)
        lost = self._policy.thrash_calls * (self._clock() - call.began)
        self._record_loss(track, lost, call.began, trial, ceiling)
        if trial is not None and trial.calls:
            after = trial.before
        return self._move(track, call, after, "thrash")

    # ------------------------------------------------------------------ growth

    def _end_clean(self, track: Track, call: RunningCall, capacity: Capacity | None) -> Move | None:
        """Close a call without a failure; the size may grow."""
        track.passed(
            call.length * call.batch.elements, call.batch.samples * call.batch.elements, capacity
        )
        track.calls_with_retries = 0
        if call.epoch != track.epoch:
            return None
        track.clean += 1
        now = self._clock()
        if capacity is not None and now < track.cooldown_until:
            capacity = track.capacity_in_cooldown(capacity)
        if capacity is None or track.size >= min(call.batch.largest, self._largest):
            return None
        if not is_due(track, self._limits, self._policy, capacity):
            return None
        track.wants_reading = True
        if capacity.at <= track.decided_at:
            return None
        track.decided_at = capacity.at
        samples, elements = track.expected()
        present = self._limits.longest(samples, track.size) * elements
        track.lift_ceilings(capacity, present, self._policy, now)
        budget = self._margin.budget(track, capacity)
        after = next_size(track, self._limits, self._policy, capacity, budget)
        if after is None:
            return None
        track.trial = Trial(track.size, present, self._policy.patience, capacity.bytes)
        return self._move(track, call, after, "grow")
