"""The user's model: its modules, its trainable leaves by name, its devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from elastic_mbs.errors import UnsupportedError, UsageError


class TrainedModel:
    """The modules behind one runtime. `refresh` is called once a call and is cheap when nothing changed.

    Args:
        modules: the models of one training step; a tied or shared part is counted once.

    Raises:
        UsageError: there is no module, or something else was given.
        UnsupportedError: a wrapper that runs collectives or replicas inside forward and backward.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        if not modules:
            raise UsageError("model= is an empty sequence; give the module (or the modules) that the step trains")
        for module in modules:
            if not isinstance(module, nn.Module):
                raise UsageError(f"model= has a {type(module).__name__} in it; give a torch.nn.Module or a sequence of them")
            _check_wrappers(module)
        self.roots = tuple(modules)
        self.modules: list[nn.Module] = []
        self.leaves: list[torch.Tensor] = []
        self.generation = 0  # counts the changes of the set of leaves
        self._children: list[nn.Module | None] = []
        self._parameters: list[nn.Parameter | None] = []
        self._trainable: list[bool] = []
        self.refresh()

    def refresh(self) -> bool:
        """Looks again at which leaves are trainable; returns whether anything changed since the last time.

        Runs in every call, so it runs no line of Python for each module or parameter while nothing has changed.
        """
        # The children of every module, compared by identity: a module can be added, or put in place of another.
        children = _values(_MODULES, self.modules)
        if children != self._children or not self.modules:
            self.modules = list({id(module): module for root in self.roots for module in root.modules()}.values())
            self._children = _values(_MODULES, self.modules)
        parameters = _values(_PARAMETERS, self.modules)
        trainable = list(map(getattr, parameters, repeat("requires_grad"), repeat(False)))
        same = trainable == self._trainable and len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))
        if same and self.generation:
            return False
        self._parameters, self._trainable = parameters, trainable
        leaves = list({id(leaf): leaf for leaf in parameters if leaf is not None and leaf.requires_grad}.values())
        if self.generation and len(leaves) == len(self.leaves) and all(map(is_, leaves, self.leaves)):
            return False
        self.leaves = leaves
        self.generation += 1
        return True

    def thaw(self) -> None:
        """Makes the leaves trainable again that were so when the call began: a failed attempt can have frozen some and not thawed them again."""
        for leaf in self.leaves:
            if not leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex()):  # it may have been quantised
                leaf.requires_grad_()

    def forget(self) -> None:
        """Makes the next `refresh` find everything new."""
        self._trainable, self.leaves = [], []

    def name_of(self, leaf: torch.Tensor) -> str:
        """The leaf's parameter name, or its shape when it is not the model's."""
        for root in self.roots:
            for name, parameter in root.named_parameters():
                if parameter is leaf:
                    return f"parameter {name!r}"
        return f"a leaf of shape {tuple(leaf.shape)} outside the model"

    def devices(self) -> list[torch.device]:
        """The devices of the parameters and buffers, in the order met; the CPU for a model without either."""
        found = dict.fromkeys(
            tensor.device
            for module in self.modules
            for owner in (module._parameters, module._buffers)
            for tensor in owner.values()
            if tensor is not None
        )
        return list(found) or [torch.device("cpu")]

    def normalises_batch(self) -> bool:
        """Whether a BatchNorm in the model would use the statistics of the batch now."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and (m.training or m.running_mean is None) for m in self.modules)


_MODULES, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")


def _values(owned: attrgetter[dict[str, Any]], modules: Iterable[nn.Module]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, map(owned, modules))))


def _check_wrappers(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.modules.lazy.LazyModuleMixin) and part.has_uninitialized_params():
            raise UsageError(
                f"{type(part).__name__} has parameters without a shape yet: run one batch through the model first (under torch.no_grad()), "
                "as the optimizer needs too"
            )
        kind = type(part).__name__
        if isinstance(part, nn.DataParallel):
            raise UnsupportedError(
                "nn.DataParallel runs replicas in threads, and an error in one leaves the others half done; use one process per device"
            )
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel") or kind.startswith("FSDP"):
            raise UnsupportedError(
                f"{kind} runs collectives inside forward and backward; one rank's replay would leave the others waiting. "
                "Distributed training is not supported yet"
            )


def modules_of(model: object) -> Sequence[nn.Module]:
    """The modules that `model=` stands for.

    Raises:
        UsageError: it is neither a module nor a sequence.
    """
    if isinstance(model, nn.Module):
        return [model]
    if isinstance(model, Sequence) and not isinstance(model, str):
        return model
    raise UsageError(
        f"model={model!r} is a {type(model).__name__}; give a torch.nn.Module or a sequence of them (a callable only to elastic_step, for methods)"
    )
