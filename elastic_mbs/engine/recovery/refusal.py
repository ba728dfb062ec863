"""The message of a `MicroBatchFloorError`: what was asked for, who holds the rest, the ways out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elastic_mbs.engine.attempt import Failure
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.events import format_bytes
from elastic_mbs.memory import Headroom, Reading
from elastic_mbs.options import RUNGS, Settings

_ESCALATE = (
    'recovery=RecoveryOptions(escalate="auto"), which computes logits in chunks, then '
    "checkpoints blocks, then runs position-wise modules in tiles, then offloads saved tensors; "
)
_COMPILED = (
    'the model without torch.compile, to which escalate= applies "logits", "checkpoint" and '
    '"tile", too; '
)


class Try(NamedTuple):
    """A way in which a piece did not fit."""

    steps: tuple[Step, ...]  # of `RecoveryOptions.escalate`, in use at that time
    needed: int | None  # bytes of this process, at least; None where that is not known


def needed_by(failure: Failure) -> int | None:
    """Return the bytes that a failed attempt needed at least; None where that is not known."""
    held, requested = failure.verdict.held, failure.verdict.requested
    return None if held is None or requested is None else held + requested


def has_room(seen: Headroom, failure: Failure) -> bool:
    """Return whether a reading after the failure shows room for all that the attempt had wanted."""
    requested = failure.verdict.requested
    if requested is None:
        return False
    held = failure.verdict.held
    return requested <= seen.free if held is None else held + requested <= seen.capacity


def refusal(
    failure: Failure,
    reading: Reading,
    settings: Settings,
    tries: Sequence[Try],
    *,
    training: bool,
    compiled: bool = False,
) -> str:
    """Return the message.

    Args:
        failure: the facts of the last attempt.
        reading: the memory after it.
        settings: the options of the runtime.
        tries: the ways in which the piece did not fit; the last one is that of `failure`.
        training: the pass runs backward, so `escalate` can help.
        compiled: a module runs through torch.compile, which leaves "offload" only.
    """
    piece, verdict = failure.piece, failure.verdict
    used = f", not even with {in_words(steps)}" if (steps := tries[-1].steps) else ""
    too_large = (
        isinstance(reading, Headroom)
        and verdict.requested is not None
        and verdict.requested > reading.total
    )
    sentences = [
        f"a micro-batch of {len(piece)} (samples {piece.start}:{piece.stop}), the smallest "
        f"allowed, does not fit{used}",
        _facts(failure, reading),
        *(["The request is larger than the whole device"] if too_large else []),
        *_largest(failure),
        *_needs(tries),
        f"Ways out: {_ways_out(reading, settings, training=training, compiled=compiled)}",
        f"The error was: {verdict.message}",
    ]
    return ". ".join(sentences)


def _facts(failure: Failure, reading: Reading) -> str:
    """Return what the attempt had and wanted, and what was there when it had let go of it."""
    asked = f"It asked for {format_bytes(failure.verdict.requested)}"
    if failure.verdict.held is not None:
        asked += f" on top of {format_bytes(failure.verdict.held)} that this process held"
    origin = failure.origin
    asked += f" ({origin if any(origin) else f'in {failure.phase.value}'})"
    if not isinstance(reading, Headroom):
        return f"{asked}; {reading.in_words()}"
    short = (
        ", enough for it: memory was short for a moment only, or is free in parts too small"
        if has_room(reading, failure)
        else ""
    )
    return f"{asked}; without the attempt {reading.in_words()}{short}"


def _largest(failure: Failure) -> list[str]:
    if not failure.largest:
        return []
    largest = f"The largest of its tensors: {'; '.join(map(str, failure.largest))}"
    if failure.share is None:
        return [largest]
    whose = "One sample" if len(failure.piece) == 1 else "The piece"
    return [largest, f"{whose} needs at least {failure.share}"]


def _needs(tries: Sequence[Try]) -> list[str]:
    """Return the bytes that each way needed at least."""
    known = [each for each in tries if each.needed is not None]
    if not known:
        return []
    needs = [
        f"{format_bytes(each.needed)}{f' with {in_words(each.steps)}' if each.steps else ''}"
        for each in known
    ]
    return [f"This process needs at least {', '.join(needs)}"]


def in_words(steps: Sequence[Step]) -> str:
    """Return the rungs in use, each with the last of its steps."""
    return " and ".join(map(str, {step.rung: step for step in steps}.values()))


def _ways_out(reading: Reading, settings: Settings, *, training: bool, compiled: bool) -> str:
    limits = settings.limits
    out = ""
    if not isinstance(reading, Headroom) or reading.held_by_others:
        out += "free what others hold; "
    if max(limits.minimum, limits.align) > 1:
        out += f"a lower min_micro_batch_size (now {limits.minimum}, align {limits.align}); "
    out += "smaller samples; "
    if training and len(settings.recovery.rungs) < len(RUNGS):
        out += _ESCALATE
    if training and compiled:
        out += _COMPILED
    return f"{out}a smaller optimizer state"
