"""Snapshots of an optimizer, so that a step that failed half-way can be rolled back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_mbs.memory.budget import on_host
from elastic_mbs.optimizer.known import is_independent, only_in_place, with_gradient
from elastic_mbs.optimizer.reach import Reach
from elastic_mbs.rollback import copies


@dataclass
class OptimizerSnapshot:
    """The structure of an optimizer's state, and copies of the tensors that its step changes."""

    reach: Reach
    complete: bool = True  # everything that the step changes is copied
    _copies: list[Tensor] = field(default_factory=list)
    _on_host: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerSnapshot:
        """Return the snapshot before a step, without copies yet.

        A step that only works in place needs none: a lack of memory cannot end it half-way. An
        optimizer that is not torch's may change gradients, and keep state anywhere.
        """
        if not is_independent(optimizer):
            return cls(Reach(optimizer, [optimizer], deep=True))
        changed = [parameter for _, parameter in with_gradient(optimizer)]
        reach = Reach(optimizer, [optimizer, *changed], deep=False)
        return cls(reach, complete=not only_in_place(optimizer))

    @classmethod
    def of_gradients(cls, optimizer: Optimizer) -> OptimizerSnapshot:
        """Return the snapshot before an operation that changes nothing but the gradients."""
        changed = [parameter for _, parameter in with_gradient(optimizer)]
        reach = Reach(optimizer, [parameter.grad for parameter in changed], deep=False)
        reach.keep_gradients(changed)
        return cls(reach)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are copied."""
        return self.reach.tensors if self.complete else []

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def take(self, *, host: bool) -> None:
        """Copy the values, all or none of them, to the tensors' own devices or to the host."""
        self._copies, self._on_host = [], host
        with torch.no_grad(), torch.inference_mode(False), on_host(host):
            kept = [
                torch.empty_like(tensor, device="cpu" if host else tensor.device)
                for tensor in self.tensors
            ]
            copies.copy(copies.group(zip(kept, self.tensors, strict=True)))
        self._copies = kept

    def restore(self) -> None:
        """Put everything back, in place. May be called again after an error."""
        self.reach.restore()
        if self._copies:
            with torch.no_grad(), on_host(self._on_host):
                copies.copy(copies.group(zip(self.tensors, self._copies, strict=True)))
