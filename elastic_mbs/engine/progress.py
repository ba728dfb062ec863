"""The progress of one call: the pieces that have committed, the ones to come, and the failures."""

from __future__ import annotations

from operator import attrgetter

from elastic_mbs.batch.schedule import Range, Schedule
from elastic_mbs.engine.attempt import Attempt

_START = attrgetter("piece.start")


class Progress:
    """The pieces of a batch: committed, to come, and how often one has failed.

    Attributes:
        schedule: the samples that still have to run.
        size: the micro-batch size in force, in samples.
        committed: the attempts that have succeeded, in the order in which they ran.
        failures: failed attempts of the call.
        failures_in_row: failed attempts since a piece has committed.
        restarts: how often the batch was started over.
        replayed_samples: samples that were run again.
    """

    failures = 0
    failures_in_row = 0
    restarts = 0
    replayed_samples = 0
    _failed_at: int | None = None  # first sample of the latest failed piece, until it commits
    _tried_masked = False  # an error that is perhaps a hidden out-of-memory was tried once

    def __init__(self, schedule: Schedule, size: int) -> None:
        self.schedule = schedule
        self.size = size
        self.committed: list[Attempt] = []

    @property
    def untouched(self) -> bool:
        """True until a piece of the call has run or failed."""
        return not self.committed and not self.failures

    @property
    def recovered(self) -> bool:
        """True if every piece that has failed has committed since."""
        return self._failed_at is None

    @property
    def has_others(self) -> bool:
        """True if the batch has pieces beside the one that has just committed."""
        return len(self.committed) > 1 or bool(self.schedule)

    def missing(self, begun: list[Range]) -> str:
        """Return the samples that have not committed, in words.

        Args:
            begun: pieces that have begun and not ended.
        """
        rests = sorted([*self.schedule.missing(), *begun], key=attrgetter("start"))
        return ", ".join(f"{rest.start}:{rest.stop}" for rest in rests)

    def next(self) -> Range | None:
        """Return the next piece, or None at the end of the batch."""
        return self.schedule.next(self.size)

    def commit(self, attempt: Attempt) -> None:
        """Keep an attempt that has succeeded: its loss and its outputs."""
        self.committed.append(attempt)
        attempt.succeed()
        self.failures_in_row = 0
        failed_at = self._failed_at
        if failed_at is not None and attempt.piece.start <= failed_at < attempt.piece.stop:
            self._failed_at = None

    def in_order(self) -> list[Attempt]:
        """Return the committed attempts in the batch's order."""
        return sorted(self.committed, key=_START) if self.failures else self.committed

    # ------------------------------------------------------------------ after a failure

    def fail(self, piece: Range) -> None:
        """Count a failed attempt at `piece`."""
        self.failures += 1
        self.failures_in_row += 1
        self._failed_at = piece.start

    def try_masked(self) -> bool:
        """Return True once in a call: one error that is perhaps out-of-memory is tried again."""
        tried = self._tried_masked
        self._tried_masked = True
        return not tried

    def forgive(self) -> None:
        """Forget the failures in a row: the next attempt needs less memory than they did."""
        self.failures_in_row = 0

    def shrink(self, size: int) -> None:
        """Cut the remaining samples into pieces of `size`."""
        self.size = size

    def replay(self, piece: Range) -> None:
        """Schedule a failed piece once more, before all others."""
        self.replayed_samples += len(piece)
        self.schedule.push(piece)

    def restart(self, failed: Range | None = None) -> None:
        """Start the batch over, and count the samples that run again.

        Args:
            failed: the piece that failed; None where the whole batch has committed.
        """
        self.restarts += 1
        self.replayed_samples += sum(map(len, self.committed))
        self.replayed_samples += 0 if failed is None else len(failed)
        self.rewind()

    def rewind(self) -> None:
        """Go back to the start of the batch, for another pass over it."""
        self.schedule.restart()
        self.drop_committed()

    def count_replayed(self, samples: int) -> None:
        """Count samples of an earlier pass, which also runs again."""
        self.replayed_samples += samples

    def drop_committed(self) -> None:
        """Drop every committed attempt with its loss and its outputs."""
        for attempt in self.committed:
            attempt.drop()
        self.committed.clear()
