"""The calls of a runtime with `enabled=False`: plain passes, with nothing caught or watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from elastic_mbs.batch.loss_terms import read_losses, weighted_sum
from elastic_mbs.batch.reader import BatchReader
from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.engine.outcome.result import Stats, StepResult, StoredOutput
from elastic_mbs.engine.shared.knowledge import Knowledge
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.optimizer.guarded_step import refuse_closure
from elastic_mbs.options import OutputPlace, Settings


class DisabledCalls:
    """Plain passes in place of calls. The methods are those of `elastic_mbs.doors.calls.Calls`.

    Attributes:
        last_result: result of the latest training pass.
        stats: stay at zero.
        history: stays empty.
        total: the counts of the batch that is running; None between passes.
    """

    def __init__(
        self,
        resources: Resources,
        knowledge: Knowledge,
        batches: BatchReader,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self.last_result: StepResult | None = None
        self.stats = Stats()
        self.history: tuple[tuple[int, int], ...] = ()
        self.total: Any = None
        self._resources = resources
        self._batches = batches

    def open(self) -> None:
        """Do nothing: nothing is watched."""

    def leave(self, error: BaseException | None) -> None:
        """Do nothing: nothing is left unfinished."""

    def close(self) -> None:
        """Close what sinks have opened, for the warnings of `verify` and `plan`."""
        self._resources.log.close()

    def check_complete(self) -> None:
        """Do nothing: a pass cannot be incomplete."""

    def backward(
        self,
        loss_fn: Callable[..., Any],
        batch: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> StepResult:
        """Run forward and backward of the whole batch."""
        with self._running(self._whole(batch)) as whole, whole.micro as micro:
            micro.backward(loss_fn(micro.data, *args, **kwargs))
        return self._finish(whole)

    def backward_embeddings(
        self, embed_fn: Callable[[Any], Any], loss_fn: Callable[[Any], Any], batch: Any
    ) -> StepResult:
        """Run forward and backward of the whole batch, whose loss is one whatever `count` says."""
        with self._running(self._whole(batch, counted=False)) as whole, whole.micro as micro:
            micro.backward(loss_fn(embed_fn(micro.data)))
        return self._finish(whole)

    def micro_batches(self, batch: Any, name: str, *, own_graph: bool) -> Iterator[MicroBatch]:
        """Yield the whole batch as one micro-batch."""
        with self._running(self._whole(batch)) as whole:
            yield whole.micro
        self._finish(whole)

    def evaluate(self, fn: Callable[[Any], Any], batch: Any, outputs: OutputPlace) -> Any:
        """Run `fn` on the whole batch without gradients."""
        with torch.no_grad():
            found = fn(self._resources.load(batch))
        return None if found is None else StoredOutput(found, outputs).get()

    def optimizer_step(self, optimizer: Optimizer, closure: object) -> None:
        """Step the optimizer."""
        refuse_closure(closure)
        scaler = self._resources.settings.scaler
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)

    def _whole(self, batch: Any, *, counted: bool = True) -> WholeBatch:
        batch = self._resources.load(batch)
        totals, length = self._batches.totals(batch)
        names = self._batches.count_names if counted else None
        return WholeBatch(self._resources.settings, batch, names, totals, length)

    @contextmanager
    def _running(self, whole: WholeBatch) -> Iterator[WholeBatch]:
        self.total = whole.totals
        try:
            yield whole
        finally:
            self.total = None

    def _finish(self, whole: WholeBatch) -> StepResult:
        self.last_result = whole.result()
        return self.last_result


class WholeBatch:
    """A batch that runs in one piece: the owner of its only micro-batch."""

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
        """Do nothing: no attempt is prepared."""

    def check_inside(self, attempt: Attempt, what: str) -> None:
        """Do nothing: the one attempt is never over, so nothing can come too late."""

    def end(self, attempt: Attempt, error: BaseException | None) -> bool:
        """Run the callbacks, and swallow no error."""
        if error is None:
            for callback in attempt.callbacks:
                callback()
        return False

    def backward(self, attempt: Attempt, value: Any) -> None:
        """Run backward on the loss as it is."""
        terms, outputs = read_losses(value, self._names)
        if attempt.outputs is None:
            self.keep(attempt, outputs)
        loss = weighted_sum(terms, dict.fromkeys(terms, 1.0))
        attempt.take_loss(loss, 1.0, ())
        if self._settings.scaler is not None:
            loss = self._settings.scaler.scale(loss)
        backward = self._settings.gradients.backward
        if backward is None:
            torch.autograd.backward(loss)
        else:
            backward(loss)

    def keep(self, attempt: Attempt, outputs: Any) -> None:
        """Keep the outputs where the user wants them."""
        attempt.keep(outputs, self._settings.outputs)

    def result(self) -> StepResult:
        """Return the result of the pass."""
        attempt = self._attempt
        length = len(attempt)
        return StepResult(
            partition=((0, length),),
            micro_batch_size=length,
            _losses=() if attempt.loss is None else (attempt.loss,),
            _outputs=[] if attempt.outputs is None else [attempt.outputs],
        )
