"""Decides the micro-batch: a state machine over sizes, without a device, a clock or random numbers of its own.

```
              piece after piece                    patience, memory, time gain, no cooldown
  Probing ──────── double ───────┐            ┌──────────── grow (≤ double, bisecting below a ceiling) ──► Trial
     │                           ▼            │                                                              │
     └── OOM ──► halve ──────► Settled ◄──────┴── came through `patience` calls ──────────────────────────────┤
                   ▲             │                                                                           │
                   └─ OOM, or ───┘            ┌── back to the size before, ceiling, cooldown doubles ◄── OOM ─┘
                      thrashing               ▼
                                           Settled
```

Shrinking needs no evidence but the failure; growing needs all of it: `growth.is_due` says when, `growth.next_size` how far. A failure is remembered
as a ceiling with the capacity seen then, and tried again only when that has risen and a cooldown has run. There can be several: one seen while a
co-tenant was there is lifted when it leaves, and an older one, seen with all the memory, counts again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from elastic_mbs.controller.fit import checked
from elastic_mbs.controller.growth import double_fits, is_due, next_size
from elastic_mbs.controller.plan import CallOutcome, Capacity, Key, Move, Plan, shape_class
from elastic_mbs.controller.policy import Limits, Policy
from elastic_mbs.controller.track import Ceiling, RunningCall, Track, Trial
from elastic_mbs.errors import UsageError

__all__ = ["CallOutcome", "Capacity", "Controller", "Key", "Limits", "Move", "Plan", "Policy", "shape_class"]

VERSION = 1
LONG_RUN = 4  # a growth that has run clean for so many times the patience, and for the length of the cooldown, ends the row of failed growths


class Controller:
    """(state, what a call has seen) → size in samples. A call is `begin`, any number of `piece_done` and `out_of_memory`, then `end` or `abandon`."""

    def __init__(self, *, start: int | None, policy: Policy, clock: Callable[[], float], random: Random) -> None:
        self._start = start  # None: probe for a size
        self._policy, self._limits = policy, policy.limits
        self._clock = clock  # never goes back; that of `Capacity.at`
        self._random = random  # draws the jitter
        self._tracks: dict[Key, Track] = {}

    def begin(self, key: Key, samples: int, elements: int) -> Plan:
        """Opens a call on a batch of so many samples, of so many elements each. A call still open on this track counts as abandoned."""
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = self._new(key, elements)
        elif track.call is not None:
            self.abandon(key)
        track.recent.append((samples, elements))
        size, probing = track.size, track.probing
        length = self._limits.longest(samples, size)
        if track.ceilings and length * elements >= track.ceilings[0].elements:
            size = min(size, self._limits.clamp((track.ceilings[0].elements - 1) // elements))
            length = self._limits.longest(samples, size)
        known = track.calls >= self._policy.patience and length * elements <= track.memory.largest_observed
        # Peak statistics are the process's: someone else who resets them would be disturbed for ever, so a few calls without a peak end the attempt.
        learning = probing or (self._policy.grow and not known and track.calls_without_peak < self._policy.patience)
        size = min(size, samples)
        track.call = RunningCall(size, track.epoch, samples, elements, learning, probing)
        return Plan(size, probing, learning)

    def holds(self, key: Key, held: int | None) -> None:
        """Takes the bytes in use outside the call's own needs (None: not known), as a call whose peaks are wanted begins."""
        if held is not None:
            self._running(key)[0].memory.hold(held)

    def piece_done(self, key: Key, size: int, peak: int | None, capacity: Capacity | None) -> int:
        """A piece of `size` samples has committed, with this highest allocation since the call began; returns the size to go on with."""
        track, call = self._running(key)
        call.longest = max(call.longest, size)
        if not track.probing:
            return call.size
        if peak is not None:
            track.memory.add(size * call.elements, peak)
        # While probing the size doubles, without a prediction or a reading too: that is what "auto" means, and each step can be recovered. Only here
        # does a missing sensor not stop growth.
        target = self._limits.clamp(2 * size)
        if size >= track.expected()[0]:
            track.probing = False
        elif target > track.size:
            track.probing = double_fits(track, self._policy, size * call.elements, target * call.elements, capacity)
            if track.probing:
                self._resize(track, target)
                call.size = min(track.size, call.samples)
        return call.size

    def out_of_memory(self, key: Key, attempted: int, capacity: Capacity | None) -> int | None:
        """Halves a piece of `attempted` samples and remembers the failure; returns the size to go on with, or None where it cannot be cut further."""
        track, call = self._running(key)
        after = min(track.size, self._limits.clamp(attempted // 2))
        failed_trial = self._failed(track, attempted * call.elements, capacity)
        self._resize(track, after)
        call.size = after
        call.ooms += 1
        # Back to the size before at the call's end, if this one failure is all there was; a second one says that memory has changed.
        call.fallback = failed_trial.before if failed_trial is not None and call.ooms == 1 else None
        return after if self._limits.pieces(attempted, after) > 1 else None

    def end(self, key: Key, outcome: CallOutcome, capacity: Capacity | None) -> Move | None:
        """A whole call has finished: the boundary at which the size can grow."""
        track, call = self._running(key)
        if capacity is not None and track.ceilings:
            track.confirm_ceilings(capacity, self._policy.changed)
        if call.ooms:
            return self._end_failed(track, call)
        track.call = None
        length = call.longest or self._limits.longest(call.samples, call.size)
        self._measure(track, call, outcome, length)
        if track.probing and call.epoch == track.epoch and call.samples == track.expected()[0]:
            track.probing = False  # a whole call at one size: there was nothing left to double
        if outcome.retries:
            return self._end_thrashing(track, length, call.elements, capacity)
        return self._end_clean(track, length * call.elements, call.epoch, capacity)

    def timed(self, key: Key, outcome: CallOutcome) -> None:
        """The time of an earlier call has become known: device events are read when they are done, never waited for."""
        track = self._tracks.get(key)
        if track is not None and not outcome.ooms:
            self._time(track, outcome)

    def abandon(self, key: Key) -> None:
        """The call ended by an exception: what it learned about failures stays, its measurements do not count."""
        track = self._tracks.get(key)
        if track is not None and track.call is not None:
            call, track.call = track.call, None
            if call.ooms:
                self._end_failed(track, call)

    def state_dict(self) -> dict[str, object]:
        """What was learned (sizes, ceilings, fits, what is left of cooldowns), as JSON."""
        now = self._clock()
        return {"version": VERSION, "tracks": [{**key._asdict(), **track.saved(now)} for key, track in self._tracks.items()]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Takes over what another controller has learned; present limits win over saved sizes. After a UsageError nothing has changed."""
        version = state.get("version") if isinstance(state, dict) else state
        if version != VERSION:
            raise UsageError(f"controller state of version {version!r} cannot be loaded (this is {VERSION}): start without it")
        try:
            self._tracks = dict(map(self._restored, state["tracks"]))  # type: ignore[call-overload]  # it is checked as it is read
        except (LookupError, TypeError, ValueError) as error:
            raise UsageError(f"malformed controller state ({type(error).__name__}: {error}): start without it") from error

    def _restored(self, row: dict[str, object]) -> tuple[Key, Track]:
        key = Key(checked(row["name"], str), checked(row["mode"], str), checked(row["shape"], int))
        track = Track.restored(row, self._clock())
        if self._start is not None and not self._policy.grow:
            track.size = min(track.size, self._start)
        track.size = self._limits.clamp(track.size)
        track.probing = track.probing and self._start is None
        return key, track

    def _running(self, key: Key) -> tuple[Track, RunningCall]:
        track = self._tracks.get(key)
        if track is None or track.call is None:
            raise UsageError(f"no call of {key} is running: begin() comes first")
        return track, track.call

    def _new(self, key: Key, elements: int) -> Track:
        now, known = self._clock(), [(k, t) for k, t in self._tracks.items() if (k.name, k.mode) == (key.name, key.mode) and not t.probing]
        probing = self._start is None and not known
        if self._start is not None:
            size = self._start
        elif known:
            # Of two classes as near, the one of the longer samples: memory can grow faster than their length, never slower.
            _, track = min(known, key=lambda item: (abs(item[0].shape - key.shape), -item[0].shape))
            size = track.size * track.expected()[1] // elements
        else:
            size = self._policy.probe
        return Track(self._limits.clamp(size), probing, self._patience(), resized_at=now, decided_at=now)

    def _patience(self) -> int:
        patience = self._policy.patience
        return patience + self._random.randint(0, math.ceil(patience * self._policy.jitter))

    def _cooldown(self, track: Track) -> float:
        return min(self._policy.max_cooldown, self._policy.cooldown * 2.0 ** min(track.failed_growths, 1000))

    def _resize(self, track: Track, size: int) -> None:
        if size != track.size:
            track.resize(size, self._clock(), self._patience())

    def _move(self, track: Track, after: int, reason: str) -> Move:
        move = Move(track.size, after, reason)
        self._resize(track, after)
        return move

    def _measure(self, track: Track, call: RunningCall, outcome: CallOutcome, length: int) -> None:
        """Feeds the fits with a call that did not fail; after a failure peak and time are those of the failed attempt too."""
        track.calls += 1
        if outcome.peak is not None:
            track.memory.add(length * call.elements, outcome.peak)
            track.calls_without_peak = 0
        elif call.learning:
            track.calls_without_peak += 1
        if outcome.fragmentation >= 1:
            # What was cached before can be of no use to this size, or of all: what is known stays as it is between the two.
            least = outcome.least_fragmentation or outcome.fragmentation
            track.fragmentation = min(max(track.fragmentation, least), outcome.fragmentation)
        if not call.probing:
            self._time(track, outcome)

    def _time(self, track: Track, outcome: CallOutcome) -> None:
        pieces, seconds = outcome.pieces, outcome.seconds
        if pieces and seconds is not None and 0 < seconds < math.inf and not outcome.retries:
            track.time.add(max(1, round(outcome.samples * outcome.elements / pieces)), seconds / pieces)

    def _failed(self, track: Track, elements: int, capacity: Capacity | None) -> Trial | None:
        """Remembers a failure at so many elements, and settles; returns the growth that has failed by it."""
        now = self._clock()
        failed = track.trial if track.trial is not None and elements > track.trial.elements else None
        track.trial, track.probing = None, False
        if track.grown:
            track.failed_growths += 1
            track.grown = False
        limit = elements - 1 if failed is None else failed.elements
        proven = track.proven[1] if track.proven is not None and track.proven[0] >= elements else None
        track.add_ceiling(Ceiling(elements, limit, None if capacity is None else capacity.bytes, now, proven))
        jitter = 1 + self._random.uniform(0, self._policy.jitter)
        track.cooldown_until = max(track.cooldown_until, now + self._cooldown(track) * jitter)
        return failed

    def _end_failed(self, track: Track, call: RunningCall) -> Move | None:
        """After a growth that failed once, the size goes back to the one before; after any other failure it stays where halving has left it."""
        track.call = track.proven = None
        track.clean = track.calls_with_retries = 0
        return self._move(track, call.fallback, "limit") if call.fallback is not None and call.fallback > track.size else None

    def _end_thrashing(self, track: Track, length: int, elements: int, capacity: Capacity | None) -> Move | None:
        """Several calls in a row in which the allocator had to retry count as a failure."""
        track.clean = 0
        track.calls_with_retries += 1
        if track.calls_with_retries < self._policy.thrash_calls:
            return None
        track.calls_with_retries = 0
        after = min(track.size, self._limits.clamp(length // 2))
        if self._limits.pieces(length, after) == 1:
            return None
        failed_trial = self._failed(track, length * elements, capacity)
        track.proven = None
        return self._move(track, after if failed_trial is None else failed_trial.before, "thrash")

    def _end_clean(self, track: Track, elements: int, epoch: int, capacity: Capacity | None) -> Move | None:
        track.passed(elements, capacity)
        track.calls_with_retries = 0
        if epoch != track.epoch:
            return None
        track.clean += 1
        now = self._clock()
        if track.grown and track.clean >= LONG_RUN * self._policy.patience and now - track.resized_at >= self._cooldown(track):
            track.grown, track.failed_growths = False, 0
        if capacity is None or not is_due(track, self._policy, capacity, now):
            return None
        track.decided_at = capacity.at
        track.lift_ceilings(capacity, self._policy.changed)
        after = next_size(track, self._limits, self._policy, capacity)
        if after is None:
            return None
        samples, elements = track.expected()
        track.trial = Trial(track.size, self._limits.longest(samples, track.size) * elements, self._policy.patience)
        track.grown = True
        return self._move(track, after, "grow")
