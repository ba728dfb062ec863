"""The unwinding of a call that ends by an error: its state is put back, and others are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.engine.parts import CallParts
from elastic_mbs.errors import ElasticMBSError, IncompleteBatchError, RecoveryError

_NAMED = 8  # samples in a note


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


def run_callbacks(callbacks: Iterable[Callable[[], object]]) -> None:
    """Run the user's functions once a batch is done: their errors undo nothing."""
    try:
        for callback in callbacks:
            callback()
    except BaseException as error:
        note_done(error)
        raise


def note_done(error: BaseException) -> None:
    """Note on an error of a callback or a sink that the batch was done before it."""
    _add_note(
        error,
        "elastic_mbs: this was raised after the batch was done, so its gradient is whole (in a job "
        "on every rank): step, or call zero_grad() before the batch runs again.",
    )


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
