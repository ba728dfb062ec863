"""An `ElasticMBS` in the loop of a library that wraps the model and the optimizer.

Accelerate and Fabric are such libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elastic_mbs.distributed.peers import is_spread
from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.engine.outcome.result import StepResult
from elastic_mbs.engine.shared.trained_model import modules_of
from elastic_mbs.errors import UnsupportedError, UsageError
from elastic_mbs.options import GradientOptions, Options, check_names
from elastic_mbs.runtime import ElasticMBS

NOT_THIS_ONE = (
    "this kind of distributed training is not supported, because a replay in one process would "
    "leave the others waiting: use DistributedDataParallel, FSDP in its second version "
    "(fully_shard), or run one process on one device, without DeepSpeed, Megatron or XLA"
)
NO_FP8 = (
    "FP8 remembers the largest values that it has seen, and a replay could not put them back: "
    "use bf16"
)


@dataclass(frozen=True)
class Adapter:
    """The differences between frameworks.

    Attributes:
        framework: its name, for errors.
        unwrap: takes the wrappers off a module, but for those of a job of several processes.
        check: runs before each training call, and raises if the framework cannot be served.
        scaler: the scaler of the loss, where the engine may apply it.
        backward: the framework's own backward, where only that is right.
        steps_scaled: True if the step runs through a scaler of the framework's.
        spread: True in a job of several processes, with replicas or shards of the model.
    """

    framework: str
    unwrap: Callable[[nn.Module], nn.Module]
    check: Callable[[], None] = lambda: None
    scaler: torch.amp.GradScaler | None = None
    backward: Callable[[torch.Tensor], object] | None = None
    steps_scaled: bool = False
    spread: bool = False


def as_prepared(module: nn.Module) -> nn.Module:
    """Return the module as it is: the runtime finds DistributedDataParallel or shards inside."""
    return module


class AdaptedMBS(ElasticMBS):
    """The runtime behind a framework's wrappers. All else is `ElasticMBS`."""

    def __init__(self, model: Any, adapter: Adapter, options: Options) -> None:
        adapter.check()
        check_names(f"elastic() for {adapter.framework}", options, taken=("scaler",))
        gradients = options.get("gradients") or GradientOptions()
        if getattr(gradients, "backward", None) is not None:
            raise UsageError(
                f"GradientOptions(backward=) is {adapter.framework}'s part: leave it out"
            )
        if adapter.backward is not None and isinstance(gradients, GradientOptions):
            gradients = replace(gradients, backward=adapter.backward)
        modules = [adapter.unwrap(module) for module in modules_of(model)]
        if adapter.spread and not is_spread(modules):
            raise UsageError(
                "the model is in no DistributedDataParallel and not sharded by fully_shard, so the "
                f"ranks would each train their own: give the one that {adapter.framework} has "
                "prepared"
            )
        given: Options = {**options, "scaler": adapter.scaler, "gradients": gradients}
        super().__init__(modules, **given)
        self._adapter = adapter

    def backward(
        self, loss_fn: Callable[..., Any], batch: Any, /, *args: Any, **kwargs: Any
    ) -> StepResult:
        """See `ElasticMBS.backward`."""
        self._adapter.check()
        return super().backward(loss_fn, batch, *args, **kwargs)

    def backward_embeddings(
        self, embed_fn: Callable[[Any], Any], loss_fn: Callable[[Any], Any], batch: Any
    ) -> StepResult:
        """See `ElasticMBS.backward_embeddings`."""
        self._adapter.check()
        return super().backward_embeddings(embed_fn, loss_fn, batch)

    def micro_batches(
        self, batch: Any, *, name: str = "loop", own_graph: bool = True
    ) -> Iterator[MicroBatch]:
        """See `ElasticMBS.micro_batches`."""
        self._adapter.check()
        return super().micro_batches(batch, name=name, own_graph=own_graph)

    def optimizer_step(self, optimizer: Optimizer, closure: object = None) -> None:
        """Step a wrapped optimizer: the wrapper does what else it does around the step.

        See `ElasticMBS.optimizer_step`.
        """
        inner = getattr(optimizer, "optimizer", optimizer)
        if not self.enabled:
            optimizer.step()
        elif self._adapter.steps_scaled:
            raise UnsupportedError(
                f"in fp16 {self._adapter.framework} unscales, steps and updates its scaler in one "
                "go, of which no part can be made again: call optimizer.step(), or use bf16"
            )
        elif inner is optimizer or closure is not None:
            super().optimizer_step(inner, closure)
        else:
            self._step_inside(optimizer, inner)

    def _step_inside(self, wrapper: Optimizer, inner: Optimizer) -> None:
        """Run the wrapper's step with the step of the optimizer inside it guarded."""
        attributes = vars(inner)
        guard = super().optimizer_step
        # by a schedule, which counts steps
        hung = {"step": attributes["step"]} if "step" in attributes else {}

        def put_back() -> None:
            attributes.pop("step", None)
            attributes.update(hung)

        def step(closure: object = None) -> None:
            put_back()
            guard(inner, closure)

        attributes["step"] = step
        try:
            wrapper.step()
        finally:
            put_back()
