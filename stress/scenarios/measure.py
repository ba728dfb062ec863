"""Needs of training: measured once, by plain steps under the kind of limit of the run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from elastic_mbs.batch.pieces import longest
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.memory.budget import on_host
from elastic_mbs.memory.oom import classify
from elastic_mbs.optimizer.known import one_by_one, with_gradient

from ..limits import MemoryLimit, in_child
from ..models.subject import Subject
from ..record import Needs
from ..reference.by_hand import view_of
from ..reference.samples import Samples, losses_in, mapped

TRIALS = 9  # halvings until a capacity is known to a few hundredths of a piece's need
LOOKED_AT = 64  # batches among which the longest samples are looked for


def batch_of(subject: Subject, step: int, device: torch.device | str | None = None) -> Any:
    """Return a copy of the step's batch, on a device.

    It is made on the host, and not counted by a budget.
    """
    with on_host():
        batch = mapped(subject.batch(step), torch.clone)
    return batch if device is None else mapped(batch, lambda tensor: tensor.to(device))


def _views(subject: Subject, steps: int) -> Iterator[Samples]:
    return (view_of(subject, batch_of(subject, step)) for step in range(min(steps, LOOKED_AT)))


def smallest(subject: Subject) -> int:
    """Return the smallest micro-batch that the runtime would use.

    It is one sample, or two where a layer normalises over the batch.
    """
    given = subject.options.get("min_micro_batch_size")
    if given is not None:
        return int(given)
    return 2 if TrainedModel((subject.model,)).normalises_batch() else 1


def least(subject: Subject, steps: int) -> int:
    """Return the samples of the largest piece at the smallest micro-batch.

    An odd batch in twos has a piece of three.
    """
    size = smallest(subject)
    align = subject.options.get("align", 1)
    return max(
        longest(view.length, size, minimum=size, align=align) for view in _views(subject, steps)
    )


def longest_batch(subject: Subject, steps: int) -> Samples:
    """Return the batch with the most numbers among those of the first steps."""
    return max(_views(subject, steps), key=lambda view: view.elements * view.length)


def measure(memory: MemoryLimit, subject: Subject, steps: int) -> Needs:
    """Run pieces of several sizes and optimizer steps; `memory` is open, without a limit yet."""
    optimizer = subject.optimizer(subject.model.parameters())
    pieces = _Pieces(memory, subject, steps)
    samples = pieces.view.length
    smallest_piece = least(subject, steps)
    sizes = sorted(
        {
            min(samples, max(smallest_piece, size))
            for size in (smallest_piece, samples // 4, samples // 2, samples)
        }
    )
    # The second time, memory that libraries keep for good is there, and so are gradients to add to.
    for _ in range(2):
        pieces.run(sizes[0])
    first = pieces.peak(optimizer.step)
    held = memory.live()
    optimizer.zero_grad()
    pieces.run(sizes[0])
    peaks = [pieces.peak(partial(pieces.run, size)) for size in sizes]
    if memory.kind == "rlimit":
        # The kernel keeps no peak of mapped memory, and a size that runs for the first time under
        # pressure can crash.
        memory.warm(pieces.run, range(min(smallest(subject), samples), samples + 1))
        peaks = [pieces.least_room(size, most) for size, most in zip(sizes, peaks, strict=True)]
    later = pieces.peak(optimizer.step)
    # It is copied where the host's memory is the device's.
    guarded = tree_leaves([optimizer.param_groups, list(optimizer.state.values())])
    copies = (
        sum(leaf.nbytes for leaf in guarded if isinstance(leaf, torch.Tensor))
        if in_child(memory.kind)
        else 0
    )
    optimizer.zero_grad()
    subject.model.zero_grad()
    del pieces
    gc.collect()
    rest = memory.live()
    memory.reset_peak()
    # Batches are made outside the runtime, and on the device where that is the host.
    for step in range(min(steps, LOOKED_AT)):
        batch_of(subject, step)
    floor = max(held + copies, memory.peak())
    del optimizer, guarded  # with its state
    gc.collect()
    singly = _Pieces(memory, subject, steps).singly(sizes[0])
    return Needs(
        samples,
        rest,
        sizes,
        list(accumulate((max(floor, later, peak) for peak in peaks), max)),
        first,
        held,
        floor,
        singly,
    )


class _Pieces:
    """Pieces of the longest batch, run forward and backward."""

    def __init__(self, memory: MemoryLimit, subject: Subject, steps: int) -> None:
        self._memory = memory
        self._subject = subject
        self.view = longest_batch(subject, steps)

    def run(self, size: int) -> None:
        piece = mapped(self.view.piece(0, size), lambda tensor: tensor.to(self._memory.device))
        count = self._subject.options.get("count")
        names = list(count) if isinstance(count, Mapping) else None
        terms = losses_in(self._subject.loss_fn(piece), names)
        torch.stack([term.double() for term in terms.values()]).sum().backward()

    def peak(self, run: Callable[[], object]) -> int:
        self._memory.reset_peak()
        run()
        return self._memory.peak()

    def singly(self, size: int) -> int:
        """Return the peak of an optimizer's first steps that go one parameter at a time."""
        optimizer = self._subject.optimizer(self._subject.model.parameters())
        if not one_by_one(optimizer):
            return 0
        self.run(size)
        steps = list(with_gradient(optimizer))
        self._memory.reset_peak()
        for group, parameter in steps * 2:  # in the first one the last states come late
            optimizer.param_groups = [{**group, "params": [parameter]}]
            optimizer.step()
        return self._memory.peak()

    def least_room(self, size: int, most: int) -> int:
        """Return the smallest capacity under which a piece runs, by trial; `most` is enough."""
        low, high = self._memory.live(), most
        for _ in range(TRIALS):
            middle = (low + high) // 2
            self._memory.resize(middle)
            try:
                self.run(size)
                high = middle
            except RuntimeError as error:
                if classify(error) is None:
                    raise
                low = middle
        self._memory.resize(None)
        return high
