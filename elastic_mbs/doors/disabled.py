"""The calls of a runtime with `enabled=False`: plain passes, with nothing caught or watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.join import Pad
from elastic_mbs.batch.reader import BatchReader
from elastic_mbs.batch.schedule import Range
from elastic_mbs.doors.release import Release
from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.engine.outcome.result import Place, Stats, StepResult, of_batch, place_of
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
        self._outputs = resources.settings.outputs
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
        with self._running(self._whole(batch, self._outputs)) as whole, whole.micro as micro:
            micro.backward(loss_fn(micro.data, *args, **kwargs))
        return self._finish(whole)

    def backward_embeddings(
        self, embed_fn: Callable[[Any], Any], loss_fn: Callable[[Any], Any], batch: Any
    ) -> StepResult:
        """Run forward and backward of the whole batch, whose loss is one whatever `count` says."""
        whole = self._whole(batch, self._outputs, counted=False)
        with self._running(whole), whole.micro as micro:
            micro.backward(loss_fn(embed_fn(micro.data)))
        return self._finish(whole, per_sample=False)

    def micro_batches(self, batch: Any, name: str, *, own_graph: bool) -> Iterator[MicroBatch]:
        """Yield the whole batch as one micro-batch."""
        with self._running(self._whole(batch, self._outputs)) as whole:
            yield whole.micro
        self._finish(whole)

    def evaluate(self, fn: Callable[[Any], Any], batch: Any, outputs: OutputPlace, pad: Pad) -> Any:
        """Run `fn` on the whole batch without gradients: there is nothing to fill up."""
        whole = self._whole(batch, outputs, counted=False)
        with torch.no_grad():
            whole.keep(whole.attempt, fn(whole.attempt.data))
        return whole.result().outputs

    def optimizer_step(self, optimizer: Optimizer, closure: object) -> None:
        """Step the optimizer."""
        refuse_closure(closure)
        scaler = self._resources.settings.scaler
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)

    def release(self, *, gradients: bool) -> int:
        """Give memory that no phase needs back. See `ElasticMBS.release`."""
        release = Release(self._resources)
        self.last_result = release.outputs(self.last_result)
        if gradients:
            release.gradients()
        return release.finish()

    def _whole(self, batch: Any, outputs: OutputPlace, *, counted: bool = True) -> WholeBatch:
        given, batch = batch, self._resources.load(batch)
        counts = self._batches.whole(batch, counted=counted)
        cut = counts is not None
        counts = counts or self._batches.uncut(counted=counted)
        place = place_of(outputs, tensors_in(given), counts.n)
        return WholeBatch(self._resources.settings, batch, counts, place, cut=cut)

    @contextmanager
    def _running(self, whole: WholeBatch) -> Iterator[WholeBatch]:
        self.total = whole.totals
        try:
            yield whole
        finally:
            self.total = None

    def _finish(self, whole: WholeBatch, *, per_sample: bool = True) -> StepResult:
        self.last_result = whole.result(per_sample=per_sample)
        return self.last_result


class WholeBatch:
    """A batch that runs in one piece: the owner of its only micro-batch."""

    def __init__(
        self, settings: Settings, batch: Any, counts: Counts, place: Place, *, cut: bool
    ) -> None:
        """Make the piece.

        Args:
            settings: the options of the runtime.
            batch: the samples, on their device.
            counts: their loss terms.
            place: where outputs are kept.
            cut: the batch could be cut.
        """
        self.totals = counts.total if cut else 0
        self._settings = settings
        self._counts = counts
        self._place = place
        self._cut = cut
        weights = counts.weights(0, counts.n, settings.reduction)
        self.attempt = Attempt(Range(0, counts.n, weights), batch)
        self.micro = MicroBatch(self, self.attempt)

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
        attempt.weigh(value, self._counts, self._place)  # as 1: it is the whole batch
        loss = attempt.graph
        assert loss is not None  # a batch without a loss term is refused
        if self._settings.scaler is not None:
            loss = self._settings.scaler.scale(loss)
        backward = self._settings.gradients.backward
        if backward is None:
            torch.autograd.backward(loss)
        else:
            backward(loss)

    def keep(self, attempt: Attempt, outputs: Any) -> None:
        """Keep the outputs where the user wants them."""
        attempt.keep(outputs, self._place)

    def result(self, *, per_sample: bool = True) -> StepResult:
        """Return the result of the pass.

        Args:
            per_sample: its outputs are those of samples; else they come once for the batch.
        """
        attempt = self.attempt
        length = len(attempt)
        result = StepResult(
            partition=((0, length),),
            micro_batch_size=length,
            _losses=() if attempt.loss is None else (attempt.loss,),
            _named={
                name: [attempt.losses[name]] if name in attempt.losses else []
                for name in self._counts.names or ()
            },
            _outputs=[] if attempt.outputs is None else [attempt.outputs],
        )
        if per_sample and self._cut:
            return result
        return of_batch(result, result.loss, attempt.outputs)
