"""`torch.autograd.backward` from the root that nearly every piece has: one scalar of the class Tensor.

torch asks each root whether it is a tensor, a subclass, nested or an edge of the graph, and each of their gradients whether it fits: 300 byte codes
before its engine begins. Next to real work those come from memory, not from a cache, and cost 40 µs a piece, half of what we add to a loop by hand.
So this enters where the questions end. That place is torch's own and may change, so it is used in the versions that it was seen to be the same in.
Source: torch/autograd/__init__.py, `backward`; torch/autograd/graph.py, `_engine_run_backward`.
"""

from __future__ import annotations

import torch
from torch.autograd import graph

FIRST, LAST = (2, 8), (2, 13)
"""Versions of torch, both included, in which the questions can be left out."""


def is_known(version: str) -> bool:
    """Whether that is one of them."""
    major, minor = version.split(".")[:2]
    return FIRST <= (int(major), int(minor)) <= LAST


_direct = is_known(torch.__version__)


def backward(loss: torch.Tensor) -> None:
    """Does what `torch.autograd.backward(loss)` does, by that very function wherever it would do anything else."""
    if _direct and type(loss) is torch.Tensor and not (torch._C._is_torch_function_mode_enabled() or torch._C._are_functorch_transforms_active()):
        seed = torch.ones_like(loss)
        # keep_graph, create_graph, inputs: as it hands them on
        graph._engine_run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(loss)
