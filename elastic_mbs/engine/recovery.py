"""After a failed attempt: what may be replayed, from where, and how small.

`note_failure` runs while the exception is alive and keeps strings and numbers of it. `recover` runs later, when nothing of the attempt is alive any
more, and picks one of three ways back:

- piece: the failed piece is replayed. Leaves that had committed are left out (`backward(inputs=…)`), so that each gets every sample once.
- step: all gradients of the call are dropped and the batch is replayed from its start, because the piece had partly committed and a replay in halves
  would mix two masks or two batch statistics in one gradient, or because the marks cannot be trusted.
- isolate: gradients had been set aside, so that the failed piece left nothing behind.

What none of them makes exact is refused. Source: shared/reference/autograd.md and errors.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from elastic_mbs.batch.schedule import Range
from elastic_mbs.controller.partition import partition
from elastic_mbs.engine.context import Parts
from elastic_mbs.engine.floor import hold
from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.errors import MicroBatchFloorError, PoisonedDeviceError, RecoveryError, ReplayUnsafeError
from elastic_mbs.events import OutOfMemory
from elastic_mbs.memory import Headroom, oom
from elastic_mbs.memory.processes import describe
from elastic_mbs.rollback.gradients import separate
from elastic_mbs.rollback.graph import drain, drop_unrun, has_foreign_hook_after, walk
from elastic_mbs.rollback.random_streams import StreamState

if TYPE_CHECKING:
    from elastic_mbs.engine.call import Call

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """One failed attempt, as strings and numbers: nothing of it is kept alive.

    Attributes:
        piece: the samples that were attempted.
        phase: "load", "forward", "backward" or "commit".
        verdict: what sort of out-of-memory it was.
        fired: ids of the leaves that committed in this attempt.
        unknown: leaves with a gradient that the graph reaches but nobody watched; whether they committed cannot be told.
        normalises_batch: the attempt's graph normalises with statistics of the batch.
        surprising: it has custom functions that have never been through a clean backward, or committed to leaves in ways the graph does not show.
        shared: only the gradients tell what committed, and some are in one piece of memory, or a hook of the user's may have written to them.
        edited: the attempt changed its piece of the batch in place.
        streams: the random streams at its start; None where they were not read yet.
    """

    piece: Range
    phase: str
    verdict: oom.Verdict
    fired: frozenset[int]
    unknown: tuple[str, ...]
    normalises_batch: bool
    surprising: bool
    shared: bool
    edited: bool
    streams: StreamState | None


# ---------------------------------------------------------------------- while the exception is alive


def note_failure(call: Call, micro: MicroBatch, error: Exception) -> bool:
    """Notes what can be known of a failed attempt and lets go of its graph.

    Returns:
        Whether `error` is out-of-memory. If not, nothing was changed and it has to pass through.
    """
    parts = call.parts
    verdict = oom.classify(error, parts.settings.recovery.is_oom)
    if verdict is None:
        return False
    if verdict.kind is oom.Kind.MASKED and parts.guard is not None and parts.guard.explains(verdict.message):
        verdict = replace(verdict, kind=oom.Kind.HOST)
    if verdict.kind is oom.Kind.MASKED:
        if call.history.masked or not _splits(call, micro._piece, max(1, len(micro) // 2)):
            return False
        call.history.masked = True
        parts.log.warn_once(
            parts.settings.name,
            f"masked:{verdict.message}",
            f"this error is often a hidden out-of-memory; trying once with half the micro-batch: {verdict.message}",
        )
    if micro._phase == "forward" and call.training:
        call.refuse_touched()
    drain({leaf.device for leaf in parts.commits.leaves()})
    unknown: tuple[str, ...] = ()
    normalises_batch = surprising = shared = False
    committed: list[torch.Tensor] = []
    if micro._phase in ("backward", "commit"):
        committed = list(parts.commits.fired) if parts.commits.listening else call.gradients.moved()
        shared = not parts.commits.listening and (call.gradients.share_memory() or any(map(has_foreign_hook_after, parts.commits.leaves())))
    root = micro._root
    if root is not None:
        census = walk(root)
        unknown = tuple(str(tuple(leaf.shape)) for leaf in census.leaves if leaf.grad is not None and not parts.commits.watches(leaf))
        normalises_batch = census.normalises_batch
        marks = {id(leaf) for leaf in committed}
        surprising = len(marks) < len(committed) or not marks <= {id(leaf) for leaf in census.leaves} or not census.custom <= call.traits.custom
    call.failure = Failure(
        piece=micro._piece,
        phase=micro._phase,
        verdict=verdict,
        fired=call.history.mark(committed),
        unknown=unknown,
        normalises_batch=normalises_batch,
        surprising=surprising,
        shared=shared,
        edited=call.view.versions() != call.versions and not call.history.edited,
        streams=micro._streams,
    )
    parts.commits.clear()
    if call.table is not None:
        call.table.empty()
        for loss in micro._losses:
            if not loss._is_view():
                loss.detach_()  # the caller still holds it, and through it whatever checkpointing was recomputing
    micro._let_go()
    oom.forget(error)
    return True


# ---------------------------------------------------------------------- when it is gone


def recover(call: Call) -> None:
    """Undoes the failed attempt, shrinks, and puts what it owes back on the call's list.

    Raises:
        MicroBatchFloorError: the smallest micro-batch does not fit.
        ReplayUnsafeError: no replay would be exact.
        PoisonedDeviceError: the device cannot be trusted any more.
    """
    failure, call.failure = call.failure, None
    assert failure is not None
    history, parts = call.history, call.parts
    call.steady = False
    parts.inventory.thaw()
    if call.training:
        parts.commits.listen()
    if failure.phase == "backward":
        drop_unrun()
        _undo_half_made(parts.settings.scaler)
    history.failures += 1
    history.since_progress += 1
    _refuse_poisoned(call, failure)
    mode = _choose_mode(call, failure)
    _undo(call, failure, mode)
    size = parts.controller.out_of_memory(call.key, len(failure.piece), parts.capacity())
    splits = size is not None and _splits(call, failure.piece, size)
    oom.release(devices=parts.inventory.devices(), thorough=history.since_progress > 1 or not splits)
    parts.cache_is_stale = True
    parts.monitor.hurry()  # whoever took the memory may be gone again before the next reading is due
    if size is not None:
        call.size = size
    reading = parts.monitor.last()
    seen = reading if isinstance(reading, Headroom) else None
    parts.log.emit(
        OutOfMemory(
            parts.settings.name,
            phase=failure.phase,
            start=failure.piece.start,
            stop=failure.piece.stop,
            mode=mode,
            size_before=len(failure.piece),
            size_after=call.size,
            committed=len(failure.fired),
            kind=failure.verdict.kind.name.lower(),
            message=failure.verdict.message,
            key=str(call.key),
            requested=failure.verdict.requested,
            free=None if seen is None else seen.free,
            held_by_others=None if seen is None else seen.held_by_others,
            holders="" if seen is None else describe(seen.holders),
            reading_age=None if seen is None else max(0.0, time.monotonic() - seen.at),
            seconds_lost=None if parts.telemetry is None else parts.telemetry.failed(mode),
        )
    )
    if not splits:
        hold(parts, history, failure.piece, failure.verdict)
    cap = 16 + 4 * call.view.length.bit_length()
    if history.since_progress > cap or history.restarts > cap:
        raise MicroBatchFloorError(
            f"gave up after {history.failures} out-of-memory errors in one batch of {call.view.length} samples: {failure.verdict.message}"
        )


def _splits(call: Call, piece: Range, size: int) -> bool:
    settings = call.parts.settings
    return len(partition(piece.start, piece.stop, size, minimum=settings.limits.minimum, align=settings.limits.align)) > 1


def _refuse_poisoned(call: Call, failure: Failure) -> None:
    reason = failure.verdict.message if failure.verdict.kind is oom.Kind.POISONED else None
    if reason is None and not failure.verdict.trustworthy:
        answers = [answer for device in call.parts.inventory.devices() if (answer := oom.probe(device)) is not None]
        reason = answers[0] if answers else None
    if reason is not None:
        raise PoisonedDeviceError(
            f"the device or its allocator cannot be trusted after this error; save what you need and restart the process: {reason}"
        )


def _choose_mode(call: Call, failure: Failure) -> str:
    if failure.edited:
        raise ReplayUnsafeError(
            f"samples {failure.piece.start}:{failure.piece.stop} were changed in place by loss_fn before memory ran out, so they cannot be run again "
            "as they were: work on a copy (x = x.clone()) inside loss_fn. From the next call on pieces are copies, and this is recovered from"
        )
    if failure.unknown:
        raise ReplayUnsafeError(
            f"a leaf of shape {failure.unknown[0]} outside the model appeared in the middle of the batch; whether the failed attempt reached its "
            "gradient cannot be told. Give its module in model=[...] so that it is watched from the start"
        )
    why = _why_from_the_start(call, failure)
    if why is None:
        return "isolate" if call.isolation is not None and failure.phase in ("backward", "commit") else "piece"
    if call.filled:
        raise ReplayUnsafeError(
            f"the batch has to be replayed from its start ({why}), and .grad was not empty when it began, so its part cannot be told apart: "
            "call zero_grad() before each batch, or use recovery=RecoveryOptions(replay='isolate')"
        )
    if call.history.edited:
        raise ReplayUnsafeError(
            f"the batch has to be replayed from its start ({why}), but loss_fn had edited earlier samples in place: work on a copy inside loss_fn"
        )
    return "step"


def _why_from_the_start(call: Call, failure: Failure) -> str | None:
    """Why replaying the piece alone would not be exact, or None."""
    parts, traits = call.parts, call.traits
    if (
        call.stream_start is not None
        and failure.streams is not None
        and failure.streams.hosts is None
        and parts.streams.hosts_moved(call.stream_start)
    ):
        return "random numbers were drawn on the host, whose state at the piece's start was not kept"
    if failure.phase in ("load", "forward"):
        asynchronous = call.training and not failure.verdict.trustworthy and len(call.committed) and call.isolation is None
        return "the error may belong to an earlier operation" if asynchronous else None
    if call.isolation is not None:
        return None
    if not failure.verdict.trustworthy:
        return "the error may be asynchronous, so which gradients it reached cannot be told"
    if failure.verdict.kind is oom.Kind.HEAP:
        return "Python itself had no memory, so a commit may not have been noted"
    if not traits.clean:
        return "no backward of this loss function has succeeded yet"
    if failure.surprising:
        return "its backward ran another one inside, so what it reached cannot be told"
    if not failure.fired:
        return None
    if failure.shared:
        return "gradients share memory or have new hooks, so which of them it reached cannot be told"
    if parts.settings.gradients.backward is not None:
        return "backward= gives no way to leave out the leaves that had committed"
    if traits.normalises_batch or failure.normalises_batch or parts.buffers.changed():
        return "the piece had partly committed and depends on who is in it"
    if failure.streams is not None and streams_moved(parts, failure.streams):
        return "the piece had partly committed and drew random numbers"
    return None


def _undo(call: Call, failure: Failure, mode: str) -> None:
    """Takes the attempt out of gradients, buffers and random streams, and lists what has to be run again."""
    parts, history = call.parts, call.history
    if call.isolation is not None:
        call.isolation.discard()
    if mode == "step":
        history.restarts += 1
        history.replayed_samples += call.committed.samples + len(failure.piece)
        if call.isolation is not None:
            call.isolation.rewind()
            call.isolation = None
        for leaf in parts.commits.leaves() if call.training else ():  # an evaluation has added nothing to what may be there
            leaf.grad = None
        call.restart()
    else:
        history.replayed_samples += len(failure.piece)
        committed = failure.piece.committed if mode == "isolate" else failure.piece.committed | failure.fired
        call.schedule.push(Range(failure.piece.start, failure.piece.stop, committed))
        separate_gradients(call)
        call.remember_gradients()
    if call.stream_start is not None:
        to_start = mode == "step"
        streams = call.stream_start if to_start else failure.streams
        if streams is not None:  # else nothing of the piece has run
            parts.streams.restore(streams)
        lost = parts.buffers.restore(to_call_start=to_start)
        if lost is not None:
            raise ReplayUnsafeError(
                f"the buffer {lost} changed for the first time in this batch, so its earlier value was not kept; from the next batch on it is. "
                "Load the last checkpoint, or set the buffer, before going on"
            )


def _undo_half_made(scaler: torch.amp.GradScaler | None) -> None:
    """A GradScaler makes two tensors when it is first used. Where there was room for the first only, it would never make the other."""
    if getattr(scaler, "_scale", None) is not None and getattr(scaler, "_growth_tracker", scaler) is None:
        scaler._scale = None  # type: ignore[union-attr]  # there is one


def retrying(parts: Parts, what: str, operation: Callable[[], T]) -> T:
    """Runs bookkeeping that can itself run out of memory and can be called again, letting go of more each time.

    Args:
        parts: the runtime's parts.
        what: what there is no room for, for the error.
        operation: done once it returns; after an error in the middle a second call goes on where the first one stopped.

    Raises:
        MicroBatchFloorError: it still ran out.
    """
    message = ""
    for attempt in range(3):
        try:
            return operation()
        except Exception as error:
            verdict = oom.classify(error, parts.settings.recovery.is_oom)
            if verdict is None:
                raise
            message = verdict.message
        oom.release(devices=parts.inventory.devices(), thorough=attempt > 0)
    raise MicroBatchFloorError(f"there is no room to {what}: {message}")


def separate_gradients(call: Call) -> None:
    """Separates what this call has made. Gradients that were there when it began are the user's, and so is where they lie."""
    made = [leaf for leaf in call.parts.commits.leaves() if id(leaf) not in call.filled]
    retrying(call.parts, "give each gradient memory of its own", lambda: separate(made))


