"""The cross-entropy of many rows, and that of some of them, with its gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class CrossEntropy:
    """A summed cross-entropy of all rows, with the arguments of torch's function."""

    def __init__(
        self, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
    ) -> None:
        """Note which rows count.

        Args:
            target: class numbers, of shape (rows,).
            weight: of the classes, of shape (classes,); None for equal ones.
            ignore_index: the target of rows that do not count.
            label_smoothing: the share of the loss that is the mean over all classes.
        """
        self._target, self._weight = target, weight
        self._ignore_index, self._smoothing = ignore_index, label_smoothing
        self._counts = target != ignore_index
        self._index = target.where(self._counts, 0).long()  # torch's own takes bytes, too

    def terms(self, dtype: torch.dtype) -> Tensor:
        """Return the number of rows that count, or the sum of their weights: a mean's divisor.

        Args:
            dtype: of the loss. Numbers of rows get a type that has all of them.
        """
        if self._weight is None:
            return self._counts.sum().to(torch.promote_types(dtype, torch.float32))
        return (self._weight[self._index] * self._counts).sum()

    def summed(self, logits: Tensor, start: int) -> Tensor:
        """Return the summed loss of some rows, as torch has it, with its graph.

        Args:
            logits: of shape (rows, classes).
            start: the first of these rows.
        """
        return functional.cross_entropy(
            logits,
            self._target[start : start + len(logits)],
            self._weight,
            ignore_index=self._ignore_index,
            reduction="sum",
            label_smoothing=self._smoothing,
        )

    def into_gradient(self, logits: Tensor, start: int) -> Tensor:
        """Return the summed loss of some rows, and write its gradient over their logits.

        No other tensor of the size of the logits is made. With p the softmax of a row, t its
        target, w the weights and s the smoothing, over C classes:

            loss      −(1 − s) w[t] log p[t]       −  (s / C) Σ w log p
            gradient   (1 − s) w[t] (p − 1 at t)   +  (s / C) (p Σ w − w)

        Args:
            logits: of shape (rows, classes), in a type of at least single precision.
            start: the first of these rows.
        """
        counts, index = (
            each[start : start + len(logits)].unsqueeze(1) for each in (self._counts, self._index)
        )
        weight = None if self._weight is None else self._weight.to(logits.dtype)
        share = counts.to(logits.dtype) if weight is None else counts * weight[index]
        evenly = self._smoothing / logits.shape[1]  # the share of each class
        if evenly:
            share = share * (1 - self._smoothing)
            every = logits.new_ones(logits.shape[1]) if weight is None else weight
            even, whole = counts * logits.new_tensor(evenly), every.sum()

        logits.sub_(logits.amax(1, keepdim=True))
        of_target = logits.gather(1, index)
        of_all = (logits @ every).unsqueeze(1) if evenly else None
        sums = logits.exp_().sum(1, keepdim=True)
        of_target -= sums.log()
        losses = of_target * share
        # p − 1 at the target, without the loss of digits where p is nearly 1
        at_target = of_target.expm1() * share
        if of_all is None:
            logits.mul_(share / sums)
        else:
            losses += even * (of_all - whole * sums.log())
            at_target += even * (whole * of_target.exp() - every[index])
            logits.mul_((share + even * whole) / sums)
            logits.addr_(even.flatten(), every, alpha=-1)
        logits.scatter_(1, index, at_target)
        return -losses.where(counts, 0).sum()
