"""What is known of a subject before it is trained: whether it is made the same each time, and what training on whole batches comes to."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elastic_mbs.batch import BatchView, map_tensors
from elastic_mbs.errors import UsageError

from ..by_hand import accumulate, view_of
from ..factory import make
from ..subject import Subject
from .needs import batch_of
from .reference import Curve, norm_of, rounding_of, start_streams, state_of, train_by_hand, weight_difference

KEPT = 8


def check(model: str, seed: int, device: str) -> Subject:
    """Makes a subject twice, compares, and runs one step of one of them; returns the other.

    Raises:
        UsageError: two of one seed differ, or its loss function fails on its first batch.
    """
    first, second = make(model, seed, device), make(model, seed, device)
    if weight_difference(state_of(first.model), state_of(second.model)) > 0:
        raise UsageError(
            f"--model {model}: two models made from seed {seed} differ; draw its weights from torch's, Python's or numpy's random numbers"
        )
    if not _same(first, second):
        raise UsageError(f"--model {model}: two first batches made from seed {seed} differ; make batches from their number, or from seeded streams")
    view = _first_batch(second, device)
    if view.length < 2:
        raise UsageError(f"--model {model}: batches of one sample cannot be split; give it batches of at least two")
    try:
        accumulate(second, view, [[0, view.length]])
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"--model {model}: its loss function fails on its first batch: {type(error).__name__}: {error}".splitlines()[0]) from error
    if norm_of(second.model) == 0:
        raise UsageError(f"--model {model}: the gradient of its first batch is zero, so nothing could be compared")
    return first


def _first_batch(subject: Subject, device: str) -> BatchView:
    return view_of(subject, map_tensors(batch_of(subject, 0), lambda tensor: tensor.to(device)))


def _same(first: Subject, second: Subject) -> bool:
    mine, other = ([leaf for leaf in tree_leaves(batch_of(subject, 0)) if isinstance(leaf, Tensor)] for subject in (first, second))
    return len(mine) == len(other) and all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@lru_cache(maxsize=KEPT)
def separable(model: str, seed: int, device: str) -> bool:
    """Whether the gradient of a batch is the same whole and in two halves."""
    found = []
    for parts in (1, 2):
        subject = make(model, seed, device)
        view = _first_batch(subject, device)
        start_streams(seed)
        half = view.length // 2
        accumulate(subject, view, [[0, view.length]] if parts == 1 else [[0, half], [half, view.length]])
        with torch.no_grad():
            gradients = {name: p.grad.detach() for name, p in subject.model.named_parameters() if p.grad is not None}
        found.append(gradients | {name: buffer for name, buffer in subject.model.named_buffers() if buffer.is_floating_point()})
    return weight_difference(found[0], found[1]) <= rounding_of(subject.model)[1].weight


@lru_cache(maxsize=KEPT)
def whole(model: str, seed: int, device: str, steps: int) -> Curve:
    """Training on whole batches."""
    return train_by_hand(make(model, seed, device), [None] * steps, seed)
