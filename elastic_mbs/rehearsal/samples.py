"""The samples that a comparison runs on: neighbours in which what can count differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.pieces import TokenBudget
from elastic_mbs.batch.view import BatchView
from elastic_mbs.controller.policy import Limits

MANY = 1 << 24  # elements of a tensor that is not looked at
_SAMPLES = 4096  # that are looked at, of a batch


class TooManyTokensError(Exception):
    """Two pieces of any samples have more tokens than may be taken."""


class Signs:
    """The signs by which samples differ: their counts, labels and padding.

    A mean over labels is the mean over samples where all have as many of them.
    """

    def __init__(
        self,
        view: BatchView,
        counts: Counts,
        limits: Limits,
        budget: TokenBudget | None = None,
    ) -> None:
        """Read the signs of each sample.

        Args:
            view: the batch.
            counts: its loss terms.
            limits: the pieces that are allowed.
            budget: the most tokens that are taken; None where there is no limit.
        """
        self._counts, self._limits, self._budget = counts, limits, budget
        self._length = min(view.length, _SAMPLES)
        shares = [str(counts.weights(i, i + 1)) for i in range(self._length)]
        each: list[Sequence[object]] = [shares, *_signs(view)]
        self._signs = [signs for signs in each if len(set(signs)) > 1]

    def telling(self, samples: int) -> tuple[int, int]:
        """Return the first, and the number, of neighbours that differ in the most signs.

        Args:
            samples: how many to take, if they make two pieces at least.
        """
        return self._most(samples)[:2]

    def fewest(self, least: int, most: int) -> tuple[int, int]:
        """Return the first, and the number, of the fewest neighbours that tell as much as any.

        Args:
            least: how many to take at least.
            most: how many to take at most, if they make two pieces at least.
        """
        start, count, told = self._most(least)
        while told < len(self._signs) and count * 2 <= min(most, self._length):
            if not self._starts(count * 2):
                break
            start, count, told = self._best(count * 2)
        return start, count

    def _most(self, samples: int) -> tuple[int, int, int]:
        """Return the best of the most neighbours, up to `samples`, that may be taken."""
        align, least = self._limits.align, 2 * self._limits.floor
        count = min(max(least, samples // align * align), self._length)
        while count - align >= least and not self._starts(count):
            count -= align
        return self._best(count)

    def _starts(self, samples: int) -> list[int]:
        """Return where so many neighbours can start."""
        starts = range(0, self._length - samples + 1, self._limits.align)
        budget = self._budget
        return [at for at in starts if budget is None or budget.holds(at, samples)]

    def _best(self, samples: int) -> tuple[int, int, int]:
        """Return the first of the neighbours that tell the most, their number, and how much.

        Raises:
            TooManyTokensError: no neighbours may be taken together.
        """
        starts = self._starts(samples)
        if not starts:
            raise TooManyTokensError
        told = [
            sum(len(set(signs[at : at + samples])) > 1 for signs in self._signs)
            if any(self._counts.weights(at, at + samples).values())
            else -1
            for at in starts
        ]
        most = max(told)
        return starts[told.index(most)], samples, most


def _signs(view: BatchView) -> Iterator[list[int]]:
    """Yield a number per sample for each tensor of whole numbers or flags.

    It is the label where there is one, else how many labels are padding: the value that the most
    samples end with. Where samples bring rows in unequal numbers, their size is one, too.
    """
    if view.costs is not None:
        yield list(view.costs.each)
    order = None if view.sorted is None else view.sorted.order
    for _, tensor in view.named_tensors():
        rows = rows_of(view, tensor)
        if rows is None:
            continue
        if rows.shape[1] == 1:
            signs = rows[:, 0].tolist()
        else:
            ends = Counter(rows[:, -1].tolist())
            signs = (rows == ends.most_common(1)[0][0]).sum(1).tolist()
        yield signs if order is None else [signs[i] for i in order]


def rows_of(view: BatchView, tensor: Tensor) -> Tensor | None:
    """Return a row per sample on the host of what can be labels or a mask; None for all else."""
    dim = view.dim_of(tensor)
    if (
        dim is None
        or tensor.is_complex()
        or not 0 < tensor.numel() <= MANY
        or tensor.ndim <= dim
        or tensor.shape[dim] != view.length
    ):
        return None
    flags = tensor.is_floating_point() and bool(((tensor == 0) | (tensor == 1)).all())
    if tensor.is_floating_point() and not flags:
        return None
    with torch.no_grad():
        return tensor.detach().movedim(dim, 0).reshape(view.length, -1).cpu()
