"""The runtime in a loop that uses Hugging Face accelerate.

```python
from elastic_mbs.integrations.accelerate import elastic

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with elastic(accelerator, model) as mbs:
    for batch in loader:
        mbs.backward(loss_fn, batch)      # was: accelerator.backward(loss_fn(batch))
        optimizer.step(); optimizer.zero_grad()
```
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from elastic_mbs.errors import UnsupportedError, UsageError
from elastic_mbs.integrations.adapter import (
    NO_FP8,
    NOT_THIS_ONE,
    AdaptedMBS,
    Adapter,
    as_prepared,
)
from elastic_mbs.integrations.frameworks import ACCELERATE
from elastic_mbs.options import Options
from elastic_mbs.runtime import ElasticMBS


def elastic(
    accelerator: Accelerator, model: nn.Module | Sequence[nn.Module], **options: Unpack[Options]
) -> ElasticMBS:
    """Return the runtime for prepared models.

    Its `backward(loss_fn, batch)` stands for `accelerator.backward(loss_fn(batch))`. Everything
    else of the loop stays: `accelerator.clip_grad_norm_`, `optimizer.step()` (or
    `mbs.optimizer_step(optimizer)`), schedules, and checkpoints, to which
    `accelerator.register_for_checkpointing(mbs)` adds the sizes that were learned. `loss_fn` calls
    the prepared model.

    Args:
        accelerator: of one process, or of several with DistributedDataParallel or FSDP2; its
            `gradient_accumulation_steps` is 1.
        model: the model that `accelerator.prepare` returned, or a sequence of such models.
        **options: those of `ElasticMBS`, but for `scaler` and `GradientOptions(backward=)`, which
            are accelerate's.

    Raises:
        UsageError: an argument makes no sense, or gradients are accumulated by accelerate, too
            (also later, by a call).
        UnsupportedError: DeepSpeed, FSDP in its first version, Megatron, XLA, FP8, fp16 with
            FSDP, a tensor or a context that is spread over ranks, or a version of accelerate that
            is too old.
    """
    ACCELERATE.check()
    if not isinstance(accelerator, Accelerator):
        raise UsageError(
            f"accelerator={str(accelerator)[:80]!r} is no accelerate.Accelerator: "
            "elastic(accelerator, model)"
        )
    spread = _check_kind(accelerator)
    if accelerator.mixed_precision == "fp8":
        raise UnsupportedError(f"mixed_precision='fp8': {NO_FP8}")
    adapter = Adapter(
        "accelerate",
        as_prepared if spread else partial(accelerator.unwrap_model, keep_torch_compile=False),
        partial(_check_steps, accelerator),
        scaler=accelerator.scaler,
        steps_scaled=accelerator.scaler is not None,
        spread=spread,
    )
    return AdaptedMBS(model, adapter, options)


def _check_kind(accelerator: Accelerator) -> bool:
    """Refuse a job that is spread in a way that is not known; return whether it is spread."""
    kind = accelerator.distributed_type
    sharded = kind == DistributedType.FSDP
    if sharded and not accelerator.is_fsdp2:
        raise UnsupportedError(
            "accelerate shards the model by FullyShardedDataParallel, whose collectives a replay "
            "could not repeat: use its second version, "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_version: 2 in the file of "
            "`accelerate config`"
        )
    served = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if not sharded and kind not in served:
        raise UnsupportedError(
            f"accelerator.distributed_type is {kind.value} "
            f"({accelerator.num_processes} processes): {NOT_THIS_ONE}"
        )
    names = getattr(accelerator.parallelism_config, "non_data_parallel_dim_names", [])
    if names:
        raise UnsupportedError(
            f"parallelism_config spreads one batch over ranks ({', '.join(names)}): only data "
            "parallelism is supported, dp_shard_size= and dp_replicate_size="
        )
    return bool(kind != DistributedType.NO)


def _check_steps(accelerator: Accelerator) -> None:
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise UsageError(
            f"gradient_accumulation_steps={steps}: the runtime accumulates by itself, in pieces "
            "that fit. Give the loader the batch that the optimizer is to see, leave "
            "accelerator.accumulate() out, and set gradient_accumulation_steps=1"
        )
