"""The calls of one runtime, one after the other: how each is started, and what is kept of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.optim import Optimizer

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.join import Pad
from elastic_mbs.batch.reader import BatchReader
from elastic_mbs.batch.view import BatchView
from elastic_mbs.doors.release import Release
from elastic_mbs.engine.call import Call, PassesOf
from elastic_mbs.engine.gradients import CallGradients
from elastic_mbs.engine.micro_batch import MicroBatch, loop
from elastic_mbs.engine.outcome.result import Stats, StepResult, add_to, place_of, stored_bytes
from elastic_mbs.engine.parts import Batch, CallParts
from elastic_mbs.engine.passes import OnePass
from elastic_mbs.engine.recovery.unwinding import note_done
from elastic_mbs.engine.shared.companions import caller
from elastic_mbs.engine.shared.knowledge import Knowledge, LossProfile, names_of
from elastic_mbs.engine.shared.peers import Peers
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.shared.running import check_outer, check_step, running_call
from elastic_mbs.engine.two_pass.passes import TwoPasses, Unweighted
from elastic_mbs.errors import IncompleteBatchError, UnsupportedError, UsageError
from elastic_mbs.events import format_bytes
from elastic_mbs.memory import oom
from elastic_mbs.optimizer.guarded_step import GuardedStep
from elastic_mbs.optimizer.in_place import guards_of
from elastic_mbs.optimizer.unfinished import StepWatch
from elastic_mbs.options import OutputPlace
from elastic_mbs.rehearsal.first_split import FirstSplit

# bytes of a batch's outputs that are worth a warning: few want the logits of a whole batch, or a
# decoder's cache
MUCH = 2**30


def _all(*values: Any) -> tuple[Any, ...]:
    return values


KEPT = 500  # calls in the history


class Calls:
    """The calls of one runtime. `elastic_mbs.doors.disabled.DisabledCalls` has the same methods.

    Attributes:
        last_result: result of the latest training call.
        stats: totals over all calls.
        history: size at the end and out-of-memory errors of each of the last training calls.
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
        self.history: deque[tuple[int, int]] = deque(maxlen=KEPT)
        # Weak, because a call holds its batch. `running` keeps a call that has not ended.
        self._current: ReferenceType[Call] | None = None
        self._resources = resources
        self._knowledge = knowledge
        self._batches = batches
        self._first_split = FirstSplit(resources, batches)
        self._steps = StepWatch()
        self._guarded_step = GuardedStep(resources)
        self._guards = guards_of(optimizers, self.optimizer_step)
        for guard in self._guards:
            guard.put()

    @property
    def current(self) -> Call | None:
        """The call that runs, or that a loop has left early."""
        return None if self._current is None else self._current()

    # ------------------------------------------------------------------ lifetime

    def open(self) -> None:
        """Start the memory monitor, follow the optimizers' steps, and guard those given."""
        self._resources.monitor.start()
        self._steps.start()
        for guard in self._guards:
            guard.put()

    def leave(self, error: BaseException | None) -> None:
        """Check for unfinished work at the end of a `with` block, which ends by `error` or None."""
        if error is None:
            self.check_complete()
            return
        self._resources.peers.leave(f"{type(error).__name__}: {error}")
        is_oom = self._resources.settings.recovery.is_oom
        if isinstance(error, Exception) and oom.classify(error, is_oom) is not None:
            left = self._steps.left_behind()
            if left is not None:
                error.add_note(f"elastic_mbs: {left}.")

    def close(self) -> None:
        """End an unfinished batch, stop all watching, and write out what sinks hold."""
        call = self.current
        if call is not None and not call.finished:
            call.abort(IncompleteBatchError("closed in the middle of a batch"))
        resources = self._resources
        resources.peers.leave("its ElasticMBS was closed")
        resources.monitor.stop()
        self._steps.stop()
        for guard in self._guards:
            guard.take_off()
        if resources.guard is not None:
            resources.guard.lift()
        try:
            if resources.telemetry is not None:
                resources.telemetry.rest()
        finally:  # a user's sink may raise
            resources.log.close()

    def check_complete(self) -> None:
        """Raise an `IncompleteBatchError` for a loop that was left early."""
        call = self.current
        if call is not None and not call.finished and not call.inside:
            call.leave_early()

    @property
    def total(self) -> Any:
        """The counts of the batch that is running; None between calls."""
        call = self.current
        return self._first_split.total if call is None or call.finished else call.totals

    # ------------------------------------------------------------------ the doors

    def backward(
        self,
        loss_fn: Callable[..., Any],
        batch: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> StepResult:
        """Run `loss_fn` on every piece. See `ElasticMBS.backward`."""
        if batch is None and not self._resources.peers.alone:
            return self._without_samples()
        name, identity = names_of(loss_fn)
        sources = partial(_all, loss_fn, args, kwargs)
        with self._beginning() as peers:
            view, counts = self._read(batch, name, (args, kwargs))
            work = Batch(view, peers.share(counts), name, identity, sources=sources)
            call = self._begin(work)
        try:
            with call:
                call.run(loss_fn, args, kwargs)
            result = self._finish(call)
            alone = not peers.in_step  # the comparison runs on one rank
            if alone and not call.parts.profile.compared and len(result.partition) > 1:
                self._check_split(call.parts, partial(_on_piece, loss_fn, args, kwargs))
            return result
        finally:
            peers.end()

    def _check_split(self, parts: CallParts, loss_fn: Callable[[Any], Any]) -> None:
        """Compare whole and pieces; empty the gradients of a call whose loss is refused."""
        try:
            self._first_split(parts, loss_fn)
        except UsageError as error:
            parts.gradients.unwind()
            if parts.gradients.full:
                error.add_note(
                    "elastic_mbs: gradients that were not empty when this batch began hold a part "
                    "of it: call zero_grad() before you go on."
                )
            raise

    def backward_embeddings(
        self, embed_fn: Callable[[Any], Any], loss_fn: Callable[[Any], Any], batch: Any
    ) -> StepResult:
        """Run `embed_fn` on every piece, twice. See `ElasticMBS.backward_embeddings`."""
        if not self._resources.peers.alone:
            raise UnsupportedError(
                "backward_embeddings compares the samples of one rank, and those of the other "
                "ranks are not gathered: not supported with DistributedDataParallel and "
                "fully_shard"
            )
        self._check_free(training=True)
        name, identity = names_of(embed_fn)
        view, _ = self._read(batch, name, counted=False)
        counts = Unweighted.samples(view.length)
        key, sources = (identity, names_of(loss_fn)[1]), partial(_all, embed_fn, loss_fn)
        work = Batch(view, counts, name, key, sources=sources)
        passes: list[TwoPasses] = []

        def made(parts: CallParts) -> TwoPasses:
            passes.append(TwoPasses(parts, loss_fn))
            return passes[0]

        call = self._make(work, made)
        with call:
            call.run(passes[0].embed(embed_fn))
        return self._finish(call)

    def micro_batches(self, batch: Any, name: str, *, own_graph: bool) -> Iterator[MicroBatch]:
        """Return the loop over the pieces. See `ElasticMBS.micro_batches`."""
        if batch is None and not self._resources.peers.alone:
            self._without_samples()
            return iter(())
        with self._beginning() as peers:
            view, counts = self._read(batch, name)
            counts = peers.share(counts)
            work = Batch(view, counts, name, name, own_graph=own_graph, sources=caller)
            call = self._begin(work)
        return loop(call, self._finish_loop)

    def evaluate(self, fn: Callable[[Any], Any], batch: Any, outputs: OutputPlace, pad: Pad) -> Any:
        """Run `fn` on every piece and join its outputs. See `ElasticMBS.evaluate`."""
        self._check_free(training=False)
        name, identity = names_of(fn)
        with self._resources.peers.beside():
            view, counts = self._read(batch, name, counted=False)
            work = Batch(view, counts, name, identity, training=False, sources=partial(_all, fn))
            call = self._begin(work, outputs, pad)
            with call, torch.no_grad():
                call.run(fn)
            return self._finish(call).outputs

    def optimizer_step(self, optimizer: Optimizer, closure: object = None) -> None:
        """Step the optimizer, or leave it as it was. See `ElasticMBS.optimizer_step`."""
        self.check_complete()
        if (call := running_call()) is not None:
            check_step(call, optimizer, type(optimizer).__name__)
        self._warn_of_half_a_step()
        try:
            self._guarded_step(optimizer, closure)
        finally:
            self._steps.begun = None  # it has answered for its step

    def _warn_of_half_a_step(self) -> None:
        """Warn of an optimizer whose plain step has begun and not ended."""
        if self._steps.begun and (left := self._steps.left_behind()) is not None:
            self._resources.warn("optimizer-step", left, once=False)

    def release(self, *, gradients: bool) -> int:
        """Give memory that no phase needs back. See `ElasticMBS.release`."""
        self.check_complete()
        release = Release(self._resources)
        self.last_result = release.outputs(self.last_result)
        if gradients:
            release.gradients()
        freed = release.finish()
        self._knowledge.controller.released()
        return freed

    # ------------------------------------------------------------------ how a call starts and ends

    def _check_free(self, *, training: bool) -> None:
        """End a loop that was left early, and refuse a call inside the step of another one."""
        self.check_complete()
        check_outer(self._resources, training=training)

    @contextmanager
    def _beginning(self) -> Iterator[Peers]:
        """Begin a training call: an error in this block ends it on the other ranks, too."""
        self._check_free(training=True)
        peers = self._resources.peers
        try:
            peers.begin()
            yield peers
        except BaseException as error:
            peers.failed(error)
            raise

    def _without_samples(self) -> StepResult:
        """Take part in a batch of which other ranks have all samples."""
        resources = self._resources
        with self._beginning() as peers:
            resources.wake()
            resources.refresh_model()
            gradients = CallGradients(resources, LossProfile(), training=True)
            try:
                peers.share(self._batches.nothing())
                result = peers.meet(gradients, StepResult(partition=(), micro_batch_size=0))
            except BaseException:
                gradients.unwind()
                raise
            finally:
                gradients.close()
                peers.end()
        self.last_result = result
        return result

    def _begin(self, batch: Batch, outputs: OutputPlace = None, pad: Pad = None) -> Call:
        """Begin a call with one pass over its batch."""
        settings = self._resources.settings
        place = place_of(
            settings.outputs if batch.training else outputs, batch.view.tensors, batch.view.length
        )
        one_pass = OnePass(
            training=batch.training, outputs=place, pad=settings.pad if pad is None else pad
        )
        return self._make(batch, lambda parts: one_pass)

    def _make(self, batch: Batch, passes: PassesOf) -> Call:
        call = Call(self._resources, self._knowledge, batch, passes)
        self._current = ref(call)
        return call

    def _read(
        self,
        batch: Any,
        name: str,
        given: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {}),
        *,
        counted: bool = True,
    ) -> tuple[BatchView, Counts]:
        """Read the batch of the next call."""
        resources = self._resources
        self._warn_of_half_a_step()
        resources.wake()
        read = partial(self._batches.read, batch, name, given, training=counted)
        return resources.retry("look at the batch and count the loss terms", read)

    def _finish(self, call: Call) -> StepResult:
        """Keep the result of a call that is done, and tell those who listen."""
        result = call.result
        assert result is not None
        parts, training = call.parts, call.parts.batch.training
        add_to(self.stats, result, parts.batch.view.length, training=training)
        self.stats.graphs += parts.report.graphs()
        if training:
            self.last_result = result
            self.history.append((result.micro_batch_size, result.ooms))
        try:
            if training:
                self._check_size(result, parts.key.name)
            parts.report.done(result, training=training)
        except BaseException as error:  # of a sink, which may raise anything
            if training:
                note_done(error)
            raise
        return result

    def _finish_loop(self, call: Call) -> StepResult:
        """Finish a call of the loop written out."""
        try:
            return self._finish(call)
        finally:
            self._resources.peers.end()

    def _check_size(self, result: StepResult, name: str) -> None:
        """Warn once where the outputs of the function called `name` take much memory."""
        size = stored_bytes(result)
        if size > MUCH:
            self._resources.warn(
                f"outputs of {name}",
                f"what {name} returns besides the loss takes {format_bytes(size)} for this batch "
                f"(outputs={self._resources.settings.outputs!r}): return what you read of it only "
                "(a decoder of transformers needs use_cache=False for that), or say outputs=None",
            )


def _on_piece(
    loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], piece: Any
) -> Any:
    """Return the loss of a piece, as a call has it."""
    return loss_fn(piece, *args, **kwargs)