def streams_moved(parts: Parts, since: StreamState) -> bool:
    """Whether any random stream has moved; where memory is short, after letting go: a state of torch's takes 5 KiB of the host's."""
    return retrying(parts, "read the random streams", lambda: parts.streams.moved(since))


def unwind(call: Call, error: BaseException) -> None:
    """Ends a call by `error`: buffers and random streams go back to its start, and gradients that were empty then are emptied.

    What cannot be put back is said in a note on the error, which otherwise passes unchanged.
    """
    parts = call.parts
    if call.training:
        drop_unrun()
        _undo_half_made(parts.settings.scaler)
    if call.stream_start is not None:
        try:
            parts.streams.restore(call.stream_start)
            lost = parts.buffers.restore(to_call_start=True)
        except Exception as trouble:  # a lost device: the error that is on its way says more
            lost, trouble_text = "(all)", f"{type(trouble).__name__}: {trouble}"
            error.add_note(f"elastic_mbs: buffers could not be restored: {trouble_text}")
        else:
            if lost is not None:
                error.add_note(f"elastic_mbs: the buffer {lost} changed for the first time in this batch and could not be restored.")
    call.gradients.forget()  # they can go before `on_fatal` needs memory
    leaves = parts.commits.leaves() if call.training else []
    intact = {id(leaf) for leaf in leaves if call.isolation is not None and call.isolation.intact(leaf)}
    if call.isolation is not None:
        call.isolation.rewind()
    for leaf in leaves:
        if id(leaf) not in call.filled:
            leaf.grad = None
    if call.history.touched and not call.filled <= intact:
        error.add_note(
            "elastic_mbs: gradients that were not empty when this batch began may hold a part of it: call zero_grad() before you go on. "
            "Gradients that were empty are empty again; buffers and random streams are as they were."
        )
    if call.table is not None and "saved tensor hooks" in str(error):
        error.add_note("elastic_mbs: torch.func transforms inside the block need micro_batches(batch, own_graph=False).")
    if isinstance(error, RecoveryError) and parts.settings.recovery.on_fatal is not None:
        try:
            parts.settings.recovery.on_fatal(error)
        except Exception as trouble:  # the error that is on its way must not be lost behind it
            error.add_note(f"elastic_mbs: on_fatal raised {type(trouble).__name__}: {trouble}")
