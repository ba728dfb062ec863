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
from elastic_mbs.errors import MicroBatchFloorError
from elastic_mbs.events import Escalated, WaitingForMemory, format_bytes
from elastic_mbs.memory import Headroom, Reading
from elastic_mbs.memory.processes import describe

_TRIES = 2
_TRIES_WITH_ROOM = 6
_NAP = 0.25  # longest time between two looks at the memory while waiting, in seconds
# Waiting can help when others hold at least 1/16 of the device: the driver and our own context
# count as others.
_OTHERS = 16
_ESCALATE = (
    'recovery=RecoveryOptions(escalate=("logits", "offload", "checkpoint")), which computes logits '
    "in chunks, then offloads saved tensors, and then turns on activation checkpointing; "
)


class Floor:
    """The failures of one piece at the floor, and the time that is left to wait for memory.

    A commit resets the count only if it holds this piece's first sample. After a restart of the
    batch other pieces commit first, and that is no progress.
    """

    def __init__(self, parts: CallParts) -> None:
        self._parts = parts
        self._start: int | None = None  # first sample of the piece
        self._failures = 0
        self._wait_left = parts.resources.settings.memory.wait_for_memory  # seconds

    def committed(self, start: int, stop: int) -> None:
        """Forget the failures of the piece at the floor, where it is among the samples given."""
        if self._start is not None and start <= self._start < stop:
            self._start = None
            self._failures = 0

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
        self._failures = self._failures + 1 if self._start == piece.start else 1
        self._start = piece.start
        parts.resources.monitor.renew()  # the last reading was made before memory was released
        reading = parts.resources.monitor.latest()
        seen = reading if isinstance(reading, Headroom) else None
        requested = failure.verdict.requested
        too_large = seen is not None and requested is not None and requested > seen.total
        if not too_large and self._may_retry(seen, failure):
            return
        if training and self._escalated(failure):
            return
        raise MicroBatchFloorError(self._message(failure, reading, too_large, training))

    def _may_retry(self, seen: Headroom | None, failure: Failure) -> bool:
        """Return whether the same piece is tried again, after a wait where others hold memory."""
        if self._failures < _TRIES:
            return True
        if seen is None:
            return False
        if self._failures < _TRIES_WITH_ROOM and _has_room(seen, failure):
            return self._napped()
        return self._waited(seen, failure.verdict.requested)

    def _napped(self) -> bool:
        """Wait a moment; return False where no time is left for it."""
        nap = min(_NAP, self._wait_left)
        if nap <= 0:
            return False
        self._parts.resources.sleep(nap)
        self._wait_left -= nap
        self._parts.report.watch.waited += nap
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

    def _escalated(self, failure: Failure) -> bool:
        """Put the next way of `escalate` in use; return False where none is left."""
        parts = self._parts
        ways = parts.resources.settings.recovery.escalate
        left = ways[parts.profile.escalated :]
        if not left:
            return False
        parts.profile.escalate()
        parts.hooks.escalate(ways[: parts.profile.escalated])
        parts.knowledge.controller.needs_less(parts.key)
        self._failures = 0
        parts.progress.forgive()
        parts.resources.log.emit(
            Escalated(
                parts.resources.settings.name,
                failure.piece.start,
                failure.piece.stop,
                left[0],
                str(parts.key),
            )
        )
        return True

    def _message(self, failure: Failure, reading: Reading, too_large: bool, training: bool) -> str:
        settings = self._parts.resources.settings
        limits, ways = settings.limits, settings.recovery.escalate
        piece, verdict = failure.piece, failure.verdict
        used = f", not even with {' and '.join(ways)}" if ways and training else ""
        out = ""
        if not isinstance(reading, Headroom) or reading.held_by_others:
            out += "free what others hold; "
        if max(limits.minimum, limits.align) > 1:
            out += f"a lower min_micro_batch_size (now {limits.minimum}, align {limits.align}); "
        out += "smaller samples; "
        if training and len(ways) < 3:
            out += _ESCALATE
        return (
            f"a micro-batch of {len(piece)} (samples {piece.start}:{piece.stop}), the smallest "
            f"allowed, does not fit{used}. {_facts(failure, reading)}"
            f"{'. The request is larger than the whole device' if too_large else ''}. "
            f"Ways out: {out}a smaller optimizer state. The error was: {verdict.message}"
        )


def _has_room(seen: Headroom, failure: Failure) -> bool:
    """Return whether a reading after the failure shows room for all that the attempt had wanted."""
    requested = failure.verdict.requested
    if requested is None:
        return False
    held = failure.verdict.held
    return requested <= seen.free if held is None else held + requested <= seen.capacity


def _facts(failure: Failure, reading: Reading) -> str:
    """Return what the attempt had and wanted, and what was there when it had let go of it."""
    asked = f"It asked for {format_bytes(failure.verdict.requested)}"
    if failure.verdict.held is not None:
        asked += f" on top of {format_bytes(failure.verdict.held)} that this process held"
    if not isinstance(reading, Headroom):
        return f"{asked}; {reading.in_words()}"
    short = (
        ", enough for it: memory was short for a moment only, or is free in parts too small"
        if _has_room(reading, failure)
        else ""
    )
    return f"{asked}; without the attempt {reading.in_words()}{short}"
