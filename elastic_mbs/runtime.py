"""ElasticMBS: its lifetime and its doors (`backward`, `micro_batches`, `eval`).

The only place that wires the rest together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn
from torch.optim import Optimizer

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.cut import Dims
from elastic_mbs.batch.lengths import ByLength, Length, Trim
from elastic_mbs.batch.reader import BatchReader, Count
from elastic_mbs.batch.view import BatchView
from elastic_mbs.controller.policy import Policy
from elastic_mbs.controller.size_model import SizeModel
from elastic_mbs.engine.call import Call, one_pass
from elastic_mbs.engine.micro_batch import MicroBatch, loop
from elastic_mbs.engine.outcome.result import Stats, StepResult
from elastic_mbs.engine.parts import Batch, CallParts
from elastic_mbs.engine.shared.knowledge import Knowledge, names_of
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.shared.running import check_function, running_call
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.engine.two_pass.cache import OverEmbeddings
from elastic_mbs.engine.two_pass.passes import TwoPasses, Unweighted
from elastic_mbs.errors import IncompleteBatchError, UsageError
from elastic_mbs.events import Sink
from elastic_mbs.memory import Reading, oom
from elastic_mbs.optimizer.guarded_step import GuardedStep
from elastic_mbs.optimizer.unfinished import StepWatch
from elastic_mbs.options import (
    GradientOptions,
    MemoryOptions,
    OutputPlace,
    Pieces,
    RecoveryOptions,
    Reduction,
    Settings,
    event_log,
)
from elastic_mbs.planning.report import PlanReport
from elastic_mbs.rehearsal import NONE, Arguments, Cap, LossFn, Rehearsal
from elastic_mbs.verify import VerifyReport


class ElasticMBS:
    """Keeps a training loop alive through out-of-memory errors: the user picks the batch, the runtime the micro-batch.

    ```python
    with ElasticMBS(model) as mbs:
        for batch in loader:
            result = mbs.backward(loss_fn, batch)     # was: loss_fn(batch).backward()
            optimizer.step(); optimizer.zero_grad()
    ```

    Args:
        model: the module that the step trains, or a sequence of modules.
        micro_batch_size: size to start with, in samples; "auto" starts with the whole batch.
        count: loss terms per sample: a function batch → vector of length N, `count_tokens(...)`, or
            a dict of those for a `loss_fn` that returns a dict of losses; None counts samples.
        reduction: what `loss_fn` returns: the "mean" over the piece's counts, or the "sum".
        dims: how to cut what shapes do not say (see `BatchView`).
        pieces: "in_order", or "by_length": samples are sorted, the longest first; pieces of short
            ones hold more of them, without their padding.
        length: what "by_length" sorts by: the name of an attention mask in the batch (1 and then
            0), or a function batch → lengths, of length N.
        trim: the dimension of the padding of tensors by name, None for those that have none, where
            "by_length" cannot know.
        scaler: a `torch.amp.GradScaler`; the loss is scaled before backward. `unscale_`, clipping
            and `scaler.step` stay with the caller.
        outputs: where the outputs that `loss_fn` returns with the loss go: "cpu", "device", or None
            to drop them. They are detached, in objects of other types too; those that cannot be
            deep-copied keep their graph.
        log: a file to which each event is added as a line of JSON (see `sinks.run_log`), for
            `elastic-mbs report` and `elastic-mbs watch`.
        on_event: functions that get each `Event`, a `CallDone` for each finished call among them;
            see `elastic_mbs.sinks` for some.
        name: name in logs and events.
        enabled: False makes each call a plain pass over the whole batch, with nothing caught.
        policy: which sizes are allowed, and how eagerly the size is raised.
        gradients: how gradients are made and summed: `accumulate_dtype`, a trainer's own
            `backward`.
        recovery: what happens after an out-of-memory error: `replay`, `generators`, `is_oom`,
            `on_fatal`.
        memory: `device` of the pieces, `prefetch`, `sensor` and `monitor_interval`,
            `wait_for_memory`, `host_guard`.

    Raises:
        UsageError: an argument makes no sense; the message names it and the way out.
        UnsupportedError: a wrapper whose forward runs collectives or replicas.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        micro_batch_size: int | Literal["auto"] = "auto",
        count: Count = None,
        reduction: Reduction = "mean",
        dims: Dims | None = None,
        pieces: Pieces = "in_order",
        length: Length = None,
        trim: Trim | None = None,
        scaler: torch.amp.GradScaler | None = None,
        outputs: OutputPlace = "cpu",
        log: str | os.PathLike[str] | None = None,
        on_event: Sink | Iterable[Sink] = (),
        name: str | None = None,
        enabled: bool = True,
        policy: Policy | None = None,
        gradients: GradientOptions | None = None,
        recovery: RecoveryOptions | None = None,
        memory: MemoryOptions | None = None,
    ) -> None:
        trained = TrainedModel(model)
        groups = (
            policy or Policy(),
            gradients or GradientOptions(),
            recovery or RecoveryOptions(),
            memory or MemoryOptions(),
        )
        settings = Settings(
            name or "elastic_mbs", micro_batch_size, reduction, scaler, outputs, *groups, pieces
        )
        self.settings = settings.for_model(
            normalises_batch=trained.normalises_batch(), group=trained.group
        )
        self.enabled = enabled
        self.last_result: StepResult | None = None
        self._call: Call | None = None
        self._stats, self._steps = Stats(), StepWatch()
        self._resources = Resources(
            self.settings,
            trained,
            event_log(self.settings, trained.devices, log, on_event),
            enabled=enabled,
        )
        self._knowledge = Knowledge(self.settings)
        by_length = ByLength.of(pieces, length, trim, self._resources.warn)
        self._batches = BatchReader(
            dims, count, by_length, counted=reduction == "sum", warn_once=self._resources.warn
        )
        self._rehearsal = Rehearsal(self._resources, self._knowledge, self._batches)
        self._guarded_step = GuardedStep(self._resources, enabled=enabled)

    # ------------------------------------------------------------------ lifetime

    def __enter__(self) -> Self:
        """Starts the memory monitor."""
        if self.enabled:
            self._resources.monitor.start()
            self._steps.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As `close`; raises an `IncompleteBatchError` where a loop was left early and nothing else is already being raised."""
        try:
            if error is None:
                self._check_complete()
            elif (
                isinstance(error, Exception)
                and oom.classify(error, self.settings.recovery.is_oom) is not None
            ):
                left = self._steps.left_behind()
                if left is not None:
                    error.add_note(f"elastic_mbs: {left}.")
        finally:
            self.close()

    def close(self) -> None:
        """Ends an unfinished batch, stops the monitor and writes out what sinks hold; a later call starts them again."""
        if self._call is not None and not self._call.finished:
            self._call.abort(IncompleteBatchError("closed in the middle of a batch"))
        self._resources.monitor.stop()
        self._steps.stop()
        if self._resources.guard is not None:
            self._resources.guard.lift()
        try:
            if self._resources.telemetry is not None:
                self._resources.telemetry.rest()
        finally:  # a user's sink may raise
            self._resources.log.close()

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickles."""
        raise UsageError(
            "an ElasticMBS can be neither copied nor pickled: it has a thread, and a model of its "
            "own. "
            "Make another one; what this one has learned is in state_dict()"
        )

    # ------------------------------------------------------------------ the doors

    def backward(
        self,
        loss_fn: LossFn,
        batch: Any,
        /,
        *args: Any,
        loss: OverEmbeddings | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Accumulates the gradient of the whole batch's loss; stands for `loss_fn(batch, *args, **kwargs).backward()`.

        With `loss=` for `loss(loss_fn(batch, *args, **kwargs)).backward()`: a loss that compares
        samples (contrastive, in-batch negatives, CLIP). Every piece is embedded without a graph,
        the loss of all embeddings gives their gradient, and every piece is embedded again, with a
        graph.

        Args:
            loss_fn: gets a piece of the batch first, then the rest of the arguments unchanged.
                Returns the loss (see `MicroBatch.backward`). It may run more than once for the same
                samples. With `loss=` it returns embeddings: a row per sample, as a tensor or a
                tuple or dict of them.
            batch: any container of tensors and per-sample lists.
            *args: passed on.
            loss: gets what `loss_fn` returned, for the whole batch, and returns the loss; `count`
                and `reduction` mean nothing to it. Leaves that it reaches by itself (a learned
                temperature) get their gradients, too. It must not change buffers. Where an
                embedding depends on random numbers or on its piece (BatchNorm), both passes run the
                same pieces with the same masks, and what fails starts both in smaller ones.
            **kwargs: passed on.

        Returns:
            The loss of the whole batch, what else `loss_fn` returned, and how the batch was split.

        Raises:
            UsageError: batch, counts or loss make no sense (`BatchError`, `CountError`,
                `LossError`).
            MisuseError: `loss_fn` stepped an optimizer, ran backward, and the like.
            RecoveryError: memory ran out and the batch could not be finished.
        """
        check_function(loss_fn, "backward(loss_fn, batch)")
        if loss is not None:
            check_function(loss, "backward(embed_fn, batch, loss=over_embeddings)")
        if not self.enabled:
            for micro in self._loop_whole(batch, counted=loss is None):
                with micro:
                    value = loss_fn(micro.data, *args, **kwargs)
                    micro.backward(value if loss is None else loss(value))
            assert self.last_result is not None
            return self.last_result
        if loss is not None:
            return self._backward_embeddings(loss_fn, loss, batch, args, kwargs)
        with self._start(batch, *names_of(loss_fn), (args, kwargs)) as call:
            call.run(loss_fn, args, kwargs)
        return self._finish(call)

    def _backward_embeddings(
        self,
        embed_fn: LossFn,
        loss_fn: OverEmbeddings,
        batch: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> StepResult:
        view, _ = self._read(batch, names_of(embed_fn)[0], (tuple(args), kwargs), training=False)
        name, code = names_of(embed_fn)
        made: list[TwoPasses] = []

        def passes(parts: CallParts) -> TwoPasses:
            made.append(TwoPasses(parts, loss_fn))
            return made[0]

        batch = Batch(view, Unweighted.samples(view.length), name, (code, names_of(loss_fn)[1]))
        self._call = Call(self._resources, self._knowledge, batch, passes)
        with self._call as call:
            call.run(made[0].embed(embed_fn), args, kwargs)
        return self._finish(call)

    def micro_batches(
        self, batch: Any, *, name: str = "loop", own_graph: bool = True
    ) -> Iterator[MicroBatch]:
        """The loop written out: `for micro in mbs.micro_batches(batch): with micro: micro.backward(loss_fn(micro.data))`.

        The block may be entered again for the same samples. `last_result` holds the `StepResult`
        afterwards. Tensors that the block names itself (its logits) stay until the name is bound
        again; `del` them at its end where memory is short.

        Args:
            batch: the whole batch.
            name: limits and sizes are kept by it; give each kind of loop its own.
            own_graph: autograd's saved tensors are kept in a table that can be emptied, because the
                frame of the loop still holds the failed attempt's `loss` while it is replayed.
                False leaves the table out: needed for `torch.func` transforms inside the block,
                which then should `del` its loss and outputs.

        Raises:
            UsageError: the batch or its counts make no sense.
            IncompleteBatchError: the loop before this one was left early, by `break` or by an error
                outside its blocks. What it had done is undone only now: by the next call, by
                `optimizer.step()` (which says the same), or at the end of the runtime's own block.
        """
        if not self.enabled:
            return self._loop_whole(batch)
        return loop(self._start(batch, name, name, own_graph=own_graph), self._finish)

    def eval(
        self,
        fn: Callable[..., Any],
        batch: Any,
        /,
        *args: Any,
        to: Literal["cpu", "device"] = "device",
        **kwargs: Any,
    ) -> Any:
        """`fn(batch, *args, **kwargs)` without gradients, in pieces, outputs joined along the samples.

        Sizes are evaluation's own: without a graph it fits more than training.

        Args:
            fn: gets a piece of the batch first, then the rest of the arguments unchanged. It may
                run more than once for the same samples.
            batch: any container of tensors and per-sample lists.
            *args: passed on.
            **kwargs: passed on.
            to: where outputs are kept while the rest of the batch runs, and joined: "device" leaves
                them where they are made, "cpu" moves them to the host piece by piece, where they
                would fill the device.

        Returns:
            The same containers that `fn` returns. Tensors whose first dimension is the piece's
            length, and lists with one item per sample, are put together; what comes once per piece
            (a mean loss) is a `PerPiece` list, with `.mean()` and `.sum()`. What has other lengths
            in some pieces is known to be of the second kind from then on.

        Raises:
            BatchError: the batch cannot be cut.
            RecoveryError: memory ran out and the batch could not be finished.
        """
        if to not in ("device", "cpu"):
            raise UsageError(
                f'to={to!r} is not known: use "device" (the default), or "cpu" for outputs that '
                "would fill the device"
            )
        check_function(fn, "eval(fn, batch)")
        if not self.enabled:
            with torch.no_grad():
                return fn(self._resources.load(batch), *args, **kwargs)
        with (
            self._start(batch, *names_of(fn), (args, kwargs), training=False, to=to) as call,
            torch.no_grad(),
        ):
            call.run(fn, args, kwargs)
        return self._finish(call).outputs

    def optimizer_step(self, optimizer: Optimizer, closure: object = None) -> None:
        """Steps, exactly or not at all; stands for `optimizer.step()`, or for `scaler.step(optimizer)` with the scaler that was given.

        Takes copies of what the step will change: a step that runs out of memory half-way is taken
        back and tried again, at last one parameter at a time. The copies take as much as parameters
        and state together, on the device where they fit and on the host otherwise, for the length
        of the step; a fused step whose state is there needs none. `scaler.update()`, clipping and
        `zero_grad()` stay with the caller. Step hooks run once, however often the step is tried.

        Args:
            optimizer: any `torch.optim.Optimizer` but LBFGS.
            closure: not supported; it is here to say so.

        Raises:
            UsageError: no optimizer, a closure, or an optimizer whose step cannot be made again.
            MisuseError: a batch is incomplete.
            OptimizerStepError: it does not fit; parameters and state are as they were.
            PoisonedDeviceError: the device cannot be trusted any more.
        """
        self._check_complete()
        if (call := running_call()) is not None:
            call.check_step(optimizer)
        try:
            self._guarded_step(optimizer, closure)
        finally:
            self._steps.begun = None  # it has answered for its step

    def verify(
        self, loss_fn: LossFn, batch: Any, /, *args: Any, samples: int = 6, **kwargs: Any
    ) -> VerifyReport:
        """Compares the loss of a few samples taken whole with the loss put together from pieces, and names what is wrong if they differ.

        Runs with the model in eval mode and on copies of the samples; buffers, random streams and
        modes are put back.

        Args:
            loss_fn: as for `backward`.
            batch: a batch; its first `samples` are used.
            *args: passed on.
            **kwargs: passed on.
            samples: how many samples to compare on.

        Raises:
            UsageError: there are fewer than two samples, or batch, counts or loss make no sense.
            MicroBatchFloorError: they do not fit.
        """
        self._check_complete()
        return self._rehearsal.verify(loss_fn, batch, (args, kwargs), samples)

    def plan(
        self,
        loss_fn: LossFn,
        batch: Any,
        /,
        *args: Any,
        optimizer: Optimizer | None = None,
        budget: Cap = None,
        compare: bool = False,
        **kwargs: Any,
    ) -> PlanReport:
        """Predicts the peak memory of a step for every size, as a table, and has the next call start at the largest micro-batch that fits.

        Forward, backward and the optimizer's step run on fake tensors, which have shapes and no
        memory: nothing is changed, no random number drawn. Where that is impossible (control flow
        that depends on values), the report's `reason` says why, and sizes are found while training.

        Args:
            loss_fn: as for `backward`.
            batch: a batch as training has them.
            *args: passed on.
            optimizer: counts its step and its state, also what it does not have yet.
            budget: bytes (or "8GiB") that must be enough; None: what this process could hold now.
            compare: says in `ways` and `fastest`, too, whether offloading saved tensors,
                checkpointing or neither makes the batch in the least time.
            **kwargs: passed on.

        Raises:
            UsageError: batch, counts or loss make no sense, or `loss_fn` keeps tensors.
        """
        self._check_complete()
        return self._rehearsal.plan(
            loss_fn, batch, (args, kwargs), optimizer, budget, compare=compare
        )

    # ------------------------------------------------------------------ what is seen from outside

    def state_dict(self) -> dict[str, object]:
        """What was learned about sizes and memory, as JSON; save it beside the optimizer's state."""
        return {"version": 1, "controller": self._knowledge.controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what another run has learned; a `UsageError` for a state of another version or a malformed one changes nothing."""
        if not (
            isinstance(state, Mapping)
            and state.get("version") == 1
            and isinstance(state.get("controller"), dict)
        ):
            raise UsageError(
                f"this is no state of ElasticMBS version 1: {str(state)[:80]!r}; start without "
                "it, sizes are learned again"
            )
        self._knowledge.controller.load_state_dict(state["controller"])

    @property
    def model(self) -> dict[str, SizeModel]:
        """Peak memory and time as functions of the micro-batch, as they are known now, for each kind of call: by function, mode and shape class."""
        return self._knowledge.controller.models()

    @property
    def stats(self) -> Stats:
        """What this runtime has been through, as a copy."""
        return self._stats.copy()

    @property
    def total(self) -> Any:
        """The counts of the batch that is running, for a `loss_fn` that normalises by itself: a number, or a dict where losses have names."""
        if self._call is not None and not self._call.finished:
            return self._call.totals
        return self._rehearsal.total

    @property
    def headroom(self) -> Reading:
        """The latest memory reading."""
        return self._resources.monitor.latest()

    # ------------------------------------------------------------------ how a call starts and ends

    def _read(
        self, batch: Any, name: str, given: Arguments, *, training: bool
    ) -> tuple[BatchView, Counts]:
        self._check_complete()
        resources = self._resources
        if self._steps.begun and (left := self._steps.left_behind()) is not None:
            resources.warn("optimizer-step", left, once=False)
        resources.wake()
        read = partial(self._batches.read, batch, name, given, training=training)
        return resources.retry("look at the batch and count the loss terms", read)

    def _start(
        self,
        batch: Any,
        name: str,
        key: object,
        given: Arguments = NONE,
        *,
        training: bool = True,
        own_graph: bool = False,
        to: OutputPlace = None,
    ) -> Call:
        view, counts = self._read(batch, name, given, training=training)
        place = self.settings.outputs if training else to
        work = Batch(view, counts, name, key, training, own_graph)
        passes = one_pass(training=training, outputs=place)
        self._call = Call(self._resources, self._knowledge, work, passes)
        return self._call

    def _loop_whole(self, batch: Any, *, counted: bool = True) -> Iterator[MicroBatch]:
        self.last_result = yield from self._rehearsal.whole(batch, counted=counted)

    def _finish(self, call: Call) -> StepResult:
        result = call.result
        assert result is not None
        if self._call is call:
            self._call = None  # it holds the batch
        parts, training = call.parts, call.parts.batch.training
        self._stats.add(result, parts.batch.view.length, training=training)
        self._stats.graphs += parts.report.graphs()
        if training:
            self.last_result = result
            result.check_size(parts.key.name, self.settings.outputs, self._resources.warn)
        parts.report.done(result, training=training)
        return result

    def _check_complete(self) -> None:
        call = self._call
        if call is not None and not call.finished and not call.inside:
            error = call.left_early()
            call.abort(error)
            raise error
