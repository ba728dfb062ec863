"""ElasticMBS: its lifetime and its doors. The only place that wires the rest together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn, Self, Unpack

from torch import nn
from torch.optim import Optimizer

from elastic_mbs.batch.join import Fill
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.batch.reader import BatchReader
from elastic_mbs.distributed.peers import peers_of
from elastic_mbs.doors.arguments import check_evaluation, closed
from elastic_mbs.doors.calls import Calls
from elastic_mbs.doors.disabled import DisabledCalls
from elastic_mbs.doors.event_log import event_log
from elastic_mbs.doors.figures import RuntimeFigures
from elastic_mbs.doors.registry import check_same, register, runtime_of
from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.engine.outcome.result import StepResult
from elastic_mbs.engine.shared.knowledge import Knowledge
from elastic_mbs.engine.shared.peers import Alone
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.shared.running import check_function
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.errors import UsageError
from elastic_mbs.options import Options, OutputPlace, Settings, check_names
from elastic_mbs.planning.report import PlanReport
from elastic_mbs.rehearsal.rehearsal import Rehearsal
from elastic_mbs.rehearsal.verify import VerifyReport


class ElasticMBS(RuntimeFigures):
    """A runtime that keeps a training loop alive through out-of-memory errors.

    The user picks the batch, the runtime the micro-batch.

    ```python
    with ElasticMBS(model) as mbs:
        for batch in loader:
            result = mbs.backward(loss_fn, batch)     # was: loss_fn(batch).backward()
            optimizer.step(); optimizer.zero_grad()
    ```

    Args:
        model: the module that the step trains, or a sequence of modules.
        micro_batch_size: size to start with, in samples; "auto" (the default) starts with the whole
            batch.
        count: loss terms per sample: a function batch → vector of length N, `count_tokens(...)`, or
            a dict of those for a `loss_fn` that returns a dict of losses; None (the default) counts
            samples.
        reduction: what `loss_fn` returns: the "mean" over the piece's counts (the default), or the
            "sum".
        dims: how to cut what shapes do not say: the dimension of the samples by the name of a
            field, or what `elastic_mbs.cut` returns.
        pieces: "in_order" (the default), or "by_length": samples are sorted, the longest first;
            pieces of short ones hold more of them, without their padding.
        length: what "by_length" sorts by: the name of an attention mask in the batch (1 and then
            0), or a function batch → lengths, of length N.
        trim: the dimension of the padding of tensors by name, None for those that have none, where
            "by_length" cannot know.
        scaler: a `torch.amp.GradScaler`; the loss is scaled before backward. `unscale_`, clipping
            and `scaler.step` stay with the caller.
        outputs: where the outputs that `loss_fn` returns with the loss go: "cpu", "device", or None
            to drop them. "auto" (the default) leaves those on the device that take at most 16 MiB
            for the whole batch, if the batch lies there. They are detached, in objects of other
            types too; those that cannot be deep-copied keep their graph.
        pad: fills up outputs as wide as the widest sample of their piece (generated texts), at the
            end: a number, or numbers by the names of outputs. Without it they are refused.
        log: a file to which each event is added as a line of JSON (see `sinks.run_log`), for
            `elastic-mbs report` and `elastic-mbs watch`. In a job of several ranks each has its
            own: for "run.jsonl" rank 1 writes "run.rank1.jsonl".
        on_event: a function, or several, that get each `Event`, a `CallDone` for each finished call
            among them; see `elastic_mbs.sinks` for some.
        optimizers: those whose `step()` is guarded in place, as `optimizer_step` does it.
        name: name in logs and events; "elastic_mbs" by default.
        enabled: False makes each call a plain pass over the whole batch, with nothing caught.
        policy: which sizes are allowed, and how eagerly the size is raised.
        gradients: how gradients are made, summed and checked: `accumulate_dtype`, a trainer's own
            `backward`, `verify`, `draws`, `noise_scale`.
        recovery: what happens after an out-of-memory error: `replay`, `generators`, `is_oom`,
            `escalate`, `on_fatal`.
        memory: `device` of the pieces, `prefetch`, `sensor` and `monitor_interval`,
            `wait_for_memory`, `host_guard`.
        distributed: `timeout`, `overlap` and `mode` of a job of many processes. Of a module wrapped
            in `DistributedDataParallel`, or sharded by `fully_shard`, all ranks make their
            runtimes, and calls, together.

    Raises:
        UsageError: an argument makes no sense; the message names it and the way out.
        UnsupportedError: a wrapper whose forward runs collectives or replicas.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], **options: Unpack[Options]) -> None:
        check_names("ElasticMBS", options)
        self._options = options
        trained = TrainedModel(model)
        settings = Settings.of(options).for_model(
            normalises_batch=trained.normalises_batch(), group=trained.group
        )
        self.enabled = options.get("enabled", True)
        calls: type[Calls | DisabledCalls] = Calls
        if not self.enabled:
            calls = DisabledCalls
            settings = replace(settings, memory=replace(settings.memory, host_guard=False))
        peers = peers_of(trained, settings) if self.enabled else Alone()
        log = event_log(settings, trained.devices, options, peers.about)
        self._resources = Resources(settings, trained, log, exact=self.enabled, peers=peers)
        self._knowledge = Knowledge(settings)
        batches = BatchReader(
            options.get("dims"),
            options.get("count"),
            ByLength.of(
                settings.pieces,
                options.get("length"),
                options.get("trim"),
                self._resources.warn,
            ),
            reduction=settings.reduction,
            warn_once=self._resources.warn,
            sequence_first=trained.sequence_first,
            placeholders=trained.placeholders,
            alone=peers.alone,
        )
        work = (self._resources, self._knowledge, batches)
        self._calls = calls(*work, options.get("optimizers", ()))
        self._rehearsal = Rehearsal(*work)
        register(trained.roots, self)

    @classmethod
    def of(cls, model: nn.Module, **options: Unpack[Options]) -> ElasticMBS:
        """Return the runtime of a module: the latest that was made, or else a new one.

        For a loop in another file, which is given the model alone: sizes are kept from one of its
        calls to the next. A new runtime lives as long as the module.

        Args:
            model: a module that a runtime was made for, or one without a runtime.
            **options: as for `ElasticMBS`, for a new runtime.

        Raises:
            UsageError: no module, or its runtime was made with other options.
        """
        found: ElasticMBS = runtime_of(model, lambda: cls(model, **options))
        check_same(model, options, found._options)
        return found

    # ------------------------------------------------------------------ lifetime

    def __enter__(self) -> Self:
        """Start the memory monitor."""
        self._calls.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, and raise an `IncompleteBatchError` where a loop was left early.

        An error that is being raised already is not replaced.
        """
        try:
            self._calls.leave(error)
        finally:
            self.close()

    def close(self) -> None:
        """End an unfinished batch, stop the monitor, and write out what sinks hold.

        A later call starts them again.
        """
        self._calls.close()

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles."""
        raise UsageError(
            "an ElasticMBS can be neither copied nor pickled: it has a thread, and a model of its "
            "own. Make another one; what this one has learned is in state_dict()"
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse names that it does not have, with the method that was probably meant."""
        meant = {"eval": "evaluate", "step": "optimizer_step", "forward": "backward"}.get(name)
        hint = "" if meant is None else f": did you mean {meant}()?"
        raise AttributeError(f"ElasticMBS has no attribute {name!r}{hint}", name=name, obj=self)

    # ------------------------------------------------------------------ the doors

    def backward(
        self, loss_fn: Callable[..., Any], batch: Any, /, *args: Any, **kwargs: Any
    ) -> StepResult:
        """Accumulate the gradient of the whole batch's loss.

        Stands for `loss_fn(batch, *args, **kwargs).backward()`.

        Args:
            loss_fn: gets a piece of the batch first, then the rest of the arguments unchanged.
                Returns the loss (see `MicroBatch.backward`). It may run more than once for the same
                samples.
            batch: any container of tensors and per-sample lists.
            *args: passed on to `loss_fn`.
            **kwargs: passed on to `loss_fn`, whatever their names.

        Returns:
            The loss of the whole batch, what else `loss_fn` returned, and how the batch was split.

        Raises:
            UsageError: batch, counts or loss make no sense (`BatchError`, `CountError`,
                `LossError`).
            MisuseError: `loss_fn` stepped an optimizer, ran backward, and the like.
            RecoveryError: memory ran out and the batch could not be finished.
        """
        check_function(loss_fn, "backward(loss_fn, batch)")
        return self._calls.backward(loss_fn, batch, args, kwargs)

    @closed
    def backward_embeddings(
        self, embed_fn: Callable[[Any], Any], loss_fn: Callable[[Any], Any], batch: Any
    ) -> StepResult:
        """Accumulate the gradient of a loss that compares samples.

        Stands for `loss_fn(embed_fn(batch)).backward()`: contrastive losses, in-batch negatives,
        CLIP. A batch that fits is embedded once. Else every piece is embedded without a graph, the
        loss of all embeddings gives their gradient, and every piece is embedded again, with a
        graph.

        Args:
            embed_fn: gets a piece of the batch and returns its embeddings: a row per sample, as a
                tensor or a tuple or dict of them. It can run more than once for the same samples.
            loss_fn: gets what `embed_fn` returned, for the whole batch, and returns the loss;
                `count` and `reduction` mean nothing to it. Leaves that it reaches by itself (a
                learned temperature) get their gradients, too. It must not change buffers.
            batch: any container of tensors and per-sample lists.

        Where an embedding depends on random numbers or on its piece (BatchNorm), both passes run
        the same pieces with the same masks, and a failure restarts both with smaller pieces.

        Returns:
            The loss of the whole batch, what else `loss_fn` returned, and how the batch was split.

        Raises:
            UsageError: batch, embeddings or loss make no sense.
            MisuseError: a function stepped an optimizer, ran backward, and the like.
            RecoveryError: memory ran out and the batch could not be finished.
        """
        usage = "backward_embeddings(embed_fn, loss_fn, batch)"
        check_function(embed_fn, usage)
        check_function(loss_fn, usage)
        return self._calls.backward_embeddings(embed_fn, loss_fn, batch)

    @closed
    def micro_batches(
        self, batch: Any, *, name: str = "loop", own_graph: bool = True
    ) -> Iterator[MicroBatch]:
        """Return the loop over the pieces, to be written out.

        ```python
        for micro in mbs.micro_batches(batch):
            with micro:
                micro.backward(loss_fn(micro.data))
        ```

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
                outside its blocks. Its gradients are taken back only now: by the next call, by
                `optimizer.step()` (which says the same), or at the end of the runtime's own block.
        """
        return self._calls.micro_batches(batch, name, own_graph=own_graph)

    @closed
    def evaluate(
        self,
        fn: Callable[[Any], Any],
        batch: Any,
        *,
        outputs: OutputPlace = "auto",
        pad: Fill = None,
    ) -> Any:
        """Return `fn(batch)`, run in pieces without gradients and joined along the samples.

        Sizes are evaluation's own: without a graph it fits more than training.

        Args:
            fn: gets a piece of the batch. It may run more than once for the same samples.
            batch: any container of tensors and per-sample lists.
            outputs: where outputs are kept while the rest of the batch runs, and joined: "cpu"
                moves them to the host piece by piece; "device" leaves them where they are made,
                which they may fill; "auto" as for the outputs of training.
            pad: fills up outputs whose width differs from piece to piece, as the option `pad` does,
                which None stands for.

        Returns:
            The same containers that `fn` returns. Tensors as long as the piece and lists with one
            item per sample are put together; a value that comes once per piece (a mean loss) is in
            a `PerPiece` list, with `.mean()` and `.sum()`. An output whose length ever differs from
            its piece's is treated as one value per piece from then on.

        Raises:
            UsageError: `outputs` or `pad` is not known, or an output needs a `pad`.
            BatchError: the batch cannot be cut.
            RecoveryError: memory ran out and the batch could not be finished.
        """
        check_function(fn, "evaluate(fn, batch)")
        check_evaluation(outputs, pad)
        return self._calls.evaluate(fn, batch, outputs, pad)

    def optimizer_step(self, optimizer: Optimizer, closure: object = None) -> None:
        """Step the optimizer, exactly or not at all.

        Stands for `optimizer.step()`, or for `scaler.step(optimizer)` with the scaler that was
        given. A step that runs out of memory half-way is taken back and tried again, at last one
        parameter at a time. For that it copies parameters and state, on the device where there is
        room and on the host otherwise, for the length of the step; a fused step whose state exists
        needs no copies. `scaler.update()`, clipping and `zero_grad()` stay with the caller. Step
        hooks run once, however often the step is tried.

        Args:
            optimizer: any `torch.optim.Optimizer` but LBFGS.
            closure: not supported; it is here to say so.

        Raises:
            UsageError: no optimizer, a closure, or an optimizer whose step cannot be made again.
            MisuseError: a batch is incomplete.
            OptimizerStepError: it does not fit; parameters and state are as they were.
            PoisonedDeviceError: the device cannot be trusted any more.
        """
        self._calls.optimizer_step(optimizer, closure)

    @closed
    def release(self, *, gradients: bool = False) -> int:
        """Give memory back between two phases: training, a rollout, an evaluation, saving.

        Copies of buffers, the outputs of `last_result` and reference cycles go, and the allocators'
        caches are emptied. Call it at the end of each phase on a device that phases or processes
        share. The first call after it starts at a size that is predicted to fit what the other
        phase has left.

        Args:
            gradients: drop the gradients, as `zero_grad(set_to_none=True)` does.

        Returns:
            The bytes freed: on an accelerator those that the allocator has given back, on a host
            those of the tensors dropped.

        Raises:
            MisuseError: a call is running.
        """
        return self._calls.release(gradients=gradients)

    # ------------------------------------------------------------------ beside the training loop

    @closed
    def verify(
        self, loss_fn: Callable[[Any], Any], batch: Any, *, samples: int = 6
    ) -> VerifyReport:
        """Compare the loss of a few samples with the one put together from pieces.

        The report names what is wrong if they differ. Runs with the model in eval mode and on
        copies of the samples; buffers, random streams and modes are put back. The first call of a
        function that is split does the same by itself (`GradientOptions.verify`).

        Args:
            loss_fn: as for `backward`.
            batch: a batch; neighbours in it are used that differ in their labels and counts.
            samples: how many samples to compare on; more where two pieces need more.

        Raises:
            UsageError: there are fewer than two samples, or batch, counts or loss make no sense.
            MicroBatchFloorError: they do not fit.
        """
        self._calls.check_complete()
        check_function(loss_fn, "verify(loss_fn, batch)")
        return self._rehearsal.verify(loss_fn, batch, samples)

    @closed
    def plan(
        self,
        loss_fn: Callable[[Any], Any],
        batch: Any,
        *,
        optimizer: Optimizer | None = None,
        budget: int | str | None = None,
        compare: bool = False,
        autotune: bool = False,
        apply: bool = True,
    ) -> PlanReport:
        """Predict the peak memory of a step for every size, as a table.

        Forward, backward and the optimizer's step run on fake tensors, which have shapes and no
        memory: nothing is changed, no random number drawn. Where that is impossible (control flow
        that depends on values), the report's `reason` says why, and sizes are found while training.

        Args:
            loss_fn: as for `backward`.
            batch: a batch as training has them.
            optimizer: counts its step and its state, also the state that it does not have yet.
            budget: bytes (or "8GiB") that must be enough; None: what this process could hold now.
            compare: compares each way of `RecoveryOptions.escalate` with none; `ways` and `fastest`
                of the report say which makes the batch in the least time.
            autotune: compares, and lets the next training calls take turns in the ways that fit,
                three in each; the fastest one stays. All make the same gradients.
            apply: the next call starts at the largest micro-batch that fits, in the fastest way
                where `compare` has found one that `escalate` allows; False only predicts, and
                nothing changes.

        Raises:
            UsageError: batch, counts or loss make no sense, or `loss_fn` keeps tensors; `autotune`
                without `RecoveryOptions.escalate`.
        """
        self._calls.check_complete()
        check_function(loss_fn, "plan(loss_fn, batch)")
        return self._rehearsal.plan(
            loss_fn, batch, optimizer, budget, compare=compare, autotune=autotune, apply=apply
        )
