"""What `enabled=False` does: one plain pass over the whole batch, with nothing caught and nothing watched."""

from __future__ import annotations

from typing import Any

import torch

from elastic_mbs.batch.loss_terms import read_losses, weighted_sum
from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.micro_batch import MicroBatch, Totals
from elastic_mbs.engine.result import StepResult, StoredOutput
from elastic_mbs.options import Settings


class WholeBatch:
    """The engine of a single micro-batch that is the batch."""

    def __init__(self, settings: Settings, batch: Any, count_names: tuple[str, ...] | None, totals: Totals, length: int) -> None:
        self.totals: Totals = totals
        self._settings = settings
        self._names = count_names
        self._length = length
        self._loss: torch.Tensor | None = None
        self.micro = MicroBatch(self, Range(0, length), None, batch)

    def enter(self, micro: MicroBatch) -> None:
        """Nothing to prepare."""

    def leave(self, micro: MicroBatch, error: BaseException | None) -> bool:
        """Runs the callbacks; swallows nothing."""
        if error is None:
            for callback in micro._callbacks or ():
                callback()
        return False

    def backward(self, micro: MicroBatch, value: Any) -> None:
        """Runs backward on the loss as it is."""
        terms, outputs = read_losses(value, self._names)
        self.store(micro, outputs)
        loss = weighted_sum(terms, dict.fromkeys(terms, 1.0))
        self._loss = loss.detach()
        if self._settings.scaler is not None:
            loss = self._settings.scaler.scale(loss)
        if self._settings.gradients.backward is not None:
            self._settings.gradients.backward(loss)
        else:
            loss.backward()

    def store(self, micro: MicroBatch, outputs: Any) -> None:
        """Keeps the outputs where the user wants them."""
        if outputs is not None and self._settings.outputs is not None:
            micro._stored = StoredOutput(outputs, self._settings.outputs)

    def result(self) -> StepResult:
        """The result of the one pass."""
        stored = self.micro._stored
        return StepResult(
            partition=((0, self._length),),
            micro_batch_size=self._length,
            _losses=() if self._loss is None else (self._loss,),
            _outputs=[] if stored is None else [stored],
        )
