"""Batches whose size follows a schedule, for a `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import Sampler

from elastic_mbs.errors import UsageError
from elastic_mbs.recipes.batch_schedule import BatchSchedule


@dataclass
class _Place:
    """A place in a run.

    It alone determines the batches that follow, not the moment of reading: workers read ahead.
    """

    epoch: int = 0
    first: int = 0  # number of the epoch's first batch in the run
    batches: int = 0  # handed out in this epoch


_PLACE = ("epoch", "first", "batches")


class ElasticBatchSampler(Sampler[list[int]]):
    """Batches of the schedule's size, shuffled once per epoch: a `DataLoader`'s `batch_sampler=`.

    Each `iter` begins the next epoch; an epoch that is left early counts as whole. The order
    depends on the seed and the epoch only, and the sizes on the place in the run, so workers and
    resumed runs change neither. The length is that of the running epoch, or of the next one.

    Args:
        data: the dataset, or its length.
        schedule: the sizes.
        unit: a step of the schedule: an "epoch", or a "batch", counted over the whole run.
        shuffle: False keeps the dataset's order.
        seed: of the shuffles.
        drop_last: True leaves out an epoch's last batch where it is not full.

    Raises:
        UsageError: There is no data, or the unit is unknown. From `iter`: the schedule has grown
            for batches that were handed out already (see `ahead`), or `drop_last` leaves nothing.
    """

    def __init__(
        self,
        data: Sized | int,
        schedule: BatchSchedule,
        *,
        unit: Literal["epoch", "batch"] = "epoch",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._samples = data if isinstance(data, int) else len(data)
        if self._samples < 1:
            raise UsageError(f"there are {self._samples} samples: nothing to make batches of")
        if unit not in ("epoch", "batch"):
            raise UsageError(f"unit={unit!r} is not known: use 'epoch' or 'batch'")
        self.schedule = schedule
        self._unit, self._shuffle, self._seed, self._drop_last = unit, shuffle, seed, drop_last
        self._place, self._begun = _Place(), False

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: a DataLoader with workers asks for two of them, and uses one.
        place = self._upcoming()
        self._place, self._begun = place, True
        yield from self._run(place)

    def __len__(self) -> int:
        place = (
            self._upcoming() if self._place.batches == self._length(self._place) else self._place
        )
        return self._length(place)

    def _upcoming(self) -> _Place:
        """Return the place where the next `iter` begins."""
        place = self._place
        over = self._begun or place.batches >= self._length(place)
        return self._after(place) if over else place

    def _after(self, place: _Place) -> _Place:
        """Return the start of the epoch after a place."""
        return _Place(place.epoch + 1, place.first + self._length(place))

    def _run(self, place: _Place) -> Iterator[list[int]]:
        done, known = place.batches, self.schedule.changes
        order = torch.arange(self._samples)
        if self._shuffle:
            order = torch.randperm(
                self._samples, generator=torch.Generator().manual_seed(self._seed + place.epoch)
            )
        for number, (start, stop) in enumerate(self._cuts(place)):
            if number < done:
                continue
            grown = self.schedule.changes[len(known) :]
            if number > done and grown and grown[0][0] <= self._step(place, number - 1):
                raise UsageError(
                    f"the schedule has grown from step {grown[0][0]} on, when batches had been "
                    f"read up to step {self._step(place, number - 1)}: "
                    "give it a larger ahead="
                )
            place.batches, known = number + 1, self.schedule.changes
            yield order[start:stop].tolist()

    def _step(self, place: _Place, number: int) -> int:
        """Return the schedule's step for a batch of the epoch."""
        return place.epoch if self._unit == "epoch" else place.first + number

    def _cuts(self, place: _Place) -> Iterator[tuple[int, int]]:
        """Yield ranges of the epoch's samples. The schedule can grow meanwhile."""
        start = number = 0
        while start < self._samples:
            size = self.schedule.batch(self._step(place, number))
            if start + size > self._samples and self._drop_last:
                if number == 0:
                    raise UsageError(
                        f"drop_last leaves nothing of {self._samples} samples in batches of "
                        f"{size}: give the schedule a lower limit"
                    )
                return
            yield start, min(start + size, self._samples)
            start, number = start + size, number + 1

    def _length(self, place: _Place) -> int:
        return sum(1 for _ in self._cuts(place))

    def state_dict(self, batches: int | None = None, *, epoch: int | None = None) -> dict[str, Any]:
        """Return the place in the run, as JSON, to go on from it.

        Args:
            batches: batches of the epoch that were trained on, from its start. None: all that were
                handed out; with workers this is more.
            epoch: the epoch that `batches` counts in: the last one that was begun (None), or the
                next one. Needed where batches=0 could mean the start of either.

        Raises:
            UsageError: The epoch is neither of the two, the batches were not handed out, or
                batches=0 does not say which start it means.
        """
        place, begun = self._place, self._place.epoch
        if epoch is None and batches == 0 < place.batches:
            raise UsageError(
                f"batches=0, and {place.batches} of epoch {begun} have been handed out: say "
                f"epoch={begun} to start it again, or epoch={begun + 1} to start the next one"
            )
        if epoch == begun + 1:
            place = self._after(place)
        elif epoch not in (None, begun):
            raise UsageError(
                f"epoch={epoch!r}, and the last one that was begun is {begun}: say that one or "
                "the next"
            )
        batches = place.batches if batches is None else batches
        if not 0 <= batches <= place.batches:
            raise UsageError(
                f"batches={batches}, and {place.batches} of epoch {place.epoch} have been handed "
                "out"
            )
        return {
            "epoch": place.epoch,
            "first": place.first,
            "batches": batches,
            "data": self._data(),
            "schedule": self.schedule.state_dict(),
        }

    def _data(self) -> dict[str, Any]:
        return {
            "samples": self._samples,
            "unit": self._unit,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next `iter` go on at the saved place.

        Raises:
            UsageError: It is no state of a sampler, or data, options or schedule differ.
        """
        known = isinstance(state, Mapping)
        place: list[Any] = [state.get(name) if known else None for name in _PLACE]
        if any(type(each) is not int or each < 0 for each in place):
            raise UsageError(
                f"{state!r:.200} is no state of an ElasticBatchSampler: load what state_dict() "
                "returned"
            )
        if state.get("data") != self._data():
            raise UsageError(
                f"the saved run had {state.get('data')}, and this one has {self._data()}: they "
                "must be the same"
            )
        self.schedule.load_state_dict(state.get("schedule", {}))
        self._place, self._begun = _Place(*place), False
