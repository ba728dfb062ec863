"""What training takes: measured once, by plain steps in the world of the run, before there is a limit."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import read_losses
from elastic_mbs.batch.view import BatchView, map_tensors
from elastic_mbs.controller.partition import longest
from elastic_mbs.engine.model import Inventory
from elastic_mbs.memory.budget import on_host
from elastic_mbs.memory.oom import classify

from ..limits import MemoryLimit
from ..models.subject import Subject
from ..record import Needs
from ..reference.by_hand import view_of

TRIALS = 9
"""Halvings until a capacity is known to a few hundredths of what a piece takes."""

ON_HOST = frozenset({"shim", "rlimit"})
"""Kinds in which the host's memory is the device's: there is no other place for batches, and for the copies of the guarded optimizer step."""

LOOKED_AT = 64
"""Batches among which the one with the longest samples is looked for."""


def batch_of(subject: Subject, step: int) -> Any:
    """The batch of a step: a copy, made beside the world's count, that is gone when it is let go of."""
    with on_host():
        return map_tensors(subject.batch(step), torch.clone)


def smallest(subject: Subject) -> int:
    """The smallest micro-batch that the runtime would use: one sample, or two where a layer normalises over the batch."""
    given = subject.options.get("min_micro_batch_size")
    if given is not None:
        return int(given)
    return 2 if Inventory((subject.model,)).normalises_batch() else 1


def least(subject: Subject, steps: int) -> int:
    """Samples of the largest piece that the smallest micro-batch may come to: an odd batch in twos has a piece of three."""
    size, found = smallest(subject), 1
    for step in range(min(steps, LOOKED_AT)):
        length = view_of(subject, batch_of(subject, step)).length
        found = max(found, longest(length, size, minimum=size, align=subject.options.get("align", 1)))
    return found


def ladder(least: int, samples: int) -> list[int]:
    """Sizes to measure, rising: the smallest, a quarter, half, and the whole."""
    return sorted({min(samples, max(least, size)) for size in (least, samples // 4, samples // 2, samples)})


def longest_batch(subject: Subject, steps: int) -> tuple[Any, BatchView]:
    """The batch with the most numbers among those of the first steps."""
    best: tuple[Any, BatchView] | None = None
    for step in range(min(steps, LOOKED_AT)):
        batch = batch_of(subject, step)
        view = view_of(subject, batch)
        if best is None or view.elements * view.length > best[1].elements * best[1].length:
            best = batch, view
    assert best is not None, "there is at least one step"
    return best


def measure(world: MemoryLimit, subject: Subject, steps: int) -> Needs:
    """Runs steps of several sizes, without a limit.

    Args:
        world: open, without a limit yet.
        subject: is changed; not the one to be trained.
        steps: of the run to come.
    """
    model, optimizer = subject.model, subject.optimizer(subject.model.parameters())
    batch, view = longest_batch(subject, steps)
    counts = Counts.read(subject.options.get("count"), view)
    sizes = ladder(least(subject, steps), view.length)
    for _ in range(2):  # what libraries keep for good is there the second time, and there are gradients to add to
        _piece(world, subject, view, counts.names, sizes[0])
    world.reset_peak()
    optimizer.step()
    first, held = world.peak(), world.live()
    optimizer.zero_grad()
    _piece(world, subject, view, counts.names, sizes[0])
    peaks, seconds = [], 0.0
    for size in sizes:
        world.reset_peak()
        began = time.perf_counter()
        _piece(world, subject, view, counts.names, size)
        seconds = time.perf_counter() - began
        peaks.append(world.peak())
    world.reset_peak()
    optimizer.step()
    peaks = [max(peak, world.peak()) for peak in peaks]
    copies = _bytes_of(optimizer) if world.kind in ON_HOST else 0
    optimizer.zero_grad()
    model.zero_grad()
    samples = view.length
    del batch, view
    gc.collect()
    rest = world.live()
    floor = max(held + copies, _fetching(world, subject, steps))
    return Needs(samples, rest, sizes, [max(floor, peak) for peak in _rising(peaks)], first, held, seconds, floor)


def _bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """What the guarded step copies: parameters and state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return sum(leaf.nbytes for leaf in tree_leaves([parameters, list(optimizer.state.values())]) if isinstance(leaf, torch.Tensor))


def _fetching(world: MemoryLimit, subject: Subject, steps: int) -> int:
    """Peak while batches are made, which the runtime has no part in; they live on the device where that is the host."""
    world.reset_peak()
    for step in range(min(steps, LOOKED_AT)):
        batch_of(subject, step)
    return world.peak()


def measure_by_trial(world: MemoryLimit, subject: Subject, needs: Needs, steps: int) -> Needs:
    """The same in a world whose own account of a peak is too coarse: for each size the smallest capacity under which a piece comes through.

    Args:
        world: without a limit, and warm.
        subject: is changed; not the one to be trained.
        needs: as measured; its peaks are upper bounds.
        steps: of the run to come.
    """
    optimizer = subject.optimizer(subject.model.parameters())
    _, view = longest_batch(subject, steps)
    names = Counts.read(subject.options.get("count"), view).names
    _piece(world, subject, view, names, needs.sizes[0])
    optimizer.step()
    peaks = []
    for size, most in zip(needs.sizes, needs.peaks, strict=True):
        low, high = world.live(), most
        for _ in range(TRIALS):
            world.resize((low + high) // 2)
            if _fits(world, subject, view, names, size):
                high = (low + high) // 2
            else:
                low = (low + high) // 2
        world.resize(None)
        peaks.append(high)
    return replace(needs, peaks=[max(needs.floor, peak) for peak in _rising(peaks)])


def _fits(world: MemoryLimit, subject: Subject, view: BatchView, names: tuple[str, ...] | None, size: int) -> bool:
    try:
        _piece(world, subject, view, names, size)
    except RuntimeError as error:
        if classify(error) is None:
            raise
        return False
    return True


def _piece(world: MemoryLimit, subject: Subject, view: BatchView, names: tuple[str, ...] | None, size: int) -> None:
    piece = map_tensors(view.piece(0, size), lambda tensor: tensor.to(world.device))
    terms, _ = read_losses(subject.loss_fn(piece), names)
    total: torch.Tensor = sum(terms.values())  # type: ignore[assignment]  # at least one
    total.backward()


def _rising(peaks: Sequence[int]) -> list[int]:
    """What a smaller size took, a larger one takes at least."""
    return [max(peaks[: i + 1]) for i in range(len(peaks))]


def warm(world: MemoryLimit, subject: Subject, steps: int, size: int) -> None:
    """Runs one piece of a size."""
    _, view = longest_batch(subject, steps)
    _piece(world, subject, view, Counts.read(subject.options.get("count"), view).names, size)
    subject.model.zero_grad()
