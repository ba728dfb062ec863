"""The runtime in a loop that uses Lightning Fabric.

```python
from elastic_mbs.integrations.fabric import elastic

model, optimizer = fabric.setup(model, optimizer)
with elastic(fabric, model) as mbs:
    for batch in loader:
        mbs.backward(loss_fn, batch)      # was: fabric.backward(loss_fn(batch))
        optimizer.step(); optimizer.zero_grad()
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.fabric.wrappers import is_wrapped
from torch import nn

from elastic_mbs.errors import UnsupportedError, UsageError
from elastic_mbs.integrations.adapter import (
    NO_FP8,
    NOT_THIS_ONE,
    AdaptedMBS,
    Adapter,
    as_prepared,
)
from elastic_mbs.integrations.frameworks import LIGHTNING
from elastic_mbs.options import Options
from elastic_mbs.runtime import ElasticMBS


def elastic(
    fabric: Fabric, model: nn.Module | Sequence[nn.Module], **options: Unpack[Options]
) -> ElasticMBS:
    """Return the runtime for models that Fabric has set up.

    Its `backward(loss_fn, batch)` stands for `fabric.backward(loss_fn(batch))`. Everything else of
    the loop stays: `fabric.clip_gradients`, `optimizer.step()` (or
    `mbs.optimizer_step(optimizer)`), schedules, and checkpoints, to which
    `fabric.save(path, {"model": model, "elastic": mbs})` adds the sizes that were learned.
    `loss_fn` calls the model of `fabric.setup`.

    Args:
        fabric: of one process and one device, or of several with the strategy "ddp", or with a
            `ModelParallelStrategy` that shards by `fully_shard`.
        model: the model that `fabric.setup` returned, or a sequence of such models.
        **options: those of `ElasticMBS`, but for `scaler` and `GradientOptions(backward=)`, which
            are Fabric's.

    Raises:
        UsageError: an argument makes no sense.
        UnsupportedError: DeepSpeed, FSDP in its first version (`FSDPStrategy`), XLA, FP8, or a
            version of lightning that is too old.
    """
    LIGHTNING.check()
    if not isinstance(fabric, Fabric):
        raise UsageError(
            f"fabric={str(fabric)[:80]!r} is no lightning.fabric.Fabric: elastic(fabric, model)"
        )
    strategy = fabric.strategy
    spread = type(strategy) in (DDPStrategy, ModelParallelStrategy)
    if not spread and type(strategy) is not SingleDeviceStrategy:
        raise UnsupportedError(
            f"the strategy is {type(strategy).__name__} ({fabric.world_size} processes): "
            f"{NOT_THIS_ONE}. In Fabric FSDP's second version is ModelParallelStrategy"
        )
    if "transformer-engine" in strategy.precision.precision:
        raise UnsupportedError(f"precision={strategy.precision.precision!r}: {NO_FP8}")
    scaled = getattr(strategy.precision, "scaler", None) is not None
    adapter = Adapter(
        "Fabric",
        as_prepared if spread else _unwrap,
        backward=fabric.backward,
        steps_scaled=scaled,
        spread=spread,
    )
    return AdaptedMBS(model, adapter, options)


def _unwrap(module: nn.Module) -> nn.Module:
    original = module.module if is_wrapped(module) else module
    assert isinstance(original, nn.Module)
    return original
