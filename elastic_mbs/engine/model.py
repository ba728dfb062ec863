"""What the user's model consists of: its modules, its trainable leaves by name, its devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elastic_mbs.errors import UnsupportedError, UsageError


class Inventory:
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
            _refuse_wrappers(module)
        self.roots = tuple(modules)
        self._children: list[nn.Module | None] = []
        self._ids: list[int] = []
        self.modules: list[nn.Module] = []
        self.leaves: list[torch.Tensor] = []
        self.generation = 0
        self.refresh()

    def refresh(self) -> bool:
        """Looks again at which leaves are trainable; returns whether anything changed since the last time."""
        # The children of every module, compared by identity: a module may be added, or put in place of another.
        children = [child for module in self.modules for child in module._modules.values()]
        if children != self._children or not self.modules:
            unique = {id(module): module for root in self.roots for module in root.modules()}
            self.modules = list(unique.values())
            self._children = [child for module in self.modules for child in module._modules.values()]
        found = {id(leaf): leaf for module in self.modules for leaf in module._parameters.values() if leaf is not None and leaf.requires_grad}
        ids = list(found)
        if ids == self._ids:
            return False
        self._ids = ids
        self.leaves = list(found.values())
        self.generation += 1
        return True

    def thaw(self) -> None:
        """Makes the leaves trainable again that were so when the call began: a failed attempt may have frozen some and not come to thaw them."""
        for leaf in self.leaves:
            if not leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex()):  # it may have been quantised
                leaf.requires_grad_()

    def forget(self) -> None:
        """Makes the next `refresh` find everything new."""
        self._ids = []

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


def _refuse_wrappers(module: nn.Module) -> None:
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
