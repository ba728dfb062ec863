"""Decides the micro-batch: a state machine over sizes, without a device, a clock or random numbers of its own.

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

Shrinking needs no evidence but the failure; growing needs all of it: `growth.is_due` says when,
`growth.next_size` how far. A failure is remembered as a ceiling with the capacity seen then, and
tried again only when that has risen; where a reading shows as much memory as before, at once, but
only once. There can be several: one seen while a co-tenant was there is lifted when it leaves, and
an older one, seen with all the memory, counts again. A growth that has lost more time by its
failure than it had saved starts a cooldown of `cooldown` times the difference: until then sizes are
chosen as if there were no more memory than at the failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from elastic_mbs.controller.fit import checked
from elastic_mbs.controller.growth import Margin, is_due, next_size, size_after_failure
from elastic_mbs.controller.messages import CallOutcome, Capacity, Decision, Key, Move, shape_class
from elastic_mbs.controller.peak import PeakModel
from elastic_mbs.controller.policy import Limits, Policy
from elastic_mbs.controller.size_model import SizeModel
from elastic_mbs.controller.track import WHOLE, Ceiling, RunningCall, Track, Trial
from elastic_mbs.errors import UsageError

__all__ = [
    "CallOutcome",
    "Capacity",
    "Controller",
    "Decision",
    "Key",
    "Limits",
    "Move",
    "Policy",
    "shape_class",
]

VERSION = 2


class Controller:
    """(state, what a call has seen) → size in samples.

    A call is `begin`, any number of `out_of_memory`, then `end` or `abandon`.
    """

    def __init__(
        self, *, start: int | None, policy: Policy, clock: Callable[[], float], random: Random
    ) -> None:
        self._start = start  # None: the whole batch
        self._policy, self._limits = policy, policy.limits
        self._largest = self._limits.clamp(WHOLE)
        self._clock = clock  # never goes back; that of `Capacity.at`
        self._random = random  # draws the jitter
        self._margin = Margin(policy.margin)
        self._tracks: dict[Key, Track] = {}

    def planned(self, key: Key, samples: int, elements: int, memory: PeakModel, size: int) -> None:
        """Takes over what a plan for such a batch says: the peak by size, and the largest size that fits, or 0 where only trying can show one."""
        track = self._tracks.get(key) or self._new(key, elements)
        self._tracks[key] = track
        track.recent.append((samples, elements))
        track.memory = memory
        # the whole batch is never cut to be aligned
        start = size if size < samples else samples + self._limits.align - 1
        if self._start is not None:
            start = min(start, self._start)
        self._resize(track, self._limits.clamp(start))

    def begin(self, key: Key, samples: int, elements: int) -> Decision:
        """Opens a call on a batch of so many samples, of so many elements each.

        A call still open on this track counts as abandoned.
        """
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = self._new(key, elements)
        elif track.call is not None:
            self.abandon(key)
        track.recent.append((samples, elements))
        size = track.size
        length = self._limits.longest(samples, size)
        if track.ceilings and length * elements >= track.ceilings[0].elements:
            size = min(size, self._limits.clamp((track.ceilings[0].elements - 1) // elements))
            length = self._limits.longest(samples, size)
        known = (
            track.calls >= self._policy.patience
            and length * elements <= track.memory.largest_observed
        )
        # Peak statistics are the process's: someone else who resets them would be disturbed for
        # ever, so a few calls without a peak end the attempt.
        learning = (
            self._policy.grow and not known and track.calls_without_peak < self._policy.patience
        )
        size = min(size, samples)
        track.call = RunningCall(
            size, track.size, track.epoch, samples, elements, learning, self._clock(), length
        )
        return Decision(size, learning, track.wants_reading)

    def holds(self, key: Key, held: int | None) -> None:
        """Takes the bytes in use outside the call's own needs (None: not known), as a call whose peaks are wanted begins."""
        if held is not None:
            self._running(key)[0].memory.hold(held)

    def out_of_memory(self, key: Key, attempted: int, capacity: Capacity | None) -> int | None:
        """Remembers the failure of a piece of `attempted` samples; returns the smaller size to go on with, or None where it cannot be cut further.

        `capacity` is a reading made after the failure; None where there is none yet.
        """
        track, call = self._running(key)
        fitting = None
        if capacity is not None and not call.ooms:
            fitting = size_after_failure(
                track, call, attempted, self._limits, self._margin.budget(track, capacity)
            )
        self._margin.follow(capacity)
        after = min(track.size, self._limits.clamp(fitting or attempted // 2))
        failed_trial, failed = self._failed(track, attempted * call.elements, capacity)
        if failed_trial is not None and fitting is not None and after < failed_trial.before:
            failed_trial = None  # what it grew from would have failed, too
        self._resize(track, after)
        call.size = after
        call.ooms += 1
        if call.ooms == 1:
            call.failed_trial, call.failed = failed_trial, failed
        return after if self._limits.pieces(attempted, after) > 1 else None

    def needs_less(self, key: Key) -> None:
        """Calls of this name and mode need less memory from now on, and more time: what was measured, what failed and what is proven is void."""
        for other, track in self._tracks.items():
            if (other.name, other.mode) == (key.name, key.mode):
                track.forget()

    def end(self, key: Key, outcome: CallOutcome, capacity: Capacity | None) -> Move | None:
        """A whole call has finished: the boundary at which the size can grow."""
        track, call = self._running(key)
        if capacity is not None and track.ceilings:
            track.explain_ceilings(capacity, self._policy.changed)
        track.wants_reading = False
        self._margin.follow(capacity)
        if call.ooms:
            return self._end_failed(track, call, outcome.lost)
        track.call = None
        self._measure(track, call, outcome)
        if outcome.retries:
            return self._end_thrashing(track, call, call.length, capacity)
        return self._end_clean(track, call, call.length * call.elements, capacity)

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
                self._end_failed(track, call, self._clock() - call.began)

    def time(self, key: Key) -> tuple[float, float] | None:
        """γ, in seconds per element, and δ, in seconds per piece, where calls have shown them."""
        track = self._tracks.get(key)
        return None if track is None else track.time.coefficients()

    def models(self) -> dict[str, SizeModel]:
        """What is known of each kind of call, by its key."""
        return {str(key): SizeModel.of(track) for key, track in self._tracks.items()}

    def state_dict(self) -> dict[str, object]:
        """What was learned (sizes, ceilings, fits, what is left of cooldowns), as JSON."""
        now = self._clock()
        return {
            "version": VERSION,
            "tracks": [
                {**key._asdict(), **track.saved(now)} for key, track in self._tracks.items()
            ],
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Takes over what another controller has learned; present limits win over saved sizes.

        After a UsageError nothing has changed.
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
            track.trial = None  # its failure would bring a larger size back
            if self._start is not None:
                track.size = min(track.size, self._start)
        track.size = self._limits.clamp(track.size)
        return key, track

    def _running(self, key: Key) -> tuple[Track, RunningCall]:
        track = self._tracks.get(key)
        if track is None or track.call is None:
            raise UsageError(f"no call of {key} is running: begin() comes first")
        return track, track.call

    def _new(self, key: Key, elements: int) -> Track:
        known = [
            (k, t) for k, t in self._tracks.items() if (k.name, k.mode) == (key.name, key.mode)
        ]
        if self._start is not None:
            size = self._start
        elif known:
            # Of two classes as near, the one of the longer samples: memory can grow faster than
            # their length, never slower.
            _, track = min(known, key=lambda item: (abs(item[0].shape - key.shape), -item[0].shape))
            size = min(WHOLE, track.size * track.expected()[1] // elements)
        else:
            size = WHOLE
        return Track(self._limits.clamp(size), self._patience(), decided_at=self._clock())

    def _patience(self) -> int:
        patience = self._policy.patience
        return patience + self._random.randint(0, math.ceil(patience * self._policy.jitter))

    def _cooldown(self, lost: float) -> float:
        """When as much time has run as justifies to lose so many seconds."""
        return self._clock() + self._policy.cooldown * lost * (
            1 + self._random.uniform(0, self._policy.jitter)
        )

    def _resize(self, track: Track, size: int) -> None:
        if size != track.size:
            track.resize(size, self._clock(), self._patience())

    def _move(self, track: Track, after: int, reason: str) -> Move:
        move = Move(track.size, after, reason)
        self._resize(track, after)
        return move

    def _measure(self, track: Track, call: RunningCall, outcome: CallOutcome) -> None:
        """Feeds the fits with a call that did not fail; after a failure peak and time are those of the failed attempt too."""
        track.calls += 1
        if outcome.peak is not None:
            track.memory.add(call.length * call.elements, outcome.peak, first=outcome.fresh)
            track.calls_without_peak = 0
        elif call.learning:
            track.calls_without_peak += 1
        if 1 <= outcome.fragmentation != track.fragmentation:
            # What was cached before can be of no use to this size, or of all: what is known stays
            # as it is between the two.
            least = outcome.least_fragmentation or outcome.fragmentation
            track.fragmentation = min(max(track.fragmentation, least), outcome.fragmentation)
        self._time(track, outcome)

    def _time(self, track: Track, outcome: CallOutcome) -> None:
        pieces, seconds = outcome.pieces, outcome.seconds
        if pieces and seconds is not None and 0 < seconds < math.inf and not outcome.retries:
            track.time.add(round(outcome.samples * outcome.elements / pieces), seconds / pieces)

    def _failed(
        self, track: Track, elements: int, capacity: Capacity | None
    ) -> tuple[Trial | None, Ceiling]:
        """Remembers a failure at so many elements, with a reading made after it; returns the growth that has failed by it, and the failure."""
        failed = (
            track.trial if track.trial is not None and elements > track.trial.elements else None
        )
        track.trial = None
        limit = elements - 1
        if failed is not None and failed.calls:
            limit, track.proven = failed.elements, None
        proven = (
            track.proven[1] if track.proven is not None and track.proven[0] >= elements else None
        )
        ceiling = Ceiling(elements, limit, self._clock(), proven)
        if capacity is not None:
            ceiling.explain(capacity, self._policy.changed)
        track.add_ceiling(ceiling)
        return failed, ceiling

    def _lost(
        self, track: Track, lost: float, since: float, trial: Trial | None, elements: int
    ) -> None:
        """Failures since then have lost so many seconds, that of a growth to so many elements first where there was one."""
        for ceiling in track.ceilings:
            if ceiling.at >= since:
                ceiling.lost = lost
        if (
            trial is not None
            and (net := lost - track.time.saved(trial.run, trial.elements, elements)) > 0
        ):
            track.cooldown_until = max(track.cooldown_until, self._cooldown(net))

    def _end_failed(self, track: Track, call: RunningCall, lost: float) -> Move | None:
        """After one failure of a growth the size goes back to the one before, and after one that memory does not explain to what it was, once.

        After any other failure it stays where that has left it.
        """
        track.call = None
        track.clean = track.calls_with_retries = 0
        trial, first = call.failed_trial, call.failed
        assert first is not None
        self._lost(track, lost, call.began, trial, first.elements)
        if call.ooms > 1 or not self._policy.grow:  # memory has changed, or no size may rise
            return None
        if trial is not None and trial.calls:
            return self._move(track, trial.before, "limit") if trial.before > track.size else None
        if not first.is_spike or track.size >= call.before:
            return None
        track.drop_ceiling(first)
        track.trial = Trial(
            track.size,
            self._limits.longest(call.samples, track.size) * call.elements,
            self._policy.patience,
        )
        return self._move(track, call.before, "grow")

    def _end_thrashing(
        self, track: Track, call: RunningCall, length: int, capacity: Capacity | None
    ) -> Move | None:
        """Several calls in a row in which the allocator had to retry count as a failure."""
        track.clean = 0
        track.calls_with_retries += 1
        if track.calls_with_retries < self._policy.thrash_calls:
            return None
        track.calls_with_retries = 0
        after = min(track.size, self._limits.clamp(length // 2))
        if self._limits.pieces(length, after) == 1:
            return None
        trial, _ = self._failed(track, length * call.elements, capacity)
        self._lost(
            track,
            self._policy.thrash_calls * (self._clock() - call.began),
            call.began,
            trial,
            length * call.elements,
        )
        return self._move(
            track, after if trial is None or not trial.calls else trial.before, "thrash"
        )

    def _end_clean(
        self, track: Track, call: RunningCall, elements: int, capacity: Capacity | None
    ) -> Move | None:
        track.passed(elements, call.samples * call.elements, capacity)
        track.calls_with_retries = 0
        if call.epoch != track.epoch:
            return None
        track.clean += 1
        now = self._clock()
        if capacity is not None and now < track.cooldown_until:
            capacity = track.without_growth(capacity)
        if (
            capacity is None
            or track.size >= min(call.samples, self._largest)
            or not is_due(track, self._limits, self._policy, capacity)
        ):
            return None
        track.wants_reading = True
        if capacity.at <= track.decided_at:
            return None
        track.decided_at = capacity.at
        samples, elements = track.expected()
        present = self._limits.longest(samples, track.size) * elements
        track.lift_ceilings(capacity, present, self._policy, now)
        after = next_size(
            track, self._limits, self._policy, capacity, self._margin.budget(track, capacity)
        )
        if after is None:
            return None
        track.trial = Trial(track.size, present, self._policy.patience)
        return self._move(track, after, "grow")
