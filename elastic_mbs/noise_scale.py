"""The gradient noise scale B = tr(Σ)/|G|²: beyond about this batch size, more samples pay little.

Σ is the covariance of one sample's gradient, and G its mean. Source: McCandlish et al. 2018, arXiv
1812.06162, sections 2.2 and A.1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoiseScale:
    """The estimated gradient noise scale.

    Numerator and denominator are averaged separately, as the paper does.

    Attributes:
        trace: tr(Σ), the variance of one sample's gradient, summed over the parameters.
        squared_norm: |G|², the squared norm of the gradient without noise. A mean of few estimates
            can be below 0.
        error: standard error of `value`, in samples, from the scatter of the estimates; infinite
            where there are fewer than two of them, or no value.
        calls: number of estimates: calls that had more than one piece.
    """

    trace: float
    squared_norm: float
    error: float
    calls: int

    @property
    def value(self) -> float:
        """tr(Σ)/|G|², in samples; infinite while noise hides the gradient (|G|² not above 0)."""
        return self.trace / self.squared_norm if self.squared_norm > 0 else math.inf


def estimate(pieces: Sequence[tuple[int, float]], whole: float) -> tuple[float, float]:
    """Return tr(Σ) and |G|² from one batch, both without bias for pieces of any lengths.

    Args:
        pieces: at least two pieces, each with its number of samples and the squared norm of its
            contribution to the batch's gradient.
        whole: squared norm of the batch's gradient, the sum of all contributions.
    """
    samples = sum(length for length, _ in pieces)
    # A piece of n of N samples contributes n/N of its own mean gradient g. The mean of |g|²,
    # weighted by n/N, is above |G|² by tr(Σ) × pieces / N.
    between = sum(samples / length * norm for length, norm in pieces) - whole
    trace = samples * between / (len(pieces) - 1)
    return trace, whole - trace / samples


class Smoothed:
    """The average of the estimates of the last calls, in which older ones count less and less.

    Args:
        calls: the weight of an estimate falls to 1/e in about this many calls.
    """

    def __init__(self, calls: int) -> None:
        self._keep = 1 - 1 / calls
        self._weights = 0.0
        self._squared_weights = 0.0
        self._sums = [0.0] * 5  # of trace, squared norm, and their products
        self._calls = 0
        self.latest: NoiseScale | None = None

    def add(self, trace: float, squared_norm: float) -> None:
        """Take one more estimate; one that is not finite is left out (a loss scaled too far)."""
        if not (math.isfinite(trace) and math.isfinite(squared_norm)):
            return
        keep = self._keep
        now = (
            trace,
            squared_norm,
            trace * trace,  # not trace**2, which raises where it overflows
            squared_norm * squared_norm,
            trace * squared_norm,
        )
        self._weights = keep * self._weights + 1
        self._squared_weights = keep * keep * self._squared_weights + 1
        self._sums = [keep * old + new for old, new in zip(self._sums, now, strict=True)]
        self._calls += 1
        s, g, *_ = (total / self._weights for total in self._sums)
        self.latest = NoiseScale(s, g, self._error(s, g), self._calls)

    def _error(self, s: float, g: float) -> float:
        """Return the standard error of the quotient of two means, to first order."""
        share = self._squared_weights / self._weights**2  # 1 / independent estimates
        if g <= 0 or share >= 1 - 1e-12:
            return math.inf
        ss, gg, sg = (total / self._weights for total in self._sums[2:])
        ratio = s / g
        scatter = (ss - s * s) - 2 * ratio * (sg - s * g) + ratio * ratio * (gg - g * g)
        return math.sqrt(max(0.0, scatter) * share / (1 - share)) / g


def squared_norm(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the squared norm of the leaves' gradients, in float32 at least.

    It is in parts, one for each type and device, so that nothing waits for a device.
    """
    groups = defaultdict[tuple[torch.dtype, torch.device], list[Tensor]](list)
    for leaf in leaves:
        if (grad := leaf.grad) is not None:
            groups[grad.dtype, grad.device].append(
                grad if grad.layout is torch.strided else grad.coalesce().values()
            )
    with torch.no_grad():
        norms = (
            torch._foreach_norm(grads, 2, dtype=torch.promote_types(dtype, torch.float32))
            for (dtype, _), grads in groups.items()
        )
        return [torch.stack(each).square().sum() for each in norms]
