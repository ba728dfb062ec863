"""The other ranks of a job, as a call meets them. One process is the case of no other rank.

`elastic_mbs.distributed` has those that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

import torch

from elastic_mbs.batch.counts import Counts
from elastic_mbs.engine.outcome.result import StepResult


class Gradients(Protocol):
    """The gradients of one call on this rank: `elastic_mbs.engine.gradients.CallGradients`.

    Attributes:
        settled: it is known which leaves commit, each once in a backward, nothing has failed, and
            no leaf had a gradient when the call began.
    """

    settled: bool

    def leaves(self) -> list[torch.Tensor]:
        """Return every leaf that the call can have changed."""
        ...

    def put_aside(self, leaves: Iterable[torch.Tensor]) -> None:
        """Put the gradients that are there aside until the call ends."""
        ...

    def take_back(self) -> None:
        """Add the gradients of the call to the ones that were put aside."""
        ...


class Peers(Protocol):
    """The other ranks: what a training call and an optimizer's step ask of them.

    Attributes:
        alone: there is no other rank, so a batch has to have samples.
        in_step: pieces make collectives, so a failure on one rank is a failure on all of them.
        hooks: in place while a step function runs.
        about: what a run log says of this rank: "job", "rank" and "ranks"; empty for one process.
        speeds: samples per second of each rank in its last call, its own work alone, the same on
            every rank; 0 where it is not known yet. Empty for one process.
    """

    alone: bool
    in_step: bool
    about: Mapping[str, object]
    speeds: tuple[float, ...]
    hooks: tuple[AbstractContextManager[object], ...]

    def begin(self) -> None:
        """Begin a training call, before anything of it can fail."""
        ...

    def share(self, counts: Counts) -> Counts:
        """Return the counts of this rank's batch, as a part of all ranks' where pieces need it."""
        ...

    def before_piece(self) -> None:
        """Prepare for an attempt, which can fail here."""
        ...

    def before_backward(self, gradients: Gradients, *, last: bool) -> None:
        """Prepare for a backward of the call: the gradients are to be this call's alone.

        Args:
            gradients: of the call.
            last: no piece is to come after this one.
        """
        ...

    def after_backward(self, *, last: bool) -> None:
        """End a backward, or a piece without one; the attempt can fail here."""
        ...

    def undo(self) -> bool:
        """Undo a failed attempt; return whether this rank itself has run out of memory."""
        ...

    def meet(self, gradients: Gradients, result: StepResult) -> StepResult:
        """Make this rank's gradient and loss, which are whole, those of all ranks' samples."""
        ...

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that this one's call has ended by `error`; replace no error."""
        ...

    def end(self) -> None:
        """End a call that is done: what it needed of the other ranks can go. Can be repeated."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """Return a block of an evaluation or a rehearsal, beside the training calls."""
        ...

    def agree(self, error: BaseException | None) -> str:
        """Return why a rank could not make its optimizer's step, or "" if all have made it."""
        ...

    def leave(self, why: str) -> None:
        """Leave a note for those who wait for this rank. The first note stays."""
        ...


@contextmanager
def quiet(peers: Peers) -> Iterator[None]:
    """Keep the wrappers of a model quiet in a block, as they are while a step function runs."""
    with ExitStack() as stack:
        for hook in peers.hooks:
            stack.enter_context(hook)
        yield


class Alone:
    """The peers of a process that has none."""

    alone = True
    in_step = False
    about: Mapping[str, object] = {}
    speeds: tuple[float, ...] = ()

    def __init__(self, *hooks: AbstractContextManager[object]) -> None:
        self.hooks = hooks

    def begin(self) -> None:
        """Do nothing."""

    def share(self, counts: Counts) -> Counts:
        """Return the counts."""
        return counts

    def before_piece(self) -> None:
        """Do nothing."""

    def before_backward(self, gradients: Gradients, *, last: bool) -> None:
        """Do nothing."""

    def after_backward(self, *, last: bool) -> None:
        """Do nothing."""

    def undo(self) -> bool:
        """Return that it was this rank."""
        return True

    def meet(self, gradients: Gradients, result: StepResult) -> StepResult:
        """Return the result."""
        return result

    def failed(self, error: BaseException) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def beside(self) -> AbstractContextManager[None]:
        """Return a block in which nothing is different."""
        return nullcontext()

    def agree(self, error: BaseException | None) -> str:
        """Return that all have made the step."""
        return ""

    def leave(self, why: str) -> None:
        """Do nothing."""
