"""What is known of torch.optim's optimizers: which of their steps allocate nothing, and which may be made one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# torch.optim's classes that treat each parameter by itself; LBFGS does not
_INDEPENDENT = {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adafactor"}
_INDEPENDENT |= {"Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD", "Muon"}


def with_gradient(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """(group, parameter) for every parameter that a step changes."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter


def is_independent(optimizer: Optimizer) -> bool:
    """Whether it is exactly one of torch's classes that treat each parameter by itself: a subclass may do anything."""
    name = type(optimizer).__name__
    return name in _INDEPENDENT and getattr(torch.optim, name, None) is type(optimizer)


def one_by_one(optimizer: Optimizer) -> bool:
    """Whether its parameters may be stepped one after the other with the same result."""
    own = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    # one that is listed twice is stepped twice
    return is_independent(optimizer) and len(own) == len(set(own))


def has_state(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether a step has left a state for it: a dict with something in it for torch's optimizers, anything for others."""
    state = optimizer.state.get(parameter)
    return state is not None and not (isinstance(state, dict) and not state)


def only_in_place(optimizer: Optimizer) -> bool:
    """Whether a step allocates nothing: fused, with its state there."""
    return is_independent(optimizer) and all(
        group.get("fused") is True
        and has_state(optimizer, parameter)
        and parameter.grad is not None
        and not parameter.grad.is_sparse
        for group, parameter in with_gradient(optimizer)
    )
