"""What is made to fail: a built-in case or the user's model, rebuilt from its seed each time, and what its gradients have to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import read_losses, weighted_sum
from elastic_mbs.batch.view import BatchView, map_tensors
from elastic_mbs.controller.partition import partition
from elastic_mbs.errors import UsageError

from ..models.factory import make
from ..models.steps import CASES, Case, build
from ..models.subject import naming
from ..reference.state import State, error_of, tolerance_of
from ..scenarios.model_check import check

Partition = tuple[tuple[int, int], ...]

SAME_AS = {"compiled": "mlp"}
"""Cases whose reference is another one: what is compiled must equal what is not."""


@dataclass(frozen=True)
class Target:
    """What is made to fail.

    Attributes:
        name: in tables.
        build: makes it from its seed.
        plain: makes what its reference is computed from, the same except where it is compiled.
        size: micro-batch at the start, in samples.
    """

    name: str
    build: Callable[[], Case]
    plain: Callable[[], Case]
    size: int = 4


@cache
def builtin(name: str) -> Target:
    """A built-in step by name. Its micro-batch of 4 makes two pieces, so that a failure can meet a batch that is partly accumulated."""
    if name not in CASES:
        raise UsageError(f"unknown case {name!r}; one of {', '.join(CASES)}, or your own with --model path.py:factory")
    return Target(name, partial(build, name), partial(build, SAME_AS.get(name, name)))


def of_subject(name: str, *, samples: int, seed: int = 0) -> Target:
    """The user's own model, or a built-in one of `stress.models.builtin`, on the first samples of its first batch.

    Whether it is separable is found out: the gradient of the whole batch is compared with that of the batch in pieces, without a failure. A single
    sample cannot be cut: what does not go through again ends in the floor error.

    Args:
        name: as `stress.models.factory.find` takes it.
        samples: how many; the whole batch where it has fewer.
        seed: of model and batch.

    Raises:
        UsageError: there is no such model, it cannot be cut or does not run, or two of it from the same seed differ.
    """

    def built(separable: bool = True, tolerance: float = 0.0) -> Case:
        subject = make(name, seed)
        dims = subject.options.get("dims")
        view = BatchView(subject.batch(0), dims)
        batch = view.piece(0, min(samples, view.length))
        return Case(subject.model, subject.loss_fn, batch, separable, options=dict(subject.options), tolerance=tolerance)

    check(name, seed, "cpu")
    case = built()
    length = BatchView(case.batch, case.options.get("dims")).length
    tolerance = tolerance_of(case.model)
    size = -(-length // 2)
    probe = Target(name, built, built, size)
    halves = partition(0, length, size)
    with naming(name, f"its step does not run on {samples} samples"):
        whole, again, split = (_reference_of(probe, pieces) for pieces in (((0, length),), ((0, length),), halves))
    if error_of(again.grads, whole.grads) > 0:
        raise UsageError(
            f"--model {name}: two runs from the same seed differ, so nothing can be compared: draw from torch's, Python's or numpy's stream"
        )
    separable = error_of(split.grads, whole.grads) <= tolerance
    return replace(probe, build=partial(built, separable, tolerance), plain=partial(built, separable, tolerance))


@lru_cache(maxsize=256)
def whole_batch(target: Target) -> Partition:
    """The partition of a batch that is not split."""
    case = target.plain()
    return ((0, BatchView(case.batch, case.options.get("dims")).length),)


def reference(target: Target, pieces: Partition) -> State:
    """The state after a hand-written accumulation over these pieces, without the engine and without a failure."""
    return _kept(target, pieces)


def _reference_of(target: Target, pieces: Partition) -> State:
    case = target.plain()
    view = BatchView(case.batch, case.options.get("dims"))
    counts = Counts.read(case.options.get("count"), view)
    scaler, wide = case.options.get("scaler"), case.options.get("accumulate_dtype")
    edits = map_tensors if target.name == "edited_batch" else _as_it_is
    totals: dict[Tensor, Tensor] = {}
    for start, stop in pieces:
        terms = read_losses(case.loss_fn(edits(view.piece(start, stop), torch.clone)), counts.names)[0]
        weights = counts.weights(start, stop, reduction=case.options.get("reduction", "mean"))
        if weights is None:
            continue
        loss = weighted_sum(terms, weights)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if wide is not None:
            for leaf in case.leaves():
                if leaf.grad is not None:
                    totals[leaf] = totals[leaf] + leaf.grad if leaf in totals else leaf.grad.to(wide)
                    leaf.grad = None
    for leaf, total in totals.items():
        leaf.grad = total.to(leaf.dtype)
    return State.of(case.leaves(), case.model)


def _as_it_is(batch: Any, fn: object) -> Any:
    return batch


_kept = lru_cache(maxsize=4096)(_reference_of)
