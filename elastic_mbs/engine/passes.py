"""The passes that a call makes over its batch: one, or two for a loss over embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from elastic_mbs.batch.join import Pad
from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.engine.outcome.result import Place, StepResult


@dataclass(frozen=True)
class Pass:
    """A pass over the batch.

    Attributes:
        training: its pieces run backward; else their outputs are kept.
        outputs: the place where outputs are kept.
        pad: fills up outputs whose width differs from piece to piece.
        bound: its pieces must stay the pieces of the pass before.
        adds_up: the losses of its pieces add up to the loss of the batch.
    """

    training: bool
    outputs: Place
    pad: Pad = None
    bound: bool = False
    adds_up: bool = True


class Passes(Protocol):
    """The passes of one call, in their order."""

    @property
    def first(self) -> Pass:
        """The pass that the call begins with."""
        ...

    def begin(self) -> None:
        """Prepare for the first pass."""
        ...

    def translate(self, attempt: Attempt, value: Any) -> Any:
        """Return the loss, or the outputs, that a piece's value stands for."""
        ...

    def after(self, ended: Pass) -> Pass | None:
        """Return the pass that follows one whose pieces have all committed; None after the last."""
        ...

    def restarted(self, failed: Pass) -> Pass:
        """Return the pass that the batch starts over with."""
        ...

    def finish(self, result: StepResult) -> StepResult:
        """Return the result of the whole call, given that of its last pass."""
        ...

    def close(self) -> None:
        """Drop everything: the call has ended."""
        ...


class OnePass:
    """The single pass of a training call or of an evaluation."""

    def __init__(self, *, training: bool, outputs: Place, pad: Pad) -> None:
        self.first = Pass(training, outputs, pad)

    def begin(self) -> None:
        """Do nothing."""

    def translate(self, attempt: Attempt, value: Any) -> Any:
        """Return the value itself."""
        return value

    def after(self, ended: Pass) -> Pass | None:
        """Return None: there is no other pass."""
        return None

    def restarted(self, failed: Pass) -> Pass:
        """Return the pass itself."""
        return failed

    def finish(self, result: StepResult) -> StepResult:
        """Return the result of the pass."""
        return result

    def close(self) -> None:
        """Do nothing."""
