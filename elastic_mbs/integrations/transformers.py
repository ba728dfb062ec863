"""The runtime in `transformers.Trainer` and its subclasses.

`per_device_train_batch_size` is the batch wanted, the runtime picks the micro-batch. Every piece
runs through the trainer's own `training_step`. Where the loss is normalised by
`num_items_in_batch`, the step gets the piece's own number, so that any loss is the mean over its
piece, whatever the model's signature says. The engine weighs it by the piece's labels.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import Trainer

from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.errors import CountError, RecoveryError, UnsupportedError, UsageError
from elastic_mbs.events import logger
from elastic_mbs.integrations.exchange import Exchange
from elastic_mbs.integrations.frameworks import TRANSFORMERS
from elastic_mbs.integrations.rows import Rows, ctc_reduction, labels_in
from elastic_mbs.integrations.trainer import ranks, spread
from elastic_mbs.integrations.trainer.checkpoint import load_sizes, save_sizes
from elastic_mbs.integrations.trainer.checks import check_class, check_losses, check_trainer
from elastic_mbs.integrations.trainer.completions import loss_of_completions
from elastic_mbs.integrations.trainer.options import OWN, TrainerOptions, checked, guard
from elastic_mbs.integrations.trainer.packed import Packed, makes_one_row
from elastic_mbs.integrations.trainer.predictions import joined, mean_loss
from elastic_mbs.integrations.trainer.router import Router
from elastic_mbs.integrations.trl import rollouts
from elastic_mbs.integrations.trl.kinds import rows_of
from elastic_mbs.integrations.trl.metrics import BatchMetrics, Note
from elastic_mbs.integrations.trl.rollouts import Completions
from elastic_mbs.memory import oom
from elastic_mbs.runtime import ElasticMBS

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

TrainerClass = TypeVar("TrainerClass", bound=type)


class ElasticTrainerMixin(_Base):
    """A mixin that keeps a `Trainer` alive through out-of-memory errors.

    Gradients are those of the whole batch: `class MyTrainer(ElasticTrainerMixin, Trainer)`.

    Args:
        *args: the trainer's.
        elastic: options of `ElasticMBS` by name (`micro_batch_size`, `policy`, `log`, `memory`, …),
            but for those that follow from the trainer. `count` is for a loss that is no mean over
            the labels that are not -100: a function batch → one count per sample, None for samples.
            `optimizer_step=True` sends the optimizer's step through `ElasticMBS.optimizer_step`.
            `verify=False` leaves out the comparison, at the first step, of a few samples' loss with
            the one put together from pieces.
        **kwargs: the trainer's.

    Raises:
        UsageError: an option makes no sense, or the loss of a batch is not made up of its pieces'.
        UnsupportedError: its batches cannot be cut and replayed: FSDP in its first version,
            DeepSpeed, DataParallel, and the like.
    """

    loss_is_scaled_for_ga: bool | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse trainers whose batches mean more than their samples."""
        super().__init_subclass__(**kwargs)
        TRANSFORMERS.check()
        check_class(cls, ElasticTrainerMixin)

    def __init__(self, *args: Any, elastic: TrainerOptions | None = None, **kwargs: Any) -> None:
        self._elastic_options = checked({} if elastic is None else elastic)
        # a model, whether it is spread and its pieces are weighed here, and its runtime
        self._elastic_of: tuple[tuple[Any, bool, bool], ElasticMBS] | None = None
        asks = functools.partial(ranks.asks, self, self._elastic_options)
        waits = self._elastic_options.get("distributed")
        self._elastic_exchange = Exchange(self, waits, gathers=asks)
        self._elastic_router = Router(self, self._elastic_exchange)
        self._elastic_verified = set[bool]()
        self._elastic_open: ExitStack | None = None  # of runtimes, while training runs
        super().__init__(*args, **kwargs)
        self._elastic_checked()

    @property
    def elastic(self) -> ElasticMBS:
        """The runtime, for its `stats`, `last_result`, `plan` and the like.

        Another model (`model_init`) gets another one, and so does the model in
        DistributedDataParallel or sharded by FSDP2, where training begins on all ranks.
        """
        known, key = self._elastic_of, (*spread.prepared(self), self._elastic_weighed)
        if known is None or known[0] != key:
            options = {
                name: value for name, value in self._elastic_options.items() if name not in OWN
            } | {"count": self._elastic_count}
            length = self._elastic_rows.length
            if options.get("pieces") == "by_length" and length is not None:
                options.setdefault("length", length)
            options |= {"reduction": "sum"} if self._elastic_weighed else {}
            modules, scaler = spread.modules_of(self), self.accelerator.scaler
            runtime = ElasticMBS(modules, **options, scaler=scaler, outputs=None)
            known = self._elastic_of = key, runtime
            if self._elastic_open is not None:
                self._elastic_open.enter_context(runtime)
        return known[1]

    @property
    def _elastic_weighed(self) -> bool:
        """True if pieces are weighed here, as the trainer and DDP weigh parts of their losses."""
        generated, several = self._elastic_rows.generated, self.args.world_size > 1
        return bool(generated or several or self._elastic_router.active)

    def _elastic_checked(self) -> ElasticMBS:
        options = self._elastic_options
        check_trainer(self, options)
        if ctc_reduction(self.model) == "mean":
            options.setdefault("count", None)
        return self.elastic

    @property
    def _elastic_rows(self) -> Rows:
        """The samples that the rows of a batch are."""
        if makes_one_row(self.data_collator):
            return Packed(self, shifts=self._loss_shifts_labels)
        return rows_of(self)

    # ------------------------------------------------------------------ training

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run the trainer's own step on every piece; return the loss of the whole batch.

        The loss is the batch's share in the batches that are accumulated for one step.
        """
        mbs = self.elastic
        if not mbs.enabled:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]  # the trainer is untyped here
        rows = self._elastic_rows
        if rows.generated:
            with rollouts.around_step(self, mbs):
                return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]  # the trainer is untyped here
        samples = rows.samples(inputs)
        model.train()  # as the trainer's step begins: an evaluation can have been before
        rows.prepare(samples, mbs, model, self._elastic_exchange)
        self._elastic_verify(samples)
        run = functools.partial(self._elastic_batch, rows, samples, model, num_items_in_batch)
        found: Tensor = self._elastic_router.around(
            rows, samples, self._elastic_loss, run, training=True
        )
        return found

    def _elastic_batch(self, rows: Rows, samples: Any, model: Any, num_items: Any) -> Tensor:
        """Run the trainer's own step on every piece of a batch; return its loss."""
        mbs, metrics, notes = self.elastic, BatchMetrics(self), list[Note]()
        try:
            for micro in mbs.micro_batches(samples, name="training_step", own_graph=False):
                with micro:
                    metrics.restore()
                    with rows.losses_of(micro.data, samples):
                        self._elastic_piece(model, micro, num_items, samples)
                    if metrics.kept:
                        note = metrics.note(self._elastic_weights(micro.data))
                        micro.on_commit(functools.partial(notes.append, note))
        except BaseException as error:
            metrics.restore()
            if not isinstance(error, CountError) or self._elastic_count(samples).any():
                raise
            # no label in the whole batch: it adds nothing
            return torch.zeros((), device=self.args.device)
        metrics.join(notes, self._elastic_exchange, self._elastic_router.metrics)
        result = mbs.last_result
        assert result is not None
        return result.loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's loss; of completions that it has generated, piece by piece."""
        plain, rows = functools.partial(super().compute_loss, model), self._elastic_rows
        if not isinstance(rows, Completions) or not self.elastic.enabled:
            return plain(inputs, *args, **kwargs)
        others = self._elastic_router, self._elastic_exchange
        return loss_of_completions(self, rows, *others, plain, inputs)

    def _elastic_piece(self, model: Any, micro: MicroBatch, num_items: Any, samples: Any) -> None:
        """Run the trainer's step on one piece.

        In it `accelerator.backward` is the piece's, and the division for accumulation is ours.

        Args:
            model: as the trainer has prepared it.
            micro: the piece.
            num_items: in the batches of a step, over all ranks.
            samples: the whole batch of this rank.
        """
        rows, router, share = self._elastic_rows, self._elastic_router, 1.0
        inputs, everywhere = rows.rows(micro.data), self.args.average_tokens_across_devices
        with ranks.alone(self):
            items = (
                None
                if num_items is None
                else self._get_num_items_in_batch([inputs], self.args.device)
            )
            if self._elastic_weighed:
                share = self._elastic_share(micro.data, items, num_items, samples, everywhere)
            if router.active and not share:  # no labels, and tokens all the same
                share, items = 1.0, None if num_items is None else 1
            stock = router.share(num_items, self._elastic_steps, everywhere=everywhere)
            whole = rows.number(micro.data) == rows.number(samples)
            self.accelerator.backward = self._elastic_backward(micro, num_items, share)
            scaled, self.loss_is_scaled_for_ga = self.loss_is_scaled_for_ga, True
            try:
                with router.of_piece(whole=whole, factor=stock / share if share else 0.0):
                    super().training_step(model, inputs, items)
            finally:
                self.loss_is_scaled_for_ga = scaled
                del self.accelerator.backward

    @property
    def _elastic_steps(self) -> int:
        """The batches that are accumulated for one step."""
        return getattr(self, "current_gradient_accumulation_steps", 1)

    def _elastic_backward(
        self, micro: MicroBatch, num_items: Any, share: float
    ) -> Callable[..., None]:
        """Return the `accelerator.backward` of one piece.

        Args:
            micro: the piece.
            num_items: in the batches of a step, over all ranks.
            share: weight of its loss in the step's, where pieces are weighed here.
        """
        total, steps = micro.total, self._elastic_steps

        def backward(loss: Tensor, **kwargs: Any) -> None:
            if kwargs:
                raise UnsupportedError(
                    f"accelerator.backward(loss, {', '.join(kwargs)}=…) is not supported (LOMO's "
                    "is one): the engine runs backward"
                )
            if self._elastic_weighed:
                # A mean over nothing is NaN, and adds nothing.
                loss = loss * share if share else torch.zeros_like(loss, requires_grad=True)
            elif steps > 1 and (num_items is None or "count" in self._elastic_options):
                loss = loss / steps
            elif steps > 1:
                # in this order: their quotient alone would be rounded to float32
                loss = loss * total / num_items
            micro.backward(loss)

        return backward

    def _elastic_share(
        self, piece: Any, items: Any, num_items: Any, samples: Any, everywhere: bool
    ) -> float:
        """Return the weight of a piece's loss in the step's, as the trainer and DDP weigh it."""
        world = self.args.world_size
        if num_items is not None and "count" not in self._elastic_options:
            return ranks.share_of_items(items, num_items, world, everywhere=everywhere)
        count, own = (self._elastic_count(each).sum() for each in (piece, samples))
        return ranks.share_of_counts(count, own, self._elastic_steps, world)

    def _elastic_count(self, samples: Any) -> Tensor:
        """Return the number of loss terms of each sample."""
        found = self._elastic_rows.count(samples)
        if found is None:
            labels = functools.partial(labels_in, shifts=self._loss_shifts_labels)
            count = self._elastic_options.get("count", labels)
            found = None if count is None else count(samples)
        if found is None:
            return torch.ones(self._elastic_rows.number(samples), dtype=torch.long)
        return torch.as_tensor(found)

    def _elastic_weights(self, piece: Any) -> Mapping[str, float]:
        """Return the weights of a piece in the metrics of its batch."""
        found = self._elastic_rows.weights(piece)
        return found or {"": float(self._elastic_count(piece).sum())}

    def _elastic_verify(self, samples: Any) -> None:
        """Compare the loss of a few samples with the one put together from pieces.

        In the first step, and after the first batch that was split.
        """
        last = self.elastic.last_result
        split = last is not None and len(last.partition) > 1
        if (
            not self._elastic_options["verify"]
            or split in self._elastic_verified
            or self._elastic_rows.number(samples) < 2
        ):
            return
        if spread.is_sharded(self):  # a comparison gathers, so no rank makes another one later
            self._elastic_verified = {False, True}
        metrics = BatchMetrics(self)
        try:
            with self._elastic_rows.comparable(), self._elastic_router.left_out():
                report = self.elastic.verify(
                    self._elastic_rows.checked(self._elastic_loss), samples
                )
        except CountError:  # there are no labels in these samples: the next batch will have some
            return
        except RecoveryError as error:
            logger.warning(
                "the loss of a batch was not compared with the one of its pieces: %s", error
            )
        else:
            if not check_losses(self, report, self._elastic_rows.mismatch):
                return
        finally:
            metrics.restore()
        self._elastic_verified.add(split)

    def _elastic_loss(self, piece: Any) -> Tensor:
        """Return the loss of a piece."""
        inputs = self._elastic_rows.rows(piece)
        with torch.no_grad(), self.compute_loss_context_manager(), ranks.alone(self):
            items = self._get_num_items_in_batch([inputs], self.args.device)
            loss: Tensor = self.compute_loss(
                self.model, self._prepare_inputs(inputs), num_items_in_batch=items
            )
            if self._elastic_weighed:  # sums of pieces are compared
                count = self._elastic_count(piece).sum()
                loss = loss * count.to(loss.device) if count else torch.zeros_like(loss)
        return loss.detach().requires_grad_()  # a graph would take memory

    # ------------------------------------------------------------------ evaluation

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Run the trainer's own step on every piece.

        Returns:
            Loss, logits and labels of the whole batch, on the host where `eval_accumulation_steps`
            is set.
        """
        mbs, rows = self.elastic, self._elastic_rows
        if not mbs.enabled or rows.generated:
            with rollouts.around_step(self, mbs) if mbs.enabled else nullcontext():
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]  # the trainer is untyped here
        metrics, samples = BatchMetrics(self), rows.samples(inputs)
        rows.prepare(samples, mbs, model, self._elastic_exchange)
        asked = ranks.ask_of_items(self, inputs, self._get_num_items_in_batch)
        given = model, prediction_loss_only, ignore_keys, asked
        run = functools.partial(
            mbs.evaluate,
            functools.partial(self._elastic_predict, rows, samples, given, metrics),
            samples,
            outputs="device" if self.args.eval_accumulation_steps is None else "cpu",
            pad=-100,  # as the trainer fills up batches
        )
        alone, told = spread.generating_alone(self.model), metrics.kept
        # The other ranks come to exchange metrics. Where there are none, they would not hear of it.
        with self._elastic_exchange.told() if told else nullcontext(), metrics.undone(), alone:
            found = self._elastic_router.around(
                rows, samples, self._elastic_loss, run, training=False, told=told
            )
        losses, logits, labels, counts, notes = found
        metrics.join(notes, self._elastic_exchange, self._elastic_router.metrics)
        return oom.retry(
            "join what the pieces have predicted",
            lambda: (
                mean_loss(losses, counts),
                rows.joined(joined(logits)),
                rows.joined(joined(labels)),
            ),
            (self.args.device,),
        )

    def _elastic_predict(
        self,
        rows: Rows,
        whole: Any,
        given: tuple[Any, bool, Any, Any],
        metrics: BatchMetrics,
        piece: Any,
    ) -> Any:
        metrics.restore()
        all_rows = rows.number(piece) == rows.number(whole)
        router = self._elastic_router.of_piece(whole=all_rows)
        model, loss_only, ignored, asked = given
        answered = ranks.answered(self, asked, self._get_num_items_in_batch)
        with rows.losses_of(piece, whole), router, ranks.alone(self), answered:
            loss, logits, labels = super().prediction_step(
                model, rows.rows(piece), loss_only, ignored
            )
        note = metrics.note(self._elastic_weights(piece))
        count = self._elastic_count(piece).sum()
        return loss, rows.stored(logits), rows.stored(labels), count, note

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        """Return the log-probabilities that a reference gives a batch of pairs, piece by piece.

        `trl.DPOTrainer` asks for them before training, with `precompute_ref_log_probs=True`.
        """
        plain, rows, mbs = super().compute_ref_log_probs, self._elastic_rows, self.elastic
        if not mbs.enabled:
            return plain(model, inputs)

        def reference(piece: Any) -> Any:
            return plain(model, rows.rows(piece))

        return mbs.evaluate(reference, rows.samples(inputs), outputs="device")

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's loop; the monitor stops with it where no training runs."""
        try:
            with self._elastic_exchange:
                return super().evaluation_loop(*args, **kwargs)
        finally:
            if not self.is_in_train:
                self.elastic.close()

    # ------------------------------------------------------------------ around the loop

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's loop inside the runtime's block.

        `train` makes the model anew where there is a `model_init`, so the block begins here.
        """
        self._elastic_verified = set()
        with ExitStack() as self._elastic_open:
            self._elastic_checked()
            if spread.waits_for_shards(self):
                self._elastic_of = None  # it would keep the parameters whole
            else:
                self._elastic_open.enter_context(self.elastic)
            self._elastic_open.enter_context(self._elastic_exchange)
            return super()._inner_training_loop(*args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Prepare the model as the trainer does; make its runtime, with the sizes of a checkpoint.

        All ranks come here. They meet where a runtime is made, and a callback may use it on one.
        """
        found = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        runtime = self.elastic
        if resume_from_checkpoint is not None:
            load_sizes(self, runtime, resume_from_checkpoint)
        return found

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's optimizer, with its step guarded where that is asked for."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._elastic_options["optimizer_step"]:
            guard(getattr(optimizer, "optimizer", optimizer), lambda: self.elastic)
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the trainer does, with the runtime's figures beside each training loss."""
        result, stats = self.elastic.last_result, self.elastic.stats
        if "loss" in logs and result is not None:
            logs |= {
                "elastic/micro_batch_size": result.micro_batch_size,
                "elastic/pieces": len(result.partition),
            }
            logs |= {"elastic/ooms": stats.ooms, "elastic/replayed_samples": stats.replayed_samples}
        super().log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the trainer's files, and beside them the sizes that were learned."""
        super()._save_optimizer_and_scheduler(output_dir)
        save_sizes(self, output_dir)


@functools.cache
def elastic_trainer(trainer_class: TrainerClass) -> TrainerClass:
    """Return a subclass of a class of trainers with the runtime in it, the same each time.

    `elastic_trainer(SFTTrainer)(model, ..., elastic={...})`

    Args:
        trainer_class: `transformers.Trainer`, or a subclass: `trl.SFTTrainer`, your own.

    Raises:
        UsageError: it is no class of trainers.
        UnsupportedError: its batches mean more than their samples (other trainers of trl,
            sentence_transformers).
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise UsageError(
            f"elastic_trainer({trainer_class!r}): give a class of trainers, transformers.Trainer "
            "or a subclass"
        )
    if issubclass(trainer_class, ElasticTrainerMixin):
        return trainer_class
    return types.new_class(f"Elastic{trainer_class.__name__}", (ElasticTrainerMixin, trainer_class))  # type: ignore[return-value]  # a class made here
