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

    What comes next is determined by it alone, not by when it is read: workers read ahead.
    """

    epoch: int = 0
    first: int = 0  # number of the epoch's first batch in the run
    batches: int = 0  # of the epoch that were handed out


class ElasticBatchSampler(Sampler[list[int]]):
    """Shuffles once per epoch and hands out batches of the schedule's size, as the `batch_sampler=` of a `DataLoader`.

    Each `iter` begins the next epoch, and one that is left early counts as whole. The order depends
    on the seed and the epoch only, the sizes on the place in the run, so neither workers nor a
    resumed run change either. The length is that of the epoch that runs, or of the next one.

    Args:
        data: the dataset, or its length.
        schedule: the sizes.
        unit: what a step of the schedule is: an "epoch", or a "batch", counted over the whole run.
        shuffle: False keeps the dataset's order.
        seed: of the shuffles.
        drop_last: leaves out an epoch's last batch where it is not full.

    Raises:
        UsageError: no data, or an unknown unit; from `iter`: the schedule has grown for batches
            that were handed out already (see `ahead`), or `drop_last` would leave nothing.
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
        """Where the next `iter` begins."""
        place, length = self._place, self._length(self._place)
        return (
            _Place(place.epoch + 1, place.first + length)
            if self._begun or place.batches >= length
            else place
        )

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
        """The schedule's step for a batch of the epoch."""
        return place.epoch if self._unit == "epoch" else place.first + number

    def _cuts(self, place: _Place) -> Iterator[tuple[int, int]]:
        """Ranges of the epoch's samples. The schedule can grow while it runs."""
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

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The place in the run, as JSON, to go on in the middle of an epoch.

        Args:
            batches: how many of the epoch's batches were trained on, from its start. None: all that
                were handed out, which with workers is more.

        Raises:
            UsageError: so many were not handed out.
        """
        place = self._place
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
        """Has the next `iter` go on where the saved run was; a `UsageError` where data, options or schedule are others."""
        if state["data"] != self._data():
            raise UsageError(
                f"the saved run had {state['data']}, and this one has {self._data()}: they must "
                "be the same"
            )
        self.schedule.load_state_dict(state["schedule"])
        self._place, self._begun = _Place(state["epoch"], state["first"], state["batches"]), False
