"""Recovery from a failed attempt.

`recover` runs between two attempts, when the exception is gone: its traceback would keep the
tensors of the failed attempt. In this order: let go, choose the replay, roll back and schedule the
samples again, release memory, shrink, report. Source: docs/internals/errors.md.
"""

from __future__ import annotations

import time
from contextlib import suppress

from elastic_mbs.engine.attempt import Failure
from elastic_mbs.engine.parts import CallParts
from elastic_mbs.engine.passes import Pass
from elastic_mbs.engine.recovery.replay import Facts, Mode, choose_replay
from elastic_mbs.errors import MicroBatchFloorError, PoisonedDeviceError, ReplayUnsafeError
from elastic_mbs.events import OutOfMemory
from elastic_mbs.memory import Headroom, oom
from elastic_mbs.memory.processes import describe


def recover(parts: CallParts, failure: Failure, now: Pass) -> tuple[Mode, bool]:
    """Roll a failed attempt back, shrink, and schedule the samples that have to run again.

    Args:
        parts: the parts of the call.
        failure: the facts of the attempt.
        now: the pass that it belongs to.

    Returns:
        The replay, and whether the samples can be cut into smaller pieces.

    Raises:
        RecoveryError: the call cannot go on.
    """
    resources, progress = parts.resources, parts.progress
    own = parts.peers.undo()  # first of all: other ranks can wait for it
    parts.gradients.unsettle()
    parts.gradients.clear_backward()  # in a forward, too: a gradient penalty runs backward there
    progress.fail(failure.piece)
    _check_device(parts, failure)
    parts.loader.stop()
    capacity = resources.capacity() if resources.monitor.renew() else None
    worth = progress.schedule.worth(failure.piece)
    size: int | None = progress.size
    if own:
        size = parts.knowledge.controller.out_of_memory(parts.key, worth, capacity)
    replay = choose_replay(facts_of(parts, failure, now))
    if replay.mode is Mode.REFUSED:
        raise ReplayUnsafeError(replay.reason)
    _roll_back(parts, failure, replay.mode)
    if not own:
        smaller = True
    elif size is None:
        smaller = progress.schedule.halve(failure.piece)
    else:
        smaller = progress.schedule.can_split(failure.piece, size)
    if not smaller:
        with suppress(MicroBatchFloorError):  # the host has no room: they are right where they are
            resources.retry("move copies to the host", resources.buffers.leave_device)
    resources.release(thorough=progress.failures_in_row > 2 or not smaller)
    if size is not None:
        progress.shrink(size)
    lost = parts.report.watch.failed(whole_call=replay.mode is Mode.STEP)
    _emit(parts, failure, replay.mode, worth, lost)
    return replay.mode, smaller


def facts_of(parts: CallParts, failure: Failure, now: Pass) -> Facts:
    """Return the facts by which the replay of a failed attempt is chosen."""
    committed = bool(parts.progress.committed)
    return Facts(
        start=failure.piece.start,
        stop=failure.piece.stop,
        edited=failure.edited,
        unknown=failure.unknown,
        unwatched=failure.unwatched,
        streams_lost=parts.snapshot.piece_is_lost(first=not committed),
        before_backward=not failure.phase.after_forward,
        synchronous=failure.verdict.synchronous,
        earlier_committed=committed and now.training,
        bound=now.bound,
        in_step=parts.peers.in_step and now.training,
        isolated=parts.gradients.isolation is not None,
        commits=failure.commits,
        had_gradient=bool(parts.gradients.full),
        edited_earlier=parts.edits.earlier,
    )


def check_cap(parts: CallParts, failure: Failure) -> None:
    """Refuse to go on after too many failures in a row, or too many restarts."""
    progress, samples = parts.progress, parts.batch.view.length
    cap = 16 + 4 * samples.bit_length()
    if progress.failures_in_row > cap or progress.restarts > cap:
        raise MicroBatchFloorError(
            f"gave up after {progress.failures} out-of-memory errors in one batch of {samples} "
            f"samples: {failure.verdict.message}"
        )


def _check_device(parts: CallParts, failure: Failure) -> None:
    """Refuse to go on with a device that cannot be trusted."""
    verdict = failure.verdict
    reason = verdict.message if verdict.kind is oom.Kind.POISONED else None
    if reason is None and not verdict.synchronous:
        answers = map(oom.probe, parts.resources.devices)
        reason = next((answer for answer in answers if answer is not None), None)
    if reason is not None:
        raise PoisonedDeviceError(
            "the device or its allocator cannot be trusted after this error; save what you need "
            f"and restart the process: {reason}"
        )


def _roll_back(parts: CallParts, failure: Failure, mode: Mode) -> None:
    """Take the attempt out of gradients, buffers and random streams, and schedule its samples."""
    if mode is Mode.STEP:
        parts.profile.learn_draws(parts.snapshot.drew_since_start())
        parts.progress.restart(failure.piece)
        parts.gradients.restart()
        parts.snapshot.restore()
    else:
        parts.progress.replay(failure.piece)
        parts.gradients.drop_piece()
        parts.snapshot.restore_piece()


def _emit(parts: CallParts, failure: Failure, mode: Mode, worth: int, lost: float) -> None:
    resources, verdict = parts.resources, failure.verdict
    reading = resources.monitor.cached()
    seen = reading if isinstance(reading, Headroom) else None
    resources.log.emit(
        OutOfMemory(
            resources.settings.name,
            phase=failure.phase.value,
            start=failure.piece.start,
            stop=failure.piece.stop,
            mode=mode.value,
            size_before=worth,
            size_after=parts.progress.size,
            committed=failure.commits,
            kind=verdict.kind.name.lower(),
            message=verdict.message,
            key=str(parts.key),
            requested=verdict.requested,
            free=None if seen is None else seen.free,
            held_by_others=None if seen is None else seen.held_by_others,
            holders="" if seen is None else describe(seen.holders),
            reading_age=None if seen is None else max(0.0, time.monotonic() - seen.at),
            seconds_lost=lost,
        )
    )
