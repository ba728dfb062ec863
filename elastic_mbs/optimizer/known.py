"""What is known of torch.optim's optimizers: what a step of each allocates, and whether its parameters may be stepped one by one.

Figures are elements, in units of the parameter: what a first step creates and keeps, and what every step needs for a while. The second depends on the
implementation: `foreach` works on all parameters at once, the plain loop on one after the other, `fused` in place. test_known.py measures
both. For optimizers that are not torch's nothing is known; what their steps took is learned (`elastic_mbs.optimizer.guarded_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Need:
    """Bytes that a step takes.

    Attributes:
        state: what it creates and keeps.
        temporaries: what it needs besides, at its peak.
    """

    state: int
    temporaries: int

    @property
    def total(self) -> int:
        """Both."""
        return self.state + self.temporaries


@dataclass(frozen=True)
class _Known:
    """Parameter-sized tensors of one class.

    Attributes:
        state: created by the first step.
        foreach: temporaries of the implementation over lists, for all parameters at once.
        factored: whether the state of a matrix is a row and a column.
    """

    state: Callable[[Group], int]
    foreach: Callable[[Group], int] = lambda group: 1
    factored: bool = False


LOOP = 4
"""Temporaries of the plain loop, of the size of one parameter: no optimizer of torch's has more."""


def _sgd(group: Group) -> int:
    return int(any(group.get(name) for name in ("weight_decay", "maximize", "nesterov")))


_KNOWN: dict[str, _Known] = {
    "SGD": _Known(lambda g: int(bool(g["momentum"])), _sgd),
    "Adam": _Known(lambda g: 2 + int(g["amsgrad"])),
    "AdamW": _Known(lambda g: 2 + int(g["amsgrad"])),
    "Adamax": _Known(lambda g: 2),
    "NAdam": _Known(lambda g: 2, lambda g: 2),
    "RAdam": _Known(lambda g: 2),
    "Adadelta": _Known(lambda g: 2, lambda g: 2),
    "Adagrad": _Known(lambda g: 0, lambda g: 2),
    "RMSprop": _Known(lambda g: 1 + int(bool(g["momentum"])) + int(g["centered"])),
    "Rprop": _Known(lambda g: 2, lambda g: 2),
    "ASGD": _Known(lambda g: 1),
    "SparseAdam": _Known(lambda g: 2),
    "Adafactor": _Known(lambda g: 1, factored=True),
    "Muon": _Known(lambda g: 1),
}
"""torch.optim's optimizers that treat each parameter by itself, by name. LBFGS does not."""

_MANY = 2
"""Parameter-sized temporaries that are reckoned with for an optimizer that nothing is known of."""


def with_gradient(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """(group, parameter) for every parameter that a step would change."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether it is exactly one of torch's classes that treat each parameter by itself: a subclass may do anything."""
    return _known(optimizer) is not None


def one_by_one(optimizer: Optimizer) -> bool:
    """Whether its parameters may be stepped one after the other with the same result."""
    own = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return is_torchs(optimizer) and len(own) == len(set(own))  # one that is there twice is stepped twice


def has_state(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether a step has left a state for it: a dict with something in it, with torch's optimizers, and anything with others."""
    state = optimizer.state.get(parameter)
    return state is not None and not (isinstance(state, dict) and not state)


def only_in_place(optimizer: Optimizer) -> bool:
    """Whether a step allocates nothing: fused, with its state there."""
    return (
        _known(optimizer) is not None
        and all(group.get("fused") is True for group in optimizer.param_groups)
        and all(has_state(optimizer, parameter) and not parameter.grad.is_sparse for _, parameter in with_gradient(optimizer))  # type: ignore[union-attr]  # it has one
    )


def need_of(optimizer: Optimizer, learned: int | None = None) -> Need:
    """What the next step will take.

    Args:
        optimizer: with its gradients there.
        learned: bytes that such a step took before, for an optimizer that is not torch's.
    """
    known = _known(optimizer)
    state = together = largest = 0
    for group, parameter in with_gradient(optimizer):
        size = parameter.numel() * parameter.element_size()
        if known is None:
            together += _MANY * size
            continue
        if not has_state(optimizer, parameter):
            state += known.state(group) * (_row_and_column(parameter) if known.factored else size)
        if group.get("fused") is True:
            continue
        if takes_lists(group):
            together += known.foreach(group) * size
        else:
            largest = max(largest, LOOP * size)
    if known is None and learned is not None:
        return Need(0, learned)
    return Need(state, max(together, largest))


def _row_and_column(parameter: Tensor) -> int:
    """Bytes of a factored state."""
    size = parameter.numel() * parameter.element_size()
    return size if parameter.dim() < 2 else size // parameter.shape[-1] + size // parameter.shape[-2]


def _known(optimizer: Optimizer) -> _Known | None:
    name = type(optimizer).__name__
    return _KNOWN.get(name) if getattr(torch.optim, name, None) is type(optimizer) else None


def takes_lists(group: Group) -> bool:
    """Whether torch takes the implementation over lists: where it is asked to, and on an accelerator unless it is asked not to."""
    asked = group.get("foreach")
    if asked is None and "foreach" in group:
        return all(parameter.device.type != "cpu" for parameter in group["params"])
    return bool(asked)
