"""Facts about torch.optim's optimizers.

Some of their steps allocate nothing, and some may be made one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# torch.optim's classes that update each parameter independently; LBFGS does not
_INDEPENDENT = {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adafactor"}
_INDEPENDENT |= {"Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD", "Muon"}


def with_gradient(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield (group, parameter) for every parameter that a step changes."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter


def is_independent(optimizer: Optimizer) -> bool:
    """Return whether it is one of torch's classes that update each parameter independently.

    A subclass does not count: its step may do anything.
    """
    name = type(optimizer).__name__
    return name in _INDEPENDENT and getattr(torch.optim, name, None) is type(optimizer)


def one_by_one(optimizer: Optimizer) -> bool:
    """Return whether stepping its parameters one after the other gives the same result."""
    own = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    # one that is listed twice is stepped twice
    return is_independent(optimizer) and len(own) == len(set(own))


def has_state(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether a step has left a state for the parameter.

    For torch's optimizers that is a dict that is not empty, for others anything.
    """
    state = optimizer.state.get(parameter)
    return state is not None and not (isinstance(state, dict) and not state)


def only_in_place(optimizer: Optimizer) -> bool:
    """Return whether a step allocates nothing: it is fused, and its state exists."""
    return is_independent(optimizer) and all(
        group.get("fused") is True
        and has_state(optimizer, parameter)
        and parameter.grad is not None
        and not parameter.grad.is_sparse
        for group, parameter in with_gradient(optimizer)
    )
