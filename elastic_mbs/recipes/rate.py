"""The learning rate for a larger batch: the linear rule, and a warm-up to it (Goyal et al., arXiv 1706.02677, section 2)."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from elastic_mbs.errors import UsageError


def linear_scaling(lr: float, batch: int, reference_batch: int) -> float:
    """The rate for a batch k times the reference batch: k times its rate.

    All else stays as it is, weight decay and momentum too.

    Args:
        lr: rate that is right for the reference batch. Goyal et al.: 0.1 for 256 images.
        batch: samples of the batch that is trained with.
        reference_batch: samples of the batch that `lr` is for.

    Raises:
        UsageError: a batch below 1, or a rate that is no number of at least 0.
    """
    for name, value in (("batch", batch), ("reference_batch", reference_batch)):
        if type(value) is not int or value < 1:
            raise UsageError(f"{name}={value!r} is no whole number of samples of at least 1")
    if not isinstance(lr, int | float) or not 0 <= lr < math.inf:
        raise UsageError(f"lr={lr!r} is no rate: it must be a finite number of at least 0")
    return lr * (batch / reference_batch)


def gradual_warmup(optimizer: Optimizer, k: float, steps: int) -> LinearLR:
    """A scheduler from the reference rate to k times that, by equal increments, for the large batch's rate is too much at the start.

    ```python
    k = batch / reference_batch
    optimizer = torch.optim.SGD(model.parameters(), lr=linear_scaling(0.1, batch, reference_batch),
    momentum=0.9) scheduler = ChainedScheduler([gradual_warmup(optimizer, k, steps=5 * len(loader)),
    MultiStepLR(optimizer, milestones)]) ```

    It goes before any of torch's schedulers in a `SequentialLR`. In a `ChainedScheduler` it
    multiplies the rate that others set, and goes with those that do so, too (MultiStepLR, StepLR,
    ExponentialLR, PolynomialLR, CosineAnnealingLR). Those that compute the rate anew at each step
    (LambdaLR, OneCycleLR, CyclicLR, CosineAnnealingWarmRestarts) overwrite it there.
    Weight decay is left alone.

    Args:
        optimizer: its rate is the large batch's, k times the reference rate.
        k: by how much the batch is larger than the reference batch.
        steps: calls of `scheduler.step()`, once per batch, until its rate is reached: five epochs
            in the paper.

    Raises:
        UsageError: k is below 1, or there are no steps.
    """
    if not 1 <= k < math.inf:
        raise UsageError(
            f"k={k!r} is no factor of at least 1: a smaller batch than the reference batch needs "
            "no warm-up"
        )
    if type(steps) is not int or steps < 1:
        raise UsageError(f"steps={steps!r} is no whole number of at least 1: leave the warm-up out")
    return LinearLR(optimizer, start_factor=1 / k, end_factor=1.0, total_iters=steps)
