"""Rules that choose the replay of a failed attempt: pure functions of frozen facts.

PIECE       Run the failed piece again. It had no commits, so its state is put back and nothing of
            it is in a gradient.
ISOLATED    Run the failed piece again. The gradients were set aside, so its commits are dropped.
STEP        Drop all gradients of the call and run the batch from its start: the piece had commits,
            or it cannot be known which; or the streams at its start are unknown; or the pass is
            bound to the pieces of the one before.
REFUSED     End the call by an error: no replay is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial


class Mode(Enum):
    """The samples that are run again. The values are the words of `OutOfMemory.mode`.

    REFUSED has no event: it is raised.
    """

    PIECE = "piece"
    STEP = "step"
    ISOLATED = "isolate"
    REFUSED = "refused"


@dataclass(frozen=True)
class Facts:
    """The facts about a failed attempt and its call that decide the replay.

    Attributes:
        start: first sample of the piece.
        stop: one past its last.
        edited: the attempt had edited its samples in place.
        unknown: the shape of a leaf with a gradient that the ledger does not know, or None.
        unwatched: its backward may have run others inside, over leaves that nobody looked for.
        streams_lost: it is not known where the random streams stood at the piece's start.
        before_backward: it failed while loading or in its forward.
        synchronous: the error belongs to the operation that raised it.
        earlier_committed: earlier pieces have committed gradients.
        bound: the pass must run the same pieces as the one before.
        in_step: other ranks have run the same collectives, and start over.
        isolated: gradients were set aside for its backward.
        commits: how many commits it had made.
        had_gradient: a gradient was not empty when the call began.
        edited_earlier: an earlier piece of the call had edited its samples in place.
    """

    start: int
    stop: int
    edited: bool
    unknown: str | None
    unwatched: bool
    streams_lost: bool
    before_backward: bool
    synchronous: bool
    earlier_committed: bool
    bound: bool
    in_step: bool
    isolated: bool
    commits: int
    had_gradient: bool
    edited_earlier: bool


@dataclass(frozen=True)
class Replay:
    """The replay of a failed attempt, and why it is not a cheaper one."""

    mode: Mode
    reason: str = ""


_EDITED = (
    "samples {0.start}:{0.stop} were changed in place by loss_fn before memory ran out, so they "
    "cannot be run again as they were: work on a copy (x = x.clone()) inside loss_fn. From the "
    "next call on samples that are edited are copies, and this is recovered from"
)
_UNKNOWN_LEAF = (
    "a leaf of shape {0.unknown} outside the model appeared in the middle of the batch; it is not "
    "known whether the failed attempt reached its gradient. Give its module in model=[...] so "
    "that it is known from the start"
)

_PIECE = Replay(Mode.PIECE)
_ISOLATED = Replay(Mode.ISOLATED)
_step = partial(Replay, Mode.STEP)
_refused = partial(Replay, Mode.REFUSED)

_RULES: tuple[tuple[Callable[[Facts], object], Replay], ...] = (
    (lambda facts: facts.edited, _refused(_EDITED)),
    (lambda facts: facts.unknown, _refused(_UNKNOWN_LEAF)),
    (
        lambda facts: facts.streams_lost,
        _step("random numbers were drawn from streams that were not read at the piece's start"),
    ),
    (
        lambda facts: facts.before_backward and not facts.synchronous and facts.earlier_committed,
        _step("the error can belong to an earlier operation"),
    ),
    (
        lambda facts: facts.bound,
        _step("smaller pieces would not be those whose embeddings the loss has seen"),
    ),
    (lambda facts: facts.in_step, _step("all ranks start the batch over together")),
    (lambda facts: facts.before_backward, _PIECE),
    (
        lambda facts: not facts.synchronous,
        _step("the error can be asynchronous, so it is not known which gradients it reached"),
    ),
    (
        lambda facts: facts.unwatched,
        _step("a function written in Python came into the graph, and can have run a backward"),
    ),
    (lambda facts: facts.isolated, _ISOLATED),
    (lambda facts: facts.commits, _step("the piece had partly committed")),
    (lambda facts: True, _PIECE),
)
"""The first rule that applies decides."""


def choose_replay(facts: Facts) -> Replay:
    """Return the cheapest replay that is exact."""
    replay = next(replay for applies, replay in _RULES if applies(facts))
    if replay.mode is Mode.REFUSED:
        return _refused(replay.reason.format(facts))
    if replay.mode is Mode.STEP and (facts.had_gradient or facts.edited_earlier):
        return _refused(
            f"the batch has to be replayed from its start ({replay.reason}), but {_obstacle(facts)}"
        )
    return replay


def _obstacle(facts: Facts) -> str:
    if facts.had_gradient:
        return (
            ".grad was not empty when it began, so its part is not known: call zero_grad() before "
            "each batch"
        )
    return "loss_fn had edited earlier samples in place: work on a copy inside loss_fn"
