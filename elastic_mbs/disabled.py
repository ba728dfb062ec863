"""The plain pass of a runtime that is not enabled."""

from __future__ import annotations

from typing import Any

import torch

from elastic_mbs.batch.loss_terms import read_losses, weighted_sum
from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.engine.outcome.result import StepResult
from elastic_mbs.options import Settings


class DisabledPass:
    """What `enabled=False` does: one plain pass over the whole batch, with nothing caught and nothing watched."""

    def __init__(
        self,
        settings: Settings,
        batch: Any,
        count_names: tuple[str, ...] | None,
        totals: Any,
        length: int,
    ) -> None:
        self.totals = totals
        self._settings = settings
        self._names = count_names
        self._attempt = Attempt(Range(0, length), batch)
        self.micro = MicroBatch(self, self._attempt)

    def begin(self, attempt: Attempt) -> None:
        """Nothing to prepare."""

    def check_inside(self, attempt: Attempt, what: str) -> None:
        """Nothing is lost here: the one pass is never over."""

    def end(self, attempt: Attempt, error: BaseException | None) -> bool:
        """Runs the callbacks; swallows nothing."""
        if error is None:
            for callback in attempt.callbacks:
                callback()
        return False

    def backward(self, attempt: Attempt, value: Any) -> None:
        """Runs backward on the loss as it is."""
        terms, outputs = read_losses(value, self._names)
        if attempt.outputs is None:
            self.keep(attempt, outputs)
        loss = weighted_sum(terms, dict.fromkeys(terms, 1.0))
        attempt.weigh(loss, 1.0, ())
        if self._settings.scaler is not None:
            loss = self._settings.scaler.scale(loss)
        torch.autograd.backward(
            loss
        ) if self._settings.gradients.backward is None else self._settings.gradients.backward(loss)

    def keep(self, attempt: Attempt, outputs: Any) -> None:
        """Keeps the outputs where the user wants them."""
        attempt.keep(outputs, self._settings.outputs)

    def result(self) -> StepResult:
        """The result of the one pass."""
        attempt, length = self._attempt, len(self._attempt)
        return StepResult(
            partition=((0, length),),
            micro_batch_size=length,
            _losses=() if attempt.loss is None else (attempt.loss,),
            _outputs=[] if attempt.outputs is None else [attempt.outputs],
        )
