"""The floor: a piece that does not fit and cannot be cut.

Its first failure is tried again after everything was released, the second one after a wait for
memory that others hold. Where there is room for it by then, memory was short for a moment: it is
tried a few times more. Then the next way of `RecoveryOptions.escalate` is put in use. When none is
left, the call ends by an error that says what was asked for, what is free, who has the rest, and
the ways out.
"""

from __future__ import annotations

from elastic_mbs.engine.attempt import Failure
from elastic_mbs.engine.parts import CallParts
from elastic_mbs.engine.recovery.refusal import Try, has_room, needed_by, refusal
from elastic_mbs.errors import MicroBatchFloorError
from elastic_mbs.escalation.checkpoint import checkpointable
from elastic_mbs.escalation.ladder import Memory
from elastic_mbs.events import Escalated, WaitingForMemory
from elastic_mbs.memory import Headroom
from elastic_mbs.memory.processes import describe

_TRIES = 2
_TRIES_WITH_ROOM = 6
_NAP = 0.25  # longest time between two looks at the memory while waiting, in seconds
# Waiting can help when others hold at least 1/16 of the device: the driver and our own context
# count as others.
_OTHERS = 16


class Floor:
    """The failures of one piece at the floor.

    A commit resets the count only if it holds this piece's first sample. After a restart of the
    batch other pieces commit first, and that is no progress.
    """

    def __init__(self, parts: CallParts) -> None:
        self._parts = parts
        self._start: int | None = None  # first sample of the piece
        self._failures = 0
        self._tries = list[Try]()  # the ways in which this piece did not fit

    def committed(self, start: int, stop: int) -> None:
        """Forget the failures of the piece at the floor, where it is among the samples given."""
        if self._start is not None and start <= self._start < stop:
            self._start = None
            self._failures = 0
            self._tries.clear()
            self._parts.hooks.look_away()

    def reached(self, failure: Failure, *, training: bool) -> None:
        """Return when a piece that cannot be cut may be tried again.

        Args:
            failure: the facts of its failed attempt.
            training: the pass runs backward, so `escalate` can help.

        Raises:
            MicroBatchFloorError: it does not fit.
        """
        parts, piece = self._parts, failure.piece
        parts.profile.learn_too_full(len(piece))
        if self._start != piece.start:
            self._start, self._failures = piece.start, 0
            self._tries.clear()
        self._failures += 1
        parts.hooks.look()
        parts.resources.monitor.renew()  # the last reading was made before memory was released
        reading = parts.resources.monitor.latest()
        seen = reading if isinstance(reading, Headroom) else None
        requested = failure.verdict.requested
        too_large = seen is not None and requested is not None and requested > seen.total
        if not too_large and self._may_retry(seen, failure):
            return
        steps = parts.profile.ladder.steps if training else ()
        self._tries.append(Try(steps, needed_by(failure)))
        if training and self._escalated(failure, seen):
            return
        settings = parts.resources.settings
        raise MicroBatchFloorError(
            refusal(
                failure,
                reading,
                settings,
                self._tries,
                training=training,
                compiled=parts.resources.is_compiled(),
            )
        )

    @property
    def _wait_left(self) -> float:
        """Seconds that this call may still wait for memory, in all of its passes together."""
        limit = self._parts.resources.settings.memory.wait_for_memory
        return limit - self._parts.report.watch.waited

    def _may_retry(self, seen: Headroom | None, failure: Failure) -> bool:
        """Return whether the same piece is tried again, after a wait where others hold memory."""
        if self._failures < _TRIES:
            return True
        if seen is None:
            return False
        if self._failures < _TRIES_WITH_ROOM and has_room(seen, failure):
            return self._napped()
        return self._waited(seen, failure.verdict.requested)

    def _napped(self) -> bool:
        """Wait a moment; return False where no time is left for it."""
        nap = min(_NAP, self._wait_left)
        if nap <= 0:
            return False
        self._parts.resources.sleep(nap)
        self._parts.report.watch.note_wait(nap)
        return True

    def _waited(self, seen: Headroom, requested: int | None) -> bool:
        """Wait for memory that others hold; return whether there is more now.

        The waits of a call share one limit.
        """
        resources = self._parts.resources
        enough = max(1, requested or 0, seen.total // _OTHERS)
        if seen.held_by_others < enough or self._wait_left <= 0:
            return False
        resources.log.emit(
            WaitingForMemory(
                resources.settings.name,
                self._wait_left,
                seen.free,
                seen.held_by_others,
                describe(seen.holders),
            )
        )
        while self._napped():
            now = resources.headroom()
            if now is not None and now.capacity > seen.capacity:
                return True
        return False

    def _escalated(self, failure: Failure, seen: Headroom | None) -> bool:
        """Put the next step of `escalate` in use; return False where none is left."""
        parts = self._parts
        ladder = parts.profile.ladder
        found = parts.resources.asynchronous
        ahead = found is not None and found.copies_ahead
        memory = None
        if parts.resources.settings.recovery.escalate == "auto":
            memory = Memory(None if seen is None else seen.capacity, parts.batch.view.elements)
        rungs = parts.resources.rungs()
        step = ladder.next(rungs, self._blocks, copies_ahead=ahead, memory=memory)
        if step is None:
            return False
        needed = needed_by(failure)
        ladder.climb(step, None if seen is None else max(seen.capacity, needed or 0))
        parts.hooks.escalate(ladder.steps)
        parts.knowledge.controller.needs_other(parts.key)
        self._failures = 0
        parts.progress.forgive()
        parts.resources.log.emit(
            Escalated(
                parts.resources.settings.name,
                failure.piece.start,
                failure.piece.stop,
                step.rung,
                str(parts.key),
                step.part,
                needed,
            )
        )
        return True

    def _blocks(self) -> int:
        """Return how many blocks of the model can be checkpointed."""
        return len(checkpointable(self._parts.resources.model.modules))
