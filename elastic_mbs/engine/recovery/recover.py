"""Recovery from a failed attempt, and the unwinding of a call that ends by an error.

`recover` runs between two attempts, when the exception is gone: its traceback would keep the
tensors of the failed attempt. In this order: let go, choose the replay, roll back and schedule the
samples again, release memory, shrink, report. Source: docs/internals/errors.md.
"""

from __future__ import annotations

import time
from contextlib import suppress

from elastic_mbs.engine.attempt import Attempt, Failure
from elastic_mbs.engine.parts import CallParts
from elastic_mbs.engine.passes import Pass
from elastic_mbs.engine.recovery.replay import Facts, Mode, choose_replay
from elastic_mbs.errors import (
    ElasticMBSError,
    IncompleteBatchError,
    MicroBatchFloorError,
    PoisonedDeviceError,
    RecoveryError,
    ReplayUnsafeError,
)
from elastic_mbs.events import OutOfMemory
from elastic_mbs.memory import Headroom, oom
from elastic_mbs.memory.processes import describe

_NAMED = 8  # samples in a note


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


# ---------------------------------------------------------------------- a call that ends early


def unwind(parts: CallParts, error: BaseException) -> None:
    """Put back everything that a call has changed, and note on the error what could not be.

    Gradients that were empty are emptied; buffers and random streams go back to the call's start.
    Can be repeated, after an error in the middle too.
    """
    with suppress(RuntimeError):  # the device can be lost
        parts.loader.stop()
    if parts.gradients.unwind():
        _add_note(
            error,
            "elastic_mbs: gradients that were not empty when this batch began may hold a part of "
            "it: call zero_grad() before you go on. Gradients that were empty are empty again; "
            "buffers and random streams are as they were.",
        )
    if parts.hooks.table is not None and "saved tensor hooks" in str(error):
        _add_note(
            error,
            "elastic_mbs: torch.func transforms inside the block need micro_batches(batch, "
            'own_graph=False), and no escalate="offload".',
        )
    lost = parts.snapshot.unwind()  # last: where the device is lost, this fails
    if lost is not None:
        _add_note(error, f"elastic_mbs: {lost}")


def unwind_rest(parts: CallParts, error: BaseException) -> None:
    """Put back what a step has changed after it closed the runtime, which has ended its call."""
    with suppress(Exception):  # a lost device: the error that is on its way says more
        unwind(parts, error)


def closed_inside() -> IncompleteBatchError:
    """Return the error of a call whose own step, or sink, has closed the runtime."""
    return IncompleteBatchError(
        "the runtime was closed inside its own call (in the step, or in a function of on_event), "
        "so this batch is incomplete: close it after the call"
    )


def ended_early() -> IncompleteBatchError:
    """Return the error of a loop that goes on after its call has ended without a result."""
    return IncompleteBatchError(
        "this batch has ended before all of its samples had run, by an error that the loop has "
        "caught or because the runtime was closed: leave the loop, and call zero_grad()"
    )


def note_piece(parts: CallParts, attempt: Attempt, error: BaseException) -> None:
    """Note on an error of the user's step that it ran on a piece, which can be the reason."""
    view, size = parts.batch.view, len(attempt)
    samples = view.length
    if size < samples and isinstance(error, Exception) and not isinstance(error, ElasticMBSError):
        numbers = view.numbers(attempt.piece.start, attempt.piece.stop)
        listed = ", ".join(map(str, numbers[:_NAMED])) + (", …" if size > _NAMED else "")
        note = f"elastic_mbs: raised in a piece of {size} of {samples} samples (number {listed})"
        if size == 1:  # a shape without its first dimension (`squeeze`), statistics of one sample
            note += ". If the step needs more at once: Policy(min_micro_batch_size=2)"
        _add_note(error, note)


def tell(parts: CallParts, error: BaseException) -> None:
    """Tell the other ranks, and the user's `on_fatal`, which can save with everything restored."""
    parts.peers.failed(error)
    try:
        on_fatal = parts.resources.settings.recovery.on_fatal
        if on_fatal is not None and isinstance(error, RecoveryError):
            on_fatal(error)
    except Exception as problem:  # it must not take the place of the error that is on its way
        error.add_note(f"elastic_mbs: on_fatal raised {type(problem).__name__}: {problem}")


def _add_note(error: BaseException, note: str) -> None:
    """Add a note, once."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
