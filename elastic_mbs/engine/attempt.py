"""An attempt at a piece of the batch, and the facts that are kept of a failed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.autograd.graph import Node

from elastic_mbs.batch.loss_terms import is_plain, read_losses, weighted_sum
from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.outcome.result import StoredOutput
from elastic_mbs.errors import UsageError
from elastic_mbs.memory.oom import Verdict
from elastic_mbs.options import OutputPlace


class Phase(Enum):
    """The phases of a call. The values are the words of `OutOfMemory.phase`.

                begin             backward             end
    WAITING ─────────► FORWARD ─────────► BACKWARD ───► COMMIT ───► WAITING … → WHOLE → DONE
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
    WHOLE = "whole"  # every piece has committed, and the user's callbacks run
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
        graph: the tensor where backward begins.
        loss: the detached loss times the piece's weight.
        terms: the user's own losses, which the user's frame can still hold.
        outputs: the outputs to keep.
        callbacks: functions to run once the whole batch is accumulated.
    """

    data: Any = None
    graph: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    terms: tuple[torch.Tensor, ...] = ()
    outputs: StoredOutput | None = None
    callbacks: tuple[Callable[[], object], ...] = ()

    def __init__(self, piece: Range, data: Any = None) -> None:
        self.piece = piece
        self.data = data

    def __len__(self) -> int:
        return self.piece.stop - self.piece.start

    @property
    def root(self) -> Node | None:
        """The node where its graph begins. A property, because wrapping a node takes time."""
        return None if self.graph is None else self.graph.grad_fn

    def load(self, data: Any) -> None:
        """Take the data of the piece."""
        self.data = data

    def weigh(self, value: Any, names: tuple[str, ...] | None, place: OutputPlace) -> float:
        """Take the loss that the user's step returned, and return its weight in the batch.

        Args:
            value: the loss, alone or with outputs (see `MicroBatch.backward`).
            names: the names of the losses, where there are several.
            place: the place where outputs that come with the loss are kept.
        """
        weights = self.piece.weights
        assert weights is not None  # or the piece would have been skipped
        if names is None and is_plain(value):
            weight = weights[None]
            self.take_loss(value, weight, (value,))
            return weight
        named, outputs = read_losses(value, names)
        # Stored before backward: once a leaf has a commit, only backward itself should be able to
        # fail.
        if self.outputs is None:  # outputs given to `micro.keep` come first
            self.keep(outputs, place)
        self.take_loss(weighted_sum(named, weights), 1.0, tuple(named.values()))
        return 1.0

    def take_loss(self, loss: torch.Tensor, weight: float, terms: tuple[torch.Tensor, ...]) -> None:
        """Take the scalar from which backward runs.

        Args:
            loss: the scalar.
            weight: the factor of the loss in the batch's loss.
            terms: the tensors that the user's step returned as losses.
        """
        self.terms = terms
        self.loss = loss.detach() * weight
        self.graph = loss

    def keep(self, outputs: Any, place: OutputPlace) -> None:
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
        self.outputs = StoredOutput(outputs, place)

    def on_commit(self, fn: Callable[[], object]) -> None:
        """Add a function to run once the whole batch is accumulated."""
        self.callbacks += (fn,)

    def succeed(self) -> None:
        """Drop the graph and the data; loss and outputs stay."""
        self.data = self.graph = None
        self.terms = ()

    def drop(self) -> None:
        """Drop everything but the piece: a variable of the user's can still hold this attempt."""
        self.__dict__ = {"piece": self.piece}


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
    """

    piece: Range
    phase: Phase
    verdict: Verdict
    commits: int
    unknown: str | None
    unwatched: bool
    edited: bool
