"""After a failed attempt: which replay is exact, what is put back for it, and how small the next piece is.

- PIECE: the failed piece is replayed. Leaves that had committed are left out
  (`backward(inputs=…)`), so that each gets every sample once.
- STEP: all gradients of the call are dropped and the batch is replayed from its start, because the
  piece had partly committed and a replay in halves would mix two masks or two batch statistics in
  one gradient, or because it is not known what had committed.
- ISOLATED: gradients had been set aside, so that the failed piece left nothing behind, and is
  replayed.

Everything else is refused. What a mode needs prepared before the failure is in `backward._isolate`.
`recover` runs when the exception is gone: its traceback would keep the failed attempt's tensors.
`unwind` is for a call that ends by an error.
Source: shared/reference/autograd.md and errors.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.backward import separate_gradients
from elastic_mbs.engine.state import CallState, Failure, Phase
from elastic_mbs.errors import (
    MicroBatchFloorError,
    PoisonedDeviceError,
    RecoveryError,
    ReplayUnsafeError,
)
from elastic_mbs.events import Escalated, OutOfMemory, WaitingForMemory, format_bytes
from elastic_mbs.memory import Headroom, oom
from elastic_mbs.memory.processes import describe
from elastic_mbs.rollback.graph import drain, drop_unrun


class Mode(Enum):
    """What is replayed.

    The values are the words of `OutOfMemory.mode`, but for REFUSED, which is raised.
    """

    PIECE = "piece"
    STEP = "step"
    ISOLATED = "isolate"
    REFUSED = "refused"


@dataclass(frozen=True)
class Replay:
    """How a failed attempt is replayed, and why not more cheaply."""

    mode: Mode
    reason: str = ""


# ---------------------------------------------------------------------- which replay


def _before_backward(state: CallState, failure: Failure) -> bool:
    return failure.phase in (Phase.WAITING, Phase.FORWARD)


def _can_be_late(state: CallState, failure: Failure) -> bool:
    return (
        _before_backward(state, failure)
        and state.training
        and bool(state.committed)
        and not failure.verdict.synchronous
    )


def _streams_lost(state: CallState, failure: Failure) -> bool:
    start, streams = state.streams, state.context.streams
    if start is None or failure.streams is None:
        return False
    if failure.streams is start:  # only the call's first piece has read them
        return bool(state.committed) and state.context.retry(
            "read the random streams", lambda: streams.moved(start)
        )
    return failure.streams.hosts is None and streams.hosts_moved(start)


def _depends_on_the_piece(state: CallState, failure: Failure) -> bool:
    return (
        state.profile.normalises_batch
        or failure.normalises_batch
        or state.context.buffers.changed()
    )


def _drew(state: CallState, failure: Failure) -> bool:
    start, streams = failure.streams, state.context.streams
    return start is not None and state.context.retry(
        "read the random streams", lambda: streams.moved(start)
    )


_EDITED = (
    "samples {start}:{stop} were changed in place by loss_fn before memory ran out, so they "
    "cannot be run again as they were: work on a copy "
    "(x = x.clone()) inside loss_fn. From the next call on samples that are edited are copies, "
    "and this is recovered from"
)
_UNKNOWN_LEAF = (
    "a leaf of shape {unknown} outside the model appeared in the middle of the batch; whether the "
    "failed attempt reached its gradient is not known. "
    "Give its module in model=[...] so that it is known from the start"
)
_ASYNCHRONOUS = "the error can be asynchronous, so it is not known which gradients it reached"
_INDISTINCT = (
    "gradients share memory or have new hooks, so it is not known which of them it reached"
)
_NO_INPUTS = "backward= gives no way to leave out the leaves that had committed"

_PIECE, _ISOLATED, _step, _refused = (
    Replay(Mode.PIECE),
    Replay(Mode.ISOLATED),
    partial(Replay, Mode.STEP),
    partial(Replay, Mode.REFUSED),
)
_RULES: tuple[tuple[Replay, Callable[[CallState, Failure], bool]], ...] = (
    (_refused(_EDITED), lambda state, failure: failure.edited),
    (_refused(_UNKNOWN_LEAF), lambda state, failure: bool(failure.unknown)),
    (
        _step("random numbers were drawn from streams that were not read at the piece's start"),
        _streams_lost,
    ),
    (_step("the error can belong to an earlier operation"), _can_be_late),
    (
        _step("smaller pieces would not be those whose embeddings loss_fn has seen"),
        lambda state, failure: state.bound,
    ),
    (_PIECE, _before_backward),
    (_step(_ASYNCHRONOUS), lambda state, failure: not failure.verdict.synchronous),
    (_ISOLATED, lambda state, failure: state.isolation is not None),
    (
        _step("no backward of this loss function has succeeded yet"),
        lambda state, failure: not state.profile.commits,
    ),
    (
        _step("its backward may have run another one inside, so it is not known what it reached"),
        lambda state, failure: failure.surprising,
    ),
    (_PIECE, lambda state, failure: not failure.committed),
    (_step(_INDISTINCT), lambda state, failure: failure.indistinct),
    (
        _step(_NO_INPUTS),
        lambda state, failure: state.context.settings.gradients.backward is not None,
    ),
    (
        _step("the piece had partly committed and depends on which samples are in it"),
        _depends_on_the_piece,
    ),
    (_step("the piece had partly committed and drew random numbers"), _drew),
    (_PIECE, lambda state, failure: True),
)
"""The first rule that applies decides."""


def choose_replay(state: CallState, failure: Failure) -> Replay:
    """The cheapest replay that is exact; writes nothing."""
    replay = next(replay for replay, applies in _RULES if applies(state, failure))
    if replay.mode is Mode.REFUSED:
        unknown = failure.unknown[0] if failure.unknown else ""
        return Replay(
            Mode.REFUSED,
            replay.reason.format(
                start=failure.piece.start, stop=failure.piece.stop, unknown=unknown
            ),
        )
    if replay.mode is Mode.STEP and (state.had_gradient or state.edited):
        isolate = (
            ""
            if state.isolation is not None
            else ", or use recovery=RecoveryOptions(replay='isolate')"
        )
        obstacle = (
            ".grad was not empty when it began, so its part is not known: call zero_grad() "
            f"before each batch{isolate}"
            if state.had_gradient
            else "loss_fn had edited earlier samples in place: work on a copy inside loss_fn"
        )
        return Replay(
            Mode.REFUSED,
            f"the batch has to be replayed from its start ({replay.reason}), but {obstacle}",
        )
    return replay


# ---------------------------------------------------------------------- recovery


def recover(state: CallState) -> None:
    """Rolls the failed attempt back, shrinks, and puts what has to run again back on the schedule; or raises the reason why it cannot."""
    failure, context = state.failure, state.context
    assert failure is not None
    state.settled = False
    if failure.phase is Phase.BACKWARD:
        drop_unrun()
        reset_half_made(context.settings.scaler)
    state.failures += 1
    state.failures_in_row += 1
    _check_device(state, failure)
    state.loader.stop()
    capacity = context.capacity() if context.monitor.renew() else None
    size = context.controller.out_of_memory(
        state.key, state.schedule.worth(failure.piece), capacity
    )
    replay = choose_replay(state, failure)
    if replay.mode is Mode.REFUSED:
        raise ReplayUnsafeError(replay.reason)
    _roll_back(state, failure, replay.mode)
    smaller = (
        state.schedule.halve(failure.piece)
        if size is None
        else state.schedule.can_split(failure.piece, size)
    )
    oom.release(devices=context.devices, thorough=state.failures_in_row > 2 or not smaller)
    context.cache_is_stale = True
    if size is not None:
        state.size = size
    lost = state.watch.failed(whole_call=replay.mode is Mode.STEP)
    _report(state, failure, replay.mode, lost)
    if not smaller:
        state.profile.too_full = max(state.profile.too_full, len(failure.piece))
        _wait_or_give_up(state, failure)
    cap = 16 + 4 * state.view.length.bit_length()
    if state.failures_in_row > cap or state.restarts > cap:
        raise MicroBatchFloorError(
            f"gave up after {state.failures} out-of-memory errors in one batch of "
            f"{state.view.length} samples: {failure.verdict.message}"
        )
    state.failure, state.phase = None, Phase.WAITING


def _check_device(state: CallState, failure: Failure) -> None:
    verdict = failure.verdict
    reason = verdict.message if verdict.kind is oom.Kind.POISONED else None
    if reason is None and not verdict.synchronous:
        answers = [
            answer for device in state.context.devices if (answer := oom.probe(device)) is not None
        ]
        reason = answers[0] if answers else None
    if reason is not None:
        raise PoisonedDeviceError(
            "the device or its allocator cannot be trusted after this error; save what you need "
            f"and restart the process: {reason}"
        )


def _roll_back(state: CallState, failure: Failure, mode: Mode) -> None:
    """Takes the attempt out of gradients, buffers and random streams, and schedules what has to run again."""
    ledger = state.context.ledger
    if state.isolation is not None:
        state.isolation.discard()
    if mode is Mode.STEP:
        state.restarts += 1
        state.context.model.restore(state.modes)
        if state.streams is not None:
            start, streams, profile = state.streams, state.context.streams, state.profile
            profile.draws = (
                state.context.retry("read the random streams", lambda: streams.learn(start))
                or profile.draws
            )
        state.replayed_samples += sum(map(len, state.committed)) + len(failure.piece)
        if state.isolation is not None:
            state.isolation.rewind()
            state.isolation = None
        # an evaluation has added nothing to what can be there
        for leaf in ledger.leaves() if state.training else ():
            leaf.grad = None
        state.schedule.restart()
        state.drop_committed()
    else:
        state.replayed_samples += len(failure.piece)
        committed = (
            failure.piece.committed
            if mode is Mode.ISOLATED
            else failure.piece.committed | failure.committed
        )
        state.schedule.push(Range(failure.piece.start, failure.piece.stop, committed))
        if state.training:
            separate_gradients(state)
    ledger.note()
    restore(state, None if mode is Mode.STEP else failure)


def restore(state: CallState, failure: Failure | None = None) -> None:
    """Puts buffers and random streams back to the start of the failed attempt, or, without one, of the call."""
    to_call_start, streams = failure is None, state.streams if failure is None else failure.streams
    if streams is not None:
        state.context.streams.restore(streams)
    elif failure is not None:
        # nothing of it has run, and what is kept of the buffers can be from the start of the piece
        # before
        return
    buffers = state.context.buffers
    lost = state.context.retry(
        "restore the buffers", lambda: buffers.restore(to_call_start=to_call_start)
    )
    if lost is not None:
        raise ReplayUnsafeError(
            f"the buffer {lost} changed for the first time in this batch, so its earlier value "
            "was not kept; from the next batch on it is. "
            "Load the last checkpoint, or set the buffer, before going on"
        )


def reset_half_made(scaler: torch.amp.GradScaler | None) -> None:
    """A GradScaler makes two tensors when it is first used.

    Where there was room for the first only, it would never make the other.
    """
    missing = object()
    if (
        getattr(scaler, "_scale", None) is not None
        and getattr(scaler, "_growth_tracker", missing) is None
    ):
        scaler._scale = None  # type: ignore[union-attr]  # there is one


def _report(state: CallState, failure: Failure, mode: Mode, lost: float) -> None:
    context, verdict = state.context, failure.verdict
    reading = context.monitor.cached()
    seen = reading if isinstance(reading, Headroom) else None
    context.log.emit(
        OutOfMemory(
            context.settings.name,
            phase=failure.phase.value,
            start=failure.piece.start,
            stop=failure.piece.stop,
            mode=mode.value,
            size_before=state.schedule.worth(failure.piece),
            size_after=state.size,
            committed=len(failure.committed),
            kind=verdict.kind.name.lower(),
            message=verdict.message,
            key=str(state.key),
            requested=verdict.requested,
            free=None if seen is None else seen.free,
            held_by_others=None if seen is None else seen.held_by_others,
            holders="" if seen is None else describe(seen.holders),
            reading_age=None if seen is None else max(0.0, time.monotonic() - seen.at),
            seconds_lost=lost,
        )
    )


# ---------------------------------------------------------------------- at the floor

# the first failure at the floor is tried again after releasing everything, the second one after a
# wait
_TRIES = 2
_NAP = 0.25  # longest time between two looks at the memory while waiting, in seconds
# waiting can help when others hold at least 1/16 of the device: the driver and our own context
# count as others, too
_OTHERS = 16


def _wait_or_give_up(state: CallState, failure: Failure) -> None:
    """Returns when a piece that cannot be cut may be tried again, or raises what was asked for, what is free, who has the rest, and the ways out."""
    piece, verdict = failure.piece, failure.verdict
    # Counted for one piece: after the batch is replayed from its start other pieces commit first,
    # and that is no progress.
    state.failures_at_floor = state.failures_at_floor + 1 if state.floor_start == piece.start else 1
    state.floor_start = piece.start
    reading = state.context.monitor.latest()
    seen = reading if isinstance(reading, Headroom) else None
    exceeds_device = (
        seen is not None and verdict.requested is not None and verdict.requested > seen.total
    )
    if not exceeds_device:
        if state.failures_at_floor < _TRIES:
            return
        enough = max(1, verdict.requested or 0, seen.total // _OTHERS) if seen is not None else 0
        if seen is not None and seen.held_by_others >= enough and _wait(state, seen):
            return
    if _escalate(state, failure):
        return
    limits, escalate = state.context.settings.limits, state.context.settings.recovery.escalate
    used = f", not even with {' and '.join(escalate)}" if escalate and state.training else ""
    facts = reading.in_words()
    raise MicroBatchFloorError(
        f"a micro-batch of {len(piece)} (samples {piece.start}:{piece.stop}), the smallest "
        f"allowed, does not fit{used}. "
        f"It asked for {format_bytes(verdict.requested)}; "
        f"{facts}{'. The request is larger than the whole device' if exceeds_device else ''}. "
        f"Ways out: {'free what others hold; ' if seen is None or seen.held_by_others else ''}"
        f"{f'a lower min_micro_batch_size (now {limits.minimum}, align {limits.align}); ' if max(limits.minimum, limits.align) > 1 else ''}"
        f"smaller samples; {_ESCALATE if state.training and len(escalate) < 2 else ''}a smaller "
        f"optimizer state. The error was: {verdict.message}"
    )


_ESCALATE = 'recovery=RecoveryOptions(escalate=("offload", "checkpoint")), activation checkpointing in the end; '


def _escalate(state: CallState, failure: Failure) -> bool:
    """Goes on with the next of `escalate`, for this loss function from now on; False where none is left."""
    context, profile = state.context, state.profile
    left = context.settings.recovery.escalate[profile.escalated :] if state.training else ()
    if not left:
        return False
    profile.escalated += 1
    state.escalate()
    context.controller.needs_less(state.key)
    state.failures_at_floor = state.failures_in_row = 0
    context.log.emit(
        Escalated(
            context.settings.name, failure.piece.start, failure.piece.stop, left[0], str(state.key)
        )
    )
    return True


def _wait(state: CallState, seen: Headroom) -> bool:
    """Waits until there is more capacity than there was; returns whether there is.

    The waits of a call share one limit.
    """
    context = state.context
    if state.wait_left <= 0:
        return False
    context.log.emit(
        WaitingForMemory(
            context.settings.name,
            state.wait_left,
            seen.free,
            seen.held_by_others,
            describe(seen.holders),
        )
    )
    while state.wait_left > 0:
        nap = min(_NAP, state.wait_left)
        context.sleep(nap)
        state.wait_left -= nap
        now = context.headroom()
        if now is not None and now.capacity > seen.capacity:
            return True
    return False


# ---------------------------------------------------------------------- the end of a call by an error


def unwind(state: CallState, error: BaseException) -> None:
    """Puts back what a call has changed: gradients that were empty are emptied, buffers and random streams go back to its start.

    What cannot be put back is said in a note on the error. Can be repeated, after an error in the
    middle too.
    """
    with suppress(RuntimeError):  # the device can be lost
        state.loader.stop()
    if state.training:
        with suppress(RuntimeError):
            drain(state.context.ledger.leaves())
        drop_unrun()
        reset_half_made(state.context.settings.scaler)
    _unwind_gradients(state, error)
    _unwind_buffers(state, error)  # last: where the device is lost, this fails


def _unwind_buffers(state: CallState, error: BaseException) -> None:
    if state.streams is None:
        return
    state.context.streams.restore(state.streams)
    lost = state.context.buffers.restore(to_call_start=True)
    if lost is not None:
        _add_note(
            error,
            f"elastic_mbs: the buffer {lost} changed for the first time in this batch and could "
            "not be restored.",
        )


def _unwind_gradients(state: CallState, error: BaseException) -> None:
    leaves = state.context.ledger.leaves() if state.training else []
    isolation = state.isolation
    intact = {id(leaf) for leaf in leaves if isolation is not None and isolation.intact(leaf)}
    dirty = state.modified and not state.had_gradient <= intact
    if isolation is not None:
        isolation.rewind()
    state.isolation, state.modified = None, dirty  # as they are now, should this be repeated
    for leaf in leaves:
        if id(leaf) not in state.had_gradient:
            leaf.grad = None
    if dirty:
        _add_note(
            error,
            "elastic_mbs: gradients that were not empty when this batch began may hold a part of "
            "it: call zero_grad() before you go on. "
            "Gradients that were empty are empty again; buffers and random streams are as they "
            "were.",
        )
    if state.table is not None and "saved tensor hooks" in str(error):
        _add_note(
            error,
            "elastic_mbs: torch.func transforms inside the block need micro_batches(batch, "
            'own_graph=False), and no escalate="offload".',
        )


def call_on_fatal(state: CallState, error: BaseException) -> None:
    """Gives the user the chance to save, with everything restored."""
    try:
        on_fatal = state.context.settings.recovery.on_fatal
        if isinstance(error, RecoveryError) and on_fatal is not None:
            on_fatal(error)
    except Exception as problem:  # the error that is on its way must not be lost behind it
        error.add_note(f"elastic_mbs: on_fatal raised {type(problem).__name__}: {problem}")


def _add_note(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
