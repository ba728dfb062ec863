"""Decides the micro-batch: a state machine over sizes, without a device, a clock or random numbers of its own.

```
              piece after piece                    patience, memory, time gain, no cooldown
  probing ──────── double ───────┐            ┌──────────── grow (≤ double, bisecting below a ceiling) ──► trial
     │                           ▼            │                                                              │
     └── OOM ──► halve ──────► settled ◄──────┴── came through `patience` calls ──────────────────────────────┤
                   ▲             │                                                                           │
                   └─ OOM, or ───┘            ┌── back to the size before, ceiling, cooldown doubles ◄── OOM ─┘
                      thrashing               ▼
                                           settled
```

Shrinking needs no evidence but the failure; growing needs all of it (see `Controller.end`). What failed is remembered as a ceiling with the
capacity seen then, and tried again only when that has risen and a cooldown has run. Several ceilings may stand at once: one seen while a co-tenant
was there is lifted when it leaves, and an older one, seen with all the memory, counts again.
"""

from __future__ import annotations

import math
import random as random_module
from collections.abc import Callable

from elastic_mbs.controller.growth import double_fits, next_size
from elastic_mbs.controller.messages import Capacity, Key, Move, Observation, Plan, shape_class
from elastic_mbs.controller.partition import longest, piece_count
from elastic_mbs.controller.policy import Limits, Policy
from elastic_mbs.controller.track import Call, Ceiling, Track, Trial
from elastic_mbs.errors import UsageError

__all__ = ["Capacity", "Controller", "Key", "Limits", "Move", "Observation", "Plan", "Policy", "shape_class"]

VERSION = 1
LONG_RUN = 4
"""A growth that has run clean for so many times the patience, and for the length of the cooldown, clears the strikes."""


