"""Autograd's graph: a census of its leaves, backwards inside a backward, and a failed one's rest.

Source: docs/internals/autograd.md#census and #hidden-leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch.autograd.graph import GradientEdge, Node


@dataclass(frozen=True)
class Census:
    """The findings of one walk over a graph.

    Attributes:
        leaves: every leaf that a backward from the root reaches.
        normalises_batch: a node normalises with statistics of the piece, so its samples depend on
            each other.
        custom: functions written in Python. Their backward can run another one, which the walk
            does not see.
    """

    leaves: tuple[torch.Tensor, ...]
    normalises_batch: bool
    custom: frozenset[str] = frozenset()


_GROUPED = "elastic_mbs: over a group of samples that are never apart"


def mark_grouped(normalised: torch.Tensor) -> torch.Tensor:
    """Mark the node of a tensor so that walks treat it as independent of the split.

    Args:
        normalised: a tensor that was normalised over a group of samples that are never apart.

    Returns:
        The same tensor.
    """
    if not torch.compiler.is_compiling() and normalised.grad_fn is not None:
        notes: Any = normalised.grad_fn.metadata  # torch's stubs take it for a method
        notes[_GROUPED] = True
    return normalised


def walk(root: Node) -> Census:
    """Walk the graph from `root` once (0.6 ms for 900 nodes)."""
    seen: set[Node] = {root}
    stack = [root]
    leaves: list[torch.Tensor] = []
    normalises_batch = False
    custom: set[str] = set()
    while stack:
        node = stack.pop()
        name = node.name()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            custom.add(name)
        elif name == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]  # torch's stubs lack this attribute of the node
        if "BatchNorm" in name:
            notes: Any = node.metadata
            # Frozen statistics (eval mode) leave the samples independent. Where a backend does not
            # tell, the statistics of the batch are assumed.
            normalises_batch = normalises_batch or (
                _GROUPED not in notes and bool(getattr(node, "_saved_training", True))
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return Census(tuple(leaves), normalises_batch, frozenset(custom))


def has_hook(leaf: torch.Tensor) -> bool:
    """Return whether a hook sees or changes this leaf's gradient, piece by piece."""
    return bool(leaf._backward_hooks) or bool(leaf._post_accumulate_grad_hooks)


# ---------------------------------------------------------------------- after a failed backward


def drain(leaves: Iterable[torch.Tensor]) -> None:
    """Run a trivial backward on each device of the leaves, which waits for autograd's workers.

    With leaves on several devices an error reaches the caller while another device's worker can
    still accumulate. There is one worker per device, and it takes its tasks in order. The backward
    makes only views, so it takes no memory.
    """
    one_each = {leaf.device: leaf for leaf in leaves}
    if len(one_each) > 1:
        with torch.inference_mode(False), torch.enable_grad():
            for leaf in one_each.values():
                seed = leaf.detach()
                source = leaf.detach().requires_grad_()
                torch.autograd.grad(source.view_as(source), source, seed)


_LEAF, _SEED = torch.zeros((), device="cpu", requires_grad=True), torch.zeros((), device="cpu")


def drop_unrun() -> None:
    """Drop the tasks that a failed backward has left in this thread's queue, without allocating.

    On a CPU autograd runs in the caller's thread. An error leaves the branches that were ready in
    its queue, with their activations, until the thread's next backward. Where autograd refuses to
    run at all (a forked child), the queue stays.
    """
    with suppress(RuntimeError):
        torch.autograd.grad(_LEAF, _LEAF, _SEED)


# ---------------------------------------------------------------------- backwards inside a backward

Found = Callable[[tuple[torch.Tensor, ...]], None]


class _User:
    """A block of `inner_backwards` that is open, with its function."""

    def __init__(self, found: Found) -> None:
        self.found = found


# Weak, because an interrupt can end a block without its last lines. Without a lock, which an
# interrupt would leave held.
_users: WeakSet[_User] = WeakSet()
_ours: WeakValueDictionary[int, _User] = WeakValueDictionary()  # by the number of a running graph
_original: Callable[..., None] = torch.autograd.backward


def _join(user: _User) -> Callable[[Any], None]:
    user_of = ref(user)

    def hook(gradients: Any) -> None:
        there = user_of()
        if there is not None:
            _ours[torch._C._current_graph_task_id()] = there

    return hook


def _watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
    if not _users:  # nobody has put it back
        _unwrap()
    user = _ours.get(torch._C._current_graph_task_id())
    if user is not None:
        for root in (tensors,) if isinstance(tensors, torch.Tensor | GradientEdge) else tensors:
            node = root.node if isinstance(root, GradientEdge) else root.grad_fn
            if node is not None:
                user.found(walk(node).leaves)
                node.register_prehook(_join(user))  # another one can run inside it
    _original(tensors, *args, **kwargs)


def _wrap() -> None:
    global _original  # noqa: PLW0603  # the wrapped function belongs to the process
    now = torch.autograd.backward  # once: another thread can do the same
    if now is not _watched:
        _original = now
        torch.autograd.backward = _watched


def _unwrap() -> None:
    if torch.autograd.backward is _watched:
        torch.autograd.backward = _original
    if _users:  # another thread has begun meanwhile
        _wrap()


@contextmanager
def inner_backwards(root: Node, found: Found) -> Iterator[None]:
    """Find the leaves of backwards that a custom function runs inside the one from `root`.

    Recomputing functions (reentrant checkpointing, offloading, reversible blocks) build a graph
    during backward and call `torch.autograd.backward` on it. That function is wrapped while such a
    backward runs, for all threads. The wrapper looks only into backwards inside one from here:
    autograd numbers its running graphs, and a hook on a root notes the number, on whatever thread
    the root runs.

    A batch that starts over empties the gradients of these leaves, so they have to be known even
    where they are no parameters of the model.

    Args:
        root: the node where the outer backward begins.
        found: gets the leaves of each inner backward, before one of them has a commit.
    """
    user, handle = _User(found), None
    try:
        _users.add(user)
        _wrap()
        handle = root.register_prehook(_join(user))
        yield
    finally:
        _users.discard(user)
        if not _users:
            _unwrap()
        if handle is not None:
            handle.remove()
