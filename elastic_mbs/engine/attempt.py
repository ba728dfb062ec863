"""An attempt at a piece of the batch, and the facts that are kept of a failed one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import Node

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import (
    Terms,
    check_graph,
    is_plain,
    lost_in,
    read_losses,
    weighted,
    without_void,
)
from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.outcome.result import Place, StoredOutput
from elastic_mbs.errors import LossError, UsageError
from elastic_mbs.escalation.largest import LargeTensor, Origin, Share
from elastic_mbs.memory.oom import Verdict


class Phase(Enum):
    """The phases of a call. The values are the words of `OutOfMemory.phase`.

                begin             backward             end
    WAITING ─────────► FORWARD ─────────► BACKWARD ───► COMMIT ───► WAITING … → DONE
     ▲    │               │                  │            │
     │    │ OOM           │ OOM              │ OOM        │ OOM     any other error → abort → DONE
     │    └───────────────┴────────┬─────────┴────────────┘
     └───────── recover ─────── FAILED

    A pass without gradients goes from FORWARD to WAITING. `engine/call.py` alone moves the phase.
    """

    WAITING = "load"  # between two attempts, or loading the next piece
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMIT = "commit"
    FAILED = "failed"  # an attempt ran out of memory and was not recovered from yet
    DONE = "done"

    @property
    def after_forward(self) -> bool:
        """True in the phases in which gradients can have changed."""
        return self in (Phase.BACKWARD, Phase.COMMIT)


class Attempt:
    """An attempt at a piece of the batch.

    Made for every piece, so it is cheap: an instance holds only the fields that differ from the
    defaults.

    Attributes:
        piece: the samples.
        data: the piece, in the batch's own container type; None once the attempt is over.
        graph: the tensor where backward begins; None where nothing in the piece counts.
        weight: the gradient that backward begins with, so that no operation of the graph has to
            multiply by it; None for 1.
        loss: the detached loss times the piece's weight.
        losses: the same of each loss, where losses have names.
        uncounted: detached losses that have no term in the piece.
        terms: the user's own losses, which the user's frame can still hold.
        outputs: the outputs to keep.
        callbacks: functions to run once the whole batch is accumulated.
    """

    data: Any = None
    graph: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    losses: Terms = {}  # noqa: RUF012  # is replaced, never changed
    uncounted: Terms = {}  # noqa: RUF012  # likewise
    terms: tuple[torch.Tensor, ...] = ()
    outputs: StoredOutput | None = None
    callbacks: tuple[Callable[[], object], ...] = ()

    def __init__(self, piece: Range, data: Any = None) -> None:
        self.piece = piece
        self.data = data

    def __len__(self) -> int:
        return self.piece.stop - self.piece.start

    @property
    def differentiable(self) -> bool:
        """True where a backward runs; without one, no loss with a graph counts in the piece."""
        return self.graph is not None and self.graph.requires_grad

    @property
    def root(self) -> Node | None:
        """The node where its graph begins. A property, because wrapping a node takes time."""
        return None if self.graph is None else self.graph.grad_fn

    def weigh(self, value: Any, counts: Counts, place: Place) -> None:
        """Take the loss that the user's step returned, with its weight in the batch.

        Args:
            value: the loss, alone or with outputs (see `MicroBatch.backward`).
            counts: the loss terms of the batch.
            place: the place where outputs that come with the loss are kept.
        """
        weights = self.piece.weights
        assert weights is not None
        if counts.names is None and is_plain(value) and not counts.void:
            weight = weights[None]
            if weight:
                self.terms = (value,)
                if weight == 1:
                    self.loss = value.detach().clone()  # the user can edit its own
                else:
                    self.weight = torch.full_like(value, weight)
                    self.loss = value.detach() * self.weight
                self.graph = value
                return
        terms, outputs = read_losses(value, counts.names)
        # Stored before backward: once a leaf has a commit, only backward itself should be able to
        # fail.
        if self.outputs is None:  # outputs given to `micro.keep` come first
            self.keep(outputs, place)
        if counts.void:
            weights = without_void(terms, weights, counts.void)
        own = tuple(terms.values())
        parts = weighted(terms, weights)
        self.uncounted = {name: terms[name].detach() for name in terms if name not in parts}
        if not parts:
            self.terms = own
            return
        check_graph(terms)
        first, *others = parts.values()
        loss = sum(others, first)
        self.terms = own
        self.loss = loss.detach()
        self.graph = loss
        if counts.names is not None:
            self.losses = {name: part.detach() for name, part in parts.items()}

    def keep(self, outputs: Any, place: Place) -> None:
        """Keep the outputs of the piece at `place`.

        Raises:
            UsageError: it has outputs already.
        """
        if outputs is None or place is None:
            return
        if self.outputs is not None:
            raise UsageError(
                "this micro-batch has outputs already: give all of them to one micro.keep(outputs)"
            )
        self.outputs = StoredOutput(outputs, place, len(self))

    def on_commit(self, fn: Callable[[], object]) -> None:
        """Add a function to run once the whole batch is accumulated."""
        self.callbacks += (fn,)

    def succeed(self) -> None:
        """Drop the graph and the data; loss and outputs stay."""
        self.data = self.graph = self.weight = None
        self.terms = ()

    def drop(self) -> None:
        """Drop everything but the piece: a variable of the user's can still hold this attempt."""
        self.__dict__ = {"piece": self.piece}


_UNCOUNTED = attrgetter("uncounted")


def check_nothing_lost(
    attempts: Iterable[Attempt], retry: Callable[[str, Callable[[], Any]], Any]
) -> None:
    """Refuse a loss that is not 0 although its piece has no term of it.

    Its share in the batch's mean is 0. NaN is 0/0, a mean over nothing. Only where there is such a
    loss it waits for the device.
    """
    for attempt in filter(_UNCOUNTED, attempts):
        for name, loss in attempt.uncounted.items():
            value, piece = retry("read a loss", partial(float, loss)), attempt.piece
            text = lost_in(name, value, f"samples {piece.start}:{piece.stop}")
            if text is not None:
                raise LossError(text)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt, as strings and numbers: no tensor of it is kept alive.

    Attributes:
        piece: the samples.
        phase: the phase in which it failed.
        verdict: the kind of the error.
        commits: how many commits it had made, as far as gradients show.
        unknown: the shape of a leaf with a gradient that the ledger does not know. Its commits
            cannot be counted.
        unwatched: its backward may have run others inside, which nobody looked at.
        edited: it has changed its piece of the batch in place.
        origin: the module and the line where it failed.
        largest: the largest tensors that it held, where it was looked at.
        share: the module with the most of what it held and asked for; None where it was not looked
            at, or no module had any.
    """

    piece: Range
    phase: Phase
    verdict: Verdict
    commits: int
    unknown: str | None
    unwatched: bool
    edited: bool
    origin: Origin
    largest: tuple[LargeTensor, ...]
    share: Share | None