class Controller:
    """(state, observation) → size, for every kind of call that a runtime makes.

    A call is `begin`, then any number of `piece_done` and `out_of_memory`, then `end` or `abandon`.

    Args:
        start: size to start with, in samples; None probes for it.
        limits: what the user allows.
        grow: whether sizes may rise once settled.
        policy: how eager to be.
        clock: seconds, never going back; the same clock as `Capacity.at`.
        random: source of the jitter.

    Raises:
        UsageError: `start` is not between the smallest and the largest size allowed.
    """

    def __init__(
        self,
        *,
        start: int | None,
        limits: Limits,
        grow: bool,
        policy: Policy | None = None,
        clock: Callable[[], float],
        random: random_module.Random,
    ) -> None:
        if start is not None and (start < limits.minimum or start > (limits.maximum or start)):
            raise UsageError(
                f"micro_batch_size={start} is not between min_micro_batch_size={limits.minimum} and max_micro_batch_size={limits.maximum}: "
                'change one of them, or leave the size at "auto"'
            )
        self._start = start
        self._limits = limits
        self._grow = grow
        self._policy = policy or Policy()
        self._clock = clock
        self._random = random
        self._tracks: dict[Key, Track] = {}

    def begin(self, key: Key, samples: int, elements: int) -> Plan:
        """Opens a call and gives its size. A call still open on this track counts as abandoned.

        Args:
            key: the track.
            samples: length of the batch.
            elements: elements per sample.

        Raises:
            UsageError: an empty batch or empty samples.
        """
        if samples < 1 or elements < 1:
            raise UsageError(f"a batch of {samples} samples with {elements} elements each has nothing to run")
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = self._new(key, elements)
        elif track.call is not None:
            self.abandon(key)
        track.recent.append((samples, elements))
        size, known = track.size, track.failed_at()
        if known is not None and self._longest(samples, size) * elements >= known:
            size = min(size, self._limits.clamp((known - 1) // elements))
        settled = track.calls >= self._policy.patience and self._longest(samples, size) * elements <= track.memory.largest_observed
        # Statistics belong to the process: whoever resets them too would be disturbed for ever, so a few calls without a peak end the attempt.
        learning = track.probing or (self._grow and not settled and track.blind < self._policy.patience)
        size = min(size, samples)
        track.call = Call(size, samples, elements, learning, track.probing, started=track.size)
        return Plan(size, track.epoch, track.probing, learning)

    def holds(self, key: Key, held: int | None) -> None:
        """Tells what the process holds as a call whose peaks are wanted begins.

        Args:
            key: the track.
            held: bytes in use beside what the call itself will need, or None where that is not known.
        """
        if held is not None:
            self._running(key)[0].memory.hold(held)

    def piece_done(self, key: Key, size: int, peak: int | None, capacity: Capacity | None) -> int:
        """A piece of `size` samples (its length) has committed.

        While probing, this is where the size doubles: until the batch is whole, the maximum is reached, memory has run out, or the double is
        predicted not to fit. Without a prediction or a reading it doubles all the same: the user asked for "auto", and each step can be recovered.
        That is the one place where a missing sensor does not stop growth.

        Args:
            key: the track.
            size: length of the piece, in samples.
            peak: highest allocation since the call began, in bytes, or None.
            capacity: the latest reading, or None.

        Returns:
            The size for the pieces that follow in this call.
        """
        track, call = self._running(key)
        call.largest = max(call.largest, size)
        if not track.probing:
            return call.size
        if peak is not None:
            track.memory.add(size * call.elements, peak)
        target = self._limits.clamp(2 * size)
        if size >= track.expected()[0]:
            track.probing = False
        elif target > track.size:
            if double_fits(track, self._policy, size * call.elements, target * call.elements, capacity):
                self._resize(track, target)
                call.size = min(track.size, call.samples)
            else:
                track.probing = False
        return call.size

    def out_of_memory(self, key: Key, attempted: int, capacity: Capacity | None) -> int | None:
        """A piece of `attempted` samples ran out of memory: halves it and remembers the failure.

        Args:
            key: the track.
            attempted: length of the piece that failed, in samples.
            capacity: the latest reading, or None. It may be from before the failure; the next one corrects it.

        Returns:
            The size to go on with in this call, or None when a piece of that length cannot be cut any further.
        """
        track, call = self._running(key)
        trial = track.trial
        first = call.ooms == 0
        call.ooms += 1
        after = min(track.size, self._limits.clamp(attempted // 2))
        failed_growth = self._failed(track, attempted * call.elements, capacity)
        self._resize(track, after)
        call.size = after
        # Back to the size before at the call's end, if this one failure is all there was; a second one says that memory has changed.
        call.fallback = trial.before if failed_growth and first and trial is not None else None
        splits = piece_count(attempted, after, minimum=self._limits.minimum, align=self._limits.align) > 1
        return after if splits else None

    def end(self, key: Key, observation: Observation, capacity: Capacity | None) -> Move | None:
        """A whole call has finished: the boundary at which sizes may grow.

        Growth needs all of: `patience` clean calls at this size; a reading newer than the last change of size; a predicted peak that, times the
        fragmentation and with the margin, fits (or, while no peak was ever measured, no ceiling); fewer pieces than now, and a time gain that is not
        known to be too small; no cooldown. It goes at most to the double, and no further than the recent batches need.

        Args:
            key: the track.
            observation: what the call saw.
            capacity: the latest reading, or None: then nothing grows.

        Returns:
            The change of size, if there was one.
        """
        track, call = self._running(key)
        track.call = None
        now = self._clock()
        if capacity is not None and track.ceilings:
            track.see(capacity, self._policy.changed)
        failed = bool(observation.ooms or call.ooms)
        clean = not failed and not observation.retries
        size = call.largest if call.probing and call.largest else self._longest(call.samples, observation.size)
        if not failed:
            self._measure(track, call, observation, size)
        if clean:
            track.passed(size * call.elements, capacity)
        if failed:
            track.passed_with = None
        if call.fallback is not None:
            return self._fall_back(track, call)
        track.thrashed = track.thrashed + 1 if observation.retries and not failed else 0
        if track.thrashed >= self._policy.thrash_calls:
            track.thrashed = 0
            return self._thrashing(track, size, call.elements, capacity)
        if track.probing and call.started == track.size and call.samples == track.expected()[0]:
            track.probing = False  # a whole call at one size: there was nothing left to double
        if not clean:
            track.clean = 0
            return None
        if observation.epoch != track.epoch:
            return None
        track.clean += 1
        if track.young and track.clean >= LONG_RUN * self._policy.patience and now - track.resized_at >= self._seconds(track):
            track.young, track.strikes = False, 0
        return self._try_to_grow(track, capacity, now)

    def timed(self, key: Key, observation: Observation) -> None:
        """The time of an earlier call has become known: device events are read when they are done, never waited for.

        Args:
            key: the track.
            observation: what `end` got then, now with its seconds.
        """
        track = self._tracks.get(key)
        if track is not None and not observation.ooms:
            self._time(track, observation)

    def abandon(self, key: Key) -> None:
        """The call ended by an exception: what it learned about failures stays, its observations do not count."""
        track = self._tracks.get(key)
        if track is not None and track.call is not None:
            call, track.call = track.call, None
            if call.ooms:
                track.passed_with = None
            if call.fallback is not None:
                self._fall_back(track, call)

    def size(self, key: Key) -> int | None:
        """The present size of a track in samples, or None before its first call."""
        track = self._tracks.get(key)
        return None if track is None else track.size

    def state_dict(self) -> dict[str, object]:
        """What was learned (sizes, ceilings, fits, what is left of cooldowns), as JSON."""
        now = self._clock()
        tracks = [{"name": key.name, "mode": key.mode, "shape": key.shape, **track.state(now)} for key, track in self._tracks.items()]
        return {"version": VERSION, "tracks": tracks}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Takes over what another controller has learned. Present limits win over saved sizes.

        Raises:
            UsageError: the state is of an unknown version or malformed; nothing has changed then.
        """
        if not isinstance(state, dict) or state.get("version") != VERSION:
            version = state.get("version") if isinstance(state, dict) else state
            raise UsageError(f"controller state of version {version!r} cannot be loaded (this is {VERSION}): start without it")
        rows = state.get("tracks")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UsageError(f"tracks={rows!r} in the controller state must be a list of dicts")
        tracks, now = {}, self._clock()
        for row in rows:
            name, mode, shape = row.get("name"), row.get("mode"), row.get("shape")
            if not (isinstance(name, str) and isinstance(mode, str) and isinstance(shape, int)):
                raise UsageError(f"name={name!r}, mode={mode!r}, shape={shape!r} in the controller state name no track")
            track = Track.restored(row, now)
            if self._start is not None and not self._grow:
                track.size = min(track.size, self._start)
            track.size = self._limits.clamp(track.size)
            track.probing = track.probing and self._start is None
            tracks[Key(name, mode, shape)] = track
        self._tracks = tracks

    def _running(self, key: Key) -> tuple[Track, Call]:
        track = self._tracks.get(key)
        if track is None or track.call is None:
            raise UsageError(f"no call of {key} is running: begin() comes first")
        return track, track.call

    def _new(self, key: Key, elements: int) -> Track:
        if self._start is not None:
            return Track(self._limits.clamp(self._start), False, self._clock(), self._patience())
        known = [(k, t) for k, t in self._tracks.items() if (k.name, k.mode) == (key.name, key.mode) and not t.probing]
        if not known:
            return Track(self._limits.clamp(self._policy.probe), True, self._clock(), self._patience())
        # Of two classes as near, the one of the longer samples: memory may grow faster than their length, never slower.
        _, track = min(known, key=lambda item: (abs(item[0].shape - key.shape), -item[0].shape))
        size = self._limits.clamp(track.size * track.expected()[1] // elements)
        return Track(size, False, self._clock(), self._patience())

    def _patience(self) -> int:
        patience = self._policy.patience
        return patience + self._random.randint(0, math.ceil(patience * self._policy.jitter))

    def _seconds(self, track: Track) -> float:
        return min(self._policy.max_cooldown, self._policy.cooldown * 2.0 ** min(track.strikes, 1000))

    def _resize(self, track: Track, size: int) -> None:
        if size != track.size:
            track.resize(size, self._clock(), self._patience())

    def _longest(self, samples: int, size: int) -> int:
        return longest(samples, size, minimum=self._limits.minimum, align=self._limits.align)

    def _measure(self, track: Track, call: Call, observation: Observation, size: int) -> None:
        """Feeds the fits with a call that did not fail; after a failure peak and time are those of the failed attempt too."""
        track.calls += 1
        if observation.peak is not None:
            track.memory.add(size * call.elements, observation.peak)
            track.blind = 0
        elif call.learning:
            track.blind += 1
        if observation.fragmentation >= 1:
            # What was cached before may be of no use to this size, or of all: what is known stays as it is between the two.
            least = observation.least_fragmentation or observation.fragmentation
            track.fragmentation = min(max(track.fragmentation, least), observation.fragmentation)
        if not call.probing:
            self._time(track, observation)

    def _time(self, track: Track, observation: Observation) -> None:
        pieces, seconds = observation.pieces, observation.seconds
        if pieces and seconds is not None and 0 < seconds < math.inf and not observation.retries:
            track.time.add(max(1, round(observation.samples * observation.elements / pieces)), seconds / pieces)

    def _failed(self, track: Track, elements: int, capacity: Capacity | None) -> bool:
        """Remembers a failure at so many elements; whether it was a failed growth."""
        now = self._clock()
        trial, track.trial = track.trial, None
        grown = trial is not None and elements > trial.elements
        if track.young:
            track.strikes += 1
        track.young = track.probing = False
        passed = track.passed_with
        track.add_ceiling(
            Ceiling(
                elements,
                limit=trial.elements if trial is not None and grown else elements - 1,
                capacity=None if capacity is None else capacity.bytes,
                at=now,
                passed_with=passed[1] if passed is not None and passed[0] >= elements else None,
            )
        )
        jitter = 1 + self._random.uniform(0, self._policy.jitter)
        track.cooldown_until = max(track.cooldown_until, now + self._seconds(track) * jitter)
        return grown

    def _fall_back(self, track: Track, call: Call) -> Move | None:
        before, after = track.size, call.fallback
        if after is None or after <= before:
            return None
        self._resize(track, after)
        return Move(before, after, "limit")

    def _thrashing(self, track: Track, size: int, elements: int, capacity: Capacity | None) -> Move | None:
        before, trial = track.size, track.trial
        after = min(before, self._limits.clamp(size // 2))
        if piece_count(size, after, minimum=self._limits.minimum, align=self._limits.align) == 1:
            return None
        if self._failed(track, size * elements, capacity) and trial is not None:
            after = trial.before
        track.passed_with = None
        self._resize(track, after)
        return Move(before, after, "thrash")

    def _try_to_grow(self, track: Track, capacity: Capacity | None, now: float) -> Move | None:
        stale = capacity is None or capacity.at <= track.resized_at
        if not self._grow or track.probing or stale or track.clean < track.patience or now < track.cooldown_until or capacity is None:
            return None
        if capacity is track.judged:
            return None  # what this reading allows has been found out
        track.judged = capacity
        track.lift(capacity, self._policy.changed)
        before, after = track.size, next_size(track, self._limits, self._policy, capacity)
        if after is None:
            track.due = None
            return None
        if track.due is None:
            # Patience over and growth possible only now: memory has changed, and has so for every process on the device in the same moment.
            late = track.clean > track.patience
            track.due = now + (self._random.uniform(0, self._policy.jitter * self._policy.cooldown) if late else 0.0)
        if now < track.due:
            return None
        samples, elements = track.expected()
        track.trial = Trial(before, self._longest(samples, before) * elements, self._policy.patience)
        track.young = True
        self._resize(track, after)
        return Move(before, after, "grow")
