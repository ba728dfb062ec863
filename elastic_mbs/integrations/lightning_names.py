"""The names of Lightning that the integration uses, in either of its two packages.

`lightning.pytorch` and `pytorch_lightning` are the same code twice. A Trainer of one refuses
callbacks and results of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from elastic_mbs.integrations.frameworks import Framework


@dataclass(frozen=True)
class LightningNames:
    """A package of Lightning, and its classes.

    Attributes:
        namespace: `lightning.pytorch` or `pytorch_lightning`.
        framework: the distribution, and the versions that were tested.
    """

    namespace: str
    framework: Framework
    trainer: type[Any]
    single_device_strategy: type[Any]
    ddp_strategy: type[Any]
    model_parallel_strategy: type[Any]
    batch_size_finder: type[Any]
    precision: type[Any]
    mixed_precision: type[Any]
    closure: type[Any]
    closure_result: type[Any]
    is_overridden: Any

    @classmethod
    def of(cls, namespace: str, framework: Framework) -> LightningNames:
        """Return the names of one package, which is imported."""

        def found(module: str, name: str) -> Any:
            return getattr(import_module(f"{namespace}{module}"), name)

        return cls(
            namespace,
            framework,
            trainer=found("", "Trainer"),
            single_device_strategy=found(".strategies", "SingleDeviceStrategy"),
            ddp_strategy=found(".strategies", "DDPStrategy"),
            model_parallel_strategy=found(".strategies", "ModelParallelStrategy"),
            batch_size_finder=found(".callbacks", "BatchSizeFinder"),
            precision=found(".plugins", "Precision"),
            mixed_precision=found(".plugins", "MixedPrecision"),
            closure=found(".loops.optimization.automatic", "Closure"),
            closure_result=found(".loops.optimization.automatic", "ClosureResult"),
            is_overridden=found(".utilities.model_helpers", "is_overridden"),
        )

    def advice_for(self, trainer: object) -> str:
        """Return the advice for a Trainer that is not of this package."""
        return (
            f"the Trainer is {type(trainer).__module__}.{type(trainer).__qualname__}, and this "
            f"ElasticCallback works with that of {self.namespace}: import ElasticCallback from "
            f"elastic_mbs.integrations.{_OTHER[self.namespace]}"
        )


# namespace → the module of ours for the other one
_OTHER = {"lightning.pytorch": "pytorch_lightning", "pytorch_lightning": "lightning"}
