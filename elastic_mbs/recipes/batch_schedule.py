"""The batch size over a run, grown in place of a decay of the rate, or by the noise scale.

Source: Smith et al., "Don't decay the learning rate, increase the batch size" (ICLR 2018, arXiv
1711.00489); McCandlish et al. (arXiv 1812.06162).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, Self

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiplicativeLR, ReduceLROnPlateau

from elastic_mbs.errors import UsageError
from elastic_mbs.noise_scale import NoiseScale


class BatchSchedule:
    """The batch size at each step, and the factor by which the rate is still decayed.

    The batch never shrinks. A step is an epoch or an update, as you like.

    ```python
    decay = partial(MultiStepLR, milestones=[60, 120, 160], gamma=0.2)
    schedule = BatchSchedule.from_scheduler(decay, batch=128, steps=200, samples=50_000)
    loader = DataLoader(dataset, batch_sampler=ElasticBatchSampler(dataset, schedule))
    scheduler = schedule.scheduler(optimizer)  # decays the rate once the batch is at its limit
    ```

    Args:
        changes: (step, batch) pairs: `batch` samples from that step on. The first is for step 0.

    Raises:
        UsageError: There are none, steps do not rise from 0, or a batch is smaller than the one
            before.
    """

    def __init__(self, changes: Iterable[tuple[int, int]]) -> None:
        try:
            pairs = [(step, batch) for step, batch in changes]
        except (TypeError, ValueError):
            raise UsageError(
                f"changes={changes!r} are no (step, batch) pairs: [(0, 64), (30, 128)]"
            ) from None
        if not pairs or pairs[0][0] != 0:
            raise UsageError(f"changes={pairs!r} have no batch for step 0: begin with (0, batch)")
        self._steps: list[int] = []
        self._sizes: list[int] = []
        self._rates: list[float] = []
        self._limit: int | None = None  # of a batch that follows the noise scale
        self._ahead = 1
        for step, batch in pairs:
            self._append(step, batch)

    def _append(self, step: int, batch: int, rate: float = 1.0) -> None:
        if type(step) is not int or (self._steps and step <= self._steps[-1]):
            raise UsageError(
                f"step {step!r} comes after step {self._steps[-1] if self._steps else '0'}: steps "
                "are whole numbers that rise"
            )
        if type(batch) is not int or batch < 1:
            raise UsageError(
                f"a batch of {batch!r} at step {step} is no whole number of samples of at least 1"
            )
        if self._sizes and batch < self._sizes[-1]:
            raise UsageError(
                f"the batch shrinks from {self._sizes[-1]} to {batch} at step {step}: it can only "
                "grow; lower the rate instead"
            )
        self._steps.append(step)
        self._sizes.append(batch)
        self._rates.append(rate)

    @classmethod
    def from_scheduler(
        cls,
        make: Callable[[Optimizer], LRScheduler],
        batch: int,
        *,
        steps: int,
        samples: int | None = None,
        limit: int | None = None,
    ) -> Self:
        """Grow the batch by q where a scheduler of torch's divides the rate by q, up to a limit.

        Beyond the limit the rate is decayed. The quotient of rate and batch, on which the noise of
        training depends, equals the scheduler's at every step.

        Args:
            make: function optimizer → scheduler: `partial(StepLR, step_size=30)`. It gets an
                optimizer of its own.
            batch: samples of the first batch.
            steps: calls of its `step()` in the whole run.
            samples: samples of an epoch; the limit is a tenth of them.
            limit: samples of the largest batch, in place of `samples`.

        Raises:
            UsageError: The rate rises (a warm-up goes beside this: `gradual_warmup`), depends on a
                metric, or there is no limit or no room below it.
        """
        schedule = cls([(0, batch)])
        limit = _limit(batch, samples, limit)
        rates = _rates_of(make, steps)
        for step, (before, now) in enumerate(pairwise(rates), 1):
            if now > before * (1 + 1e-9):
                raise UsageError(
                    f"the rate rises at step {step}, so the batch would shrink: leave a warm-up "
                    "out, and use gradual_warmup beside it"
                )
            # the rate may end at 0
            wanted = round(batch * rates[0] / now) if now * limit > batch * rates[0] else limit
            grown = max(schedule._sizes[-1], min(limit, wanted))
            rate = now / rates[0] * (grown / batch)
            if (grown, rate) != (schedule._sizes[-1], schedule._rates[-1]):
                schedule._append(step, grown, rate)
        return schedule

    @classmethod
    def from_noise_scale(
        cls, batch: int, *, samples: int | None = None, limit: int | None = None, ahead: int = 1
    ) -> Self:
        """Double the batch once the gradient noise scale allows it, up to a limit: see `follow`.

        Args:
            batch: samples of the first batch.
            samples: samples of an epoch; the limit is a tenth of them.
            limit: samples of the largest batch, in place of `samples`.
            ahead: steps from an estimate to the growth that follows. Where steps are updates and
                workers read ahead, it must exceed the batches that they have read (`num_workers ×
                prefetch_factor`), or the batch would depend on their speed.

        Raises:
            UsageError: There is no limit, no room below it, or `ahead` is below 1.
        """
        schedule = cls([(0, batch)])
        schedule._limit = _limit(batch, samples, limit)
        if type(ahead) is not int or ahead < 1:
            raise UsageError(f"ahead={ahead!r} is no whole number of steps of at least 1")
        schedule._ahead = ahead
        return schedule

    def follow(self, noise: NoiseScale | None, step: int) -> None:
        """Double the batch, `ahead` steps after this one, as often as the noise scale allows.

        The grown batch stays a standard error below the noise scale.

        Args:
            noise: `result.noise_scale`; None, or one with a large error, changes nothing.
            step: the present step.

        Raises:
            UsageError: The schedule is a fixed one.
        """
        if self._limit is None:
            raise UsageError(
                "this schedule is fixed: make one that follows the noise scale by "
                "BatchSchedule.from_noise_scale"
            )
        batch = self._sizes[-1]
        while (
            noise is not None
            and 2 * batch <= self._limit
            and 2 * batch <= noise.value - noise.error
        ):
            batch *= 2
        if batch > self._sizes[-1] and step + self._ahead > self._steps[-1]:
            self._append(step + self._ahead, batch)

    @property
    def changes(self) -> tuple[tuple[int, int], ...]:
        """(step, batch) pairs of the steps at which the batch grows or the rate decays."""
        return tuple(zip(self._steps, self._sizes, strict=True))

    def batch(self, step: int) -> int:
        """Return the samples of the batch at a step."""
        return self._sizes[self._at(step)]

    def rate(self, step: int) -> float:
        """Return the factor of the first rate at a step: 1.0 while the batch grows instead."""
        return self._rates[self._at(step)]

    def _at(self, step: int) -> int:
        if step < 0:
            raise UsageError(f"step={step} is below 0")
        return bisect_right(self._steps, step) - 1

    def scheduler(self, optimizer: Optimizer) -> MultiplicativeLR:
        """Return a scheduler that applies `rate`.

        It multiplies the rate that others set, such as a warm-up beside it in a `ChainedScheduler`.
        A scheduler that computes the rate anew at each step (LambdaLR, OneCycleLR) overwrites it.
        """

        def factor(step: int) -> float:
            before = self.rate(step - 1)
            return self.rate(step) / before if before else 1.0

        return MultiplicativeLR(optimizer, factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps at which the batch has grown, as JSON."""
        return {"steps": list(self._steps), "sizes": list(self._sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as another run has grown.

        Raises:
            UsageError: It is no state of a schedule, or this one is fixed and differs.
        """
        known = isinstance(state, Mapping)
        columns = [state.get(name) if known else None for name in ("steps", "sizes")]
        if not all(isinstance(each, list | tuple) for each in columns):
            raise UsageError(
                f"{state!r:.200} is no state of a BatchSchedule: load what state_dict() returned"
            )
        loaded = type(self)(zip(*columns, strict=True))
        if self._limit is not None:
            self._steps, self._sizes, self._rates = loaded._steps, loaded._sizes, loaded._rates
        elif self.changes != loaded.changes:
            raise UsageError(
                f"the saved run had another schedule, {loaded.changes}: give that, or start the "
                "sampler anew"
            )


def _rates_of(make: Callable[[Optimizer], LRScheduler], steps: int) -> list[float]:
    """Return the rate of each step under a scheduler, relative to an optimizer's rate of 1."""
    if type(steps) is not int:
        raise UsageError(f"steps={steps!r} is no whole number of calls of the scheduler's step()")
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
    scheduler = make(optimizer)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            f"the rate of {type(scheduler).__name__} does not follow from its step: use "
            "MultiStepLR or the like, or pairs"
        )
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    if not rates or rates[0] <= 0:
        raise UsageError(
            f"steps={steps!r} of {type(scheduler).__name__} have no rate to begin with"
        )
    return rates


def _limit(batch: int, samples: int | None, limit: int | None) -> int:
    if (samples is None) == (limit is None):
        raise UsageError(
            "give samples=, of which the largest batch is a tenth, or limit=: one of the two"
        )
    found = limit if limit is not None else (samples or 0) // 10
    if type(found) is not int or found < batch:
        raise UsageError(
            f"{'limit' if limit is not None else 'a tenth of samples'} is {found!r}, below the "
            f"first batch of {batch}"
        )
    return found
