"""Backwards that a custom function runs inside ours.

Recomputing functions (reentrant checkpointing, offloading, reversible blocks) build a graph of their own during backward and call
`torch.autograd.backward` on it. Its leaves are in no graph before that moment, so that function is wrapped while such a backward of ours runs. The
wrapper is shared by all threads and looks only into backwards that run inside one of ours: autograd numbers its running graphs, and a hook on a root
tells the number, on whatever thread the root is run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from elastic_mbs.rollback.graph import walk

Found = Callable[[tuple[torch.Tensor, ...]], None]

_lock = threading.Lock()
_users = 0
_original: Callable[..., None] = torch.autograd.backward
_ours: dict[int, Found] = {}


def _join(found: Found) -> Callable[[Any], None]:
    def hook(gradients: Any) -> None:
        _ours[torch._C._current_graph_task_id()] = found

    return hook


def _watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
    found = _ours.get(torch._C._current_graph_task_id())
    if found is not None:
        for root in (tensors,) if isinstance(tensors, torch.Tensor | GradientEdge) else tensors:
            node = root.node if isinstance(root, GradientEdge) else root.grad_fn
            if node is not None:
                found(walk(node).leaves)
                node.register_prehook(_join(found))  # there may be another one inside
    _original(tensors, *args, **kwargs)


@contextmanager
def inner_backwards(root: Node, found: Found) -> Iterator[None]:
    """Looks into the backwards inside the one that runs from `root`.

    Args:
        root: a node of our graph that is run before any that could start another backward.
        found: gets the leaves of each inner graph, before anything has committed to them.
    """
    global _users, _original  # noqa: PLW0603  # what is wrapped belongs to the process
    with _lock:
        _users += 1
        if _users == 1:
            _original, torch.autograd.backward = torch.autograd.backward, _watched
    handle = root.register_prehook(_join(found))
    try:
        yield
    finally:
        handle.remove()
        for task in [task for task, owner in _ours.items() if owner is found]:
            del _ours[task]
        with _lock:
            _users -= 1
            if _users == 0 and torch.autograd.backward is _watched:
                torch.autograd.backward = _original
