"""Snapshots of an optimizer, so that a step that failed half-way can be rolled back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.memory.budget import on_host
from elastic_mbs.optimizer.known import is_independent, only_in_place
from elastic_mbs.rollback import copies

_SCALARS = (bool, int, float, str, type(None))
# attributes of every optimizer that have fields of their own in the snapshot
_OWN = frozenset({"state", "param_groups", "defaults"})


@dataclass
class OptimizerSnapshot:
    """The structure of an optimizer's state, and copies of the tensors that its step changes."""

    optimizer: Optimizer
    state: dict[Any, Any]
    # each group, and its entries beside its parameters
    groups: list[tuple[dict[str, Any], dict[str, Any]]]
    attributes: dict[str, Any]
    # of all attributes, so that one that the step has added can be deleted
    names: frozenset[str]
    # of each parameter, if the step may change them
    gradients: list[tuple[Tensor, Tensor | None]]
    nested: list[OptimizerSnapshot]  # of the optimizers inside a wrapper
    tensors: list[Tensor] = field(default_factory=list)  # to be copied
    complete: bool = True  # everything that the step changes is copied
    _copies: list[Tensor] = field(default_factory=list)
    _on_host: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerSnapshot:
        """Return the snapshot before a step, without copies yet.

        A step that only works in place needs none: a lack of memory cannot end it half-way.
        """
        snapshot = _structure(optimizer, foreign=not is_independent(optimizer))
        snapshot.complete = not only_in_place(optimizer)
        snapshot.tensors = _unique(_changed(snapshot)) if snapshot.complete else []
        return snapshot

    @classmethod
    def of_gradients(cls, optimizer: Optimizer) -> OptimizerSnapshot:
        """Return the snapshot before an operation that changes nothing but the gradients."""
        snapshot = _structure(optimizer, foreign=True)
        snapshot.tensors = _unique(
            gradient for _, gradient in snapshot.gradients if gradient is not None
        )
        return snapshot

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
        self._restore_structure()
        if self._copies:
            with torch.no_grad(), on_host(self._on_host):
                copies.copy(copies.group(zip(self.tensors, self._copies, strict=True)))

    def _restore_structure(self) -> None:
        state, attributes = _renewed(self.state), vars(self.optimizer)
        self.optimizer.state.clear()
        self.optimizer.state.update(state)
        for group, others in self.groups:
            for key in group.keys() - others.keys() - {"params"}:
                del group[key]
            group.update(_renewed(others))
        for name in [name for name in attributes if name not in self.names and "hook" not in name]:
            del attributes[name]
        for name, value in self.attributes.items():
            setattr(self.optimizer, name, _renewed(value))
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for snapshot in self.nested:
            snapshot._restore_structure()


def _structure(optimizer: Optimizer, *, foreign: bool) -> OptimizerSnapshot:
    """Return a snapshot without tensors.

    A foreign optimizer may change gradients, and keep state in attributes and in optimizers that it
    wraps.
    """
    kinds = (*_SCALARS, dict, list, tuple, Tensor) if foreign else _SCALARS
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OWN and "hook" not in name
    }
    return OptimizerSnapshot(
        optimizer,
        state=_renewed(dict(optimizer.state)),
        groups=[
            (group, _renewed({key: value for key, value in group.items() if key != "params"}))
            for group in optimizer.param_groups
        ],
        attributes={
            name: _renewed(value) for name, value in attributes.items() if isinstance(value, kinds)
        },
        names=frozenset(vars(optimizer)),
        gradients=[(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
        if foreign
        else [],
        nested=[
            _structure(value, foreign=True)
            for value in attributes.values()
            if isinstance(value, Optimizer)
        ]
        if foreign
        else [],
    )


def _changed(snapshot: OptimizerSnapshot) -> Iterator[Tensor]:
    """Yield the tensors that a step may change in place."""
    for group in snapshot.optimizer.param_groups:
        yield from (
            parameter
            for parameter in group["params"]
            if parameter.grad is not None or snapshot.gradients
        )
    yield from tensors_in(
        [
            snapshot.state,
            [others for _, others in snapshot.groups],
            snapshot.attributes,
            [g for _, g in snapshot.gradients],
        ]
    )
    for nested in snapshot.nested:
        yield from _changed(nested)


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _renewed(value: Any) -> Any:
    """Return new containers with the same tensors and numbers in them."""
    if isinstance(value, dict):
        renewed = copy.copy(value)
        renewed.update({key: _renewed(item) for key, item in value.items()})
        return renewed
    if type(value) in (list, tuple):
        return type(value)(map(_renewed, value))
    return value
