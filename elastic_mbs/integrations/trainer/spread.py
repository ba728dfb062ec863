"""The model of a trainer on several ranks: in DistributedDataParallel, or sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import DistributedType
from torch import nn

from elastic_mbs.distributed.peers import is_spread
from elastic_mbs.distributed.wrappers import wrappers_in
from elastic_mbs.errors import UnsupportedError
from elastic_mbs.integrations.trl import private

_MARK = "_is_fsdp_managed_module"  # of each module that `fully_shard` was applied to


def prepared(trainer: Any) -> tuple[Any, bool]:
    """Return the model that a trainer trains, and whether it is spread over ranks by now."""
    spread = is_spread([trainer.model_wrapped])
    return trainer.model_wrapped if spread else trainer.model, spread


def is_sharded(trainer: Any) -> bool:
    """Return whether the model is sharded by `fully_shard` by now."""
    model, spread = prepared(trainer)
    return spread and not wrappers_in([model])


def modules_of(trainer: Any) -> list[Any]:
    """Return the modules for a runtime: the model, and one to compare with that is sharded, too.

    Both gather their parameters, so a piece must not.
    """
    model, reference = prepared(trainer)[0], private.reference_of(trainer)
    both = reference is not None and is_sharded(trainer) and is_spread([reference])
    return [model, reference] if both else [model]


def waits_for_shards(trainer: Any) -> bool:
    """Return whether training is to begin with sharding the model."""
    sharding: bool = trainer.is_fsdp_enabled
    return sharding and not prepared(trainer)[1]


def check_sharding(accelerator: Any) -> None:
    """Refuse FSDP in a way that is not known."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    if not accelerator.is_fsdp2:
        raise UnsupportedError(
            "the Trainer shards the model by FullyShardedDataParallel, whose collectives a replay "
            "could not repeat: use its second version, TrainingArguments(fsdp=True, "
            "fsdp_config={'fsdp_version': 2}), or fsdp_version: 2 in the file of `accelerate "
            "config`"
        )
    if accelerator.scaler is not None:
        raise UnsupportedError(
            "fp16=True with FSDP scales losses, and the scaler would make collectives where a rank "
            "may fail alone: use bf16=True"
        )


@contextmanager
def generating_alone(model: nn.Module) -> Iterator[None]:
    """Keep a sharded model from generating in step with all ranks in a block: it would exchange.

    transformers reads a mark of `fully_shard` for that. Ranks have pieces of their own, in which
    parameters are whole.
    """
    generating = (vars(each) for each in model.modules() if hasattr(each, "generate"))
    marked = [attributes for attributes in generating if attributes.get(_MARK)]
    for attributes in marked:
        attributes[_MARK] = False
    try:
        yield
    finally:
        for attributes in marked:
            attributes[_MARK] = True
