"""The inputs of modules that run again in backward: they must be then as they were in forward."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from elastic_mbs.errors import ReplayUnsafeError
from elastic_mbs.rollback.saved_tensors import SavedTensorTable


class _Given(NamedTuple):
    tensor: TensorWeakRef
    version: int
    module: str  # its class


class Inputs:
    """The tensors that the modules of an attempt were given. It keeps none alive."""

    def __init__(self) -> None:
        self._given = list[_Given]()

    def note(self, module: nn.Module, *values: Any) -> None:
        """Take note of a module's inputs, before it runs."""
        for each in tree_leaves(values):
            if isinstance(each, Tensor) and not each.is_inference():
                given = _Given(TensorWeakRef(each), each._version, type(module).__name__)
                self._given.append(given)

    def check(self, table: SavedTensorTable | None) -> None:
        """Refuse to run backward after an input was edited.

        Args:
            table: the tensors that autograd has saved, where it does not keep them itself.

        Raises:
            ReplayUnsafeError: an input has changed.
        """
        gone = False
        for reference, version, module in self._given:
            tensor = reference()
            gone = gone or tensor is None  # only the table can still have it
            if tensor is not None and tensor._version != version:
                raise ReplayUnsafeError(_edited(f"an input of {module}", tensor))
        saved = table.edited() if gone and table is not None else None
        if saved is not None:
            raise ReplayUnsafeError(_edited("a tensor", saved))

    def clear(self) -> None:
        """Forget the inputs of the attempt."""
        self._given.clear()


def _edited(subject: str, tensor: Tensor) -> str:
    return (
        f"{subject} of shape {tuple(tensor.shape)} was edited in place after a module had got it "
        "that escalate= runs again in backward: edit a copy (x = x + m(x) in the place of "
        'x += m(x)), or leave "checkpoint" and "tile" out: '
        'RecoveryOptions(escalate=("logits", "offload"))'
    )
