"""Refusals of trainers that would train wrongly on pieces of a batch, with the way out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import Trainer
from transformers.training_args import ParallelMode

from elastic_mbs.errors import UnsupportedError, UsageError
from elastic_mbs.integrations.frameworks import TRL
from elastic_mbs.integrations.rows import ctc_reduction
from elastic_mbs.integrations.trainer.packed import makes_one_row
from elastic_mbs.integrations.trainer.router import check_router
from elastic_mbs.integrations.trainer.spread import check_sharding
from elastic_mbs.integrations.trl.kinds import check_kind
from elastic_mbs.integrations.trl.private import SUPPORTED, kind_of
from elastic_mbs.rehearsal.verify import VerifyReport

# relative difference of two losses that is rounding: in half precision or TF32, and otherwise
_ROUGH, _FINE = 2e-2, 1e-4
_SERVED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
    ParallelMode.NOT_PARALLEL,
    ParallelMode.DISTRIBUTED,
    None,
)


def check_class(cls: type, mixin: type) -> None:
    """Refuse a class whose batches mean more than their samples, or with a misplaced mixin."""
    trainers = [
        base for base in cls.__mro__ if issubclass(base, Trainer) and not issubclass(base, mixin)
    ]
    if trainers and cls.__mro__.index(trainers[0]) < cls.__mro__.index(mixin):
        name = trainers[0].__name__
        raise UsageError(
            f"{cls.__name__}: {mixin.__name__} goes left of {name}, or its methods are never "
            f"called: class X({mixin.__name__}, {name})"
        )
    if any(base.__module__.startswith("trl.") for base in trainers):
        TRL.check()
    for base in trainers:
        package = base.__module__.partition(".")[0]
        if package == "sentence_transformers":
            raise UnsupportedError(
                f"{base.__name__}: the losses of sentence_transformers compare the samples of a "
                "batch with each other, so pieces have another loss. Write the loop with "
                "mbs.backward_embeddings(embed_fn, loss_fn, batch), which is exact"
            )
        if package == "trl" and base.__name__ not in (*SUPPORTED, "_BaseTrainer"):
            raise UnsupportedError(
                f"{base.__name__}: of trl {', '.join(SUPPORTED)} are supported. What others keep "
                "between steps, and what their losses are means over, is not known. Use it as it "
                "is, with a smaller per_device_train_batch_size"
            )


def check_trainer(trainer: Any, options: Mapping[str, Any]) -> None:
    """Refuse options of a trainer under which a batch cannot be cut and replayed.

    Args:
        trainer: the trainer.
        options: those of `elastic=`.
    """
    _check_processes(trainer)
    optimizer_step = options["optimizer_step"]
    _check_arguments(trainer.args, trainer.accelerator, optimizer_step=optimizer_step)
    if makes_one_row(trainer.data_collator):
        _check_packed(trainer, options)
    check_kind(trainer, options)
    check_router(trainer)
    if options.get("enabled", True) and ctc_reduction(trainer.model) == "sum":
        raise UnsupportedError(
            f"{type(trainer.model).__name__} adds up the losses of a batch "
            "(config.ctc_loss_reduction='sum'), and the trainer's losses are means: set "
            'model.config.ctc_loss_reduction = "mean", the mean over samples, and scale the '
            "learning rate. The sum itself is exact in a loop of your own, with "
            'ElasticMBS(model, reduction="sum")'
        )


def check_losses(trainer: Any, report: VerifyReport, mismatch: str) -> bool:
    """Refuse a loss that is not the one put together from pieces, or reads what they leave.

    Args:
        trainer: the trainer.
        report: both losses.
        mismatch: what to do where they differ.

    Returns:
        Whether they were compared. A loss of NaN or infinity is the user's to see.

    Raises:
        UsageError: they differ.
    """
    if not math.isfinite(report.whole):
        return False
    half = (
        trainer.args.bf16
        or trainer.args.fp16
        or any(leaf.dtype.itemsize < 4 for leaf in trainer.model.parameters())
    )
    rough = half or torch.get_float32_matmul_precision() != "highest"
    near = (_ROUGH if rough else _FINE) * abs(report.whole)
    if report.moved > near:
        raise UsageError(f'{report}\n  Where that is meant: elastic={{"verify": False}}')
    if report.ok or abs(report.whole - report.split) <= near:
        return True
    raise UsageError(
        f'{report}\n  {mismatch}. Where the difference is meant: elastic={{"verify": False}}'
    )


def _check_arguments(args: Any, accelerator: Any, *, optimizer_step: bool) -> None:
    if args.auto_find_batch_size:
        raise UsageError(
            "auto_find_batch_size=True starts again with another batch when memory runs out, and "
            "this trainer keeps the batch: leave it out"
        )
    if optimizer_step and accelerator.scaler is not None:
        raise UnsupportedError(
            "optimizer_step=True does not go with fp16=True, where accelerate steps through its "
            "own scaler: use bf16=True"
        )
    if getattr(args, "activation_offloading", False):
        raise UnsupportedError(
            "activation_offloading=True keeps what a failed forward has offloaded, and refuses "
            "the next one. Leave it out, and have it done where it is needed: "
            'elastic={"recovery": RecoveryOptions(escalate=("offload",))}'
        )


def _check_processes(trainer: Any) -> None:
    args, accelerator = trainer.args, trainer.accelerator
    if args.parallel_mode is ParallelMode.NOT_DISTRIBUTED:
        raise UnsupportedError(
            f"the Trainer would put the model on {args.n_gpu} GPUs by nn.DataParallel, whose "
            "replicas cannot be replayed: CUDA_VISIBLE_DEVICES=0 shows it one"
        )
    kinds = (
        accelerator.distributed_type,
        args.parallel_mode,
        getattr(accelerator, "parallelism_config", None),
    )
    spread = [kind for kind in kinds if kind not in _SERVED]
    if spread:
        raise UnsupportedError(
            f"distributed training ({getattr(spread[0], 'value', type(spread[0]).__name__)}) is "
            "not supported, because a replay in one process would leave the others waiting: use "
            "DistributedDataParallel (torchrun), FSDP in its second version, or one process, "
            "without DeepSpeed and parallelism_config"
        )
    check_sharding(accelerator)


def _check_packed(trainer: Any, options: Mapping[str, Any]) -> None:
    kind = kind_of(type(trainer))
    if kind not in (None, "SFTTrainer"):
        raise UnsupportedError(
            f"a {kind} on batches without padding is not supported: say padding_free=False"
        )
    policy = options.get("policy")
    if "count" in options or "pieces" in options or getattr(policy, "max_tokens", None) is not None:
        raise UsageError(
            "count=, pieces= and max_tokens= do not go with batches without padding, whose labels "
            "are counted and whose samples stay in their order: leave them out, and say "
            "max_micro_batch_size= where a piece must not be larger"
        )
