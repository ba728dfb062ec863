"""Parts of a global batch, each as large as its rank is fast, for a `DataLoader`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from elastic_mbs.errors import UsageError

Change = tuple[int, tuple[float, ...]]  # the first batch, and the speeds of the ranks from there on


def shares(samples: int, speeds: Sequence[float]) -> list[int]:
    """Return how many samples each rank takes, so that the last one is done as early as possible.

    Each takes one at least.

    Args:
        samples: of the global batch; at least one for each rank.
        speeds: of the ranks, in samples per second or any other unit.
    """
    total = math.fsum(speeds)
    found = [max(1, math.floor(samples * speed / total)) for speed in speeds]
    ranks = range(len(speeds))
    while sum(found) < samples:
        found[min(ranks, key=lambda rank: (found[rank] + 1) / speeds[rank])] += 1
    while sum(found) > samples:
        above = [rank for rank in ranks if found[rank] > 1]
        found[max(above, key=lambda rank: found[rank] / speeds[rank])] -= 1
    return found


class ShareSampler(Sampler[list[int]]):
    """A rank's part of each global batch: a `DataLoader`'s `batch_sampler=`.

    ```python
    sampler = ShareSampler(dataset, batch=256)
    for batch in DataLoader(dataset, batch_sampler=sampler):
        mbs.backward(loss_fn, batch)
        …
        sampler.follow(mbs.speeds)
    ```

    Global batches are those of one process: the same samples, shuffled once per epoch, whatever
    the shares are. Each `iter` begins the next epoch; an epoch that is left early counts as whole.
    Parts are equal until speeds are known. An epoch's last batch is left out where it has fewer
    samples than there are ranks.

    Args:
        data: the dataset, or its length.
        batch: samples of a global batch, at least one for each rank.
        rank: the number of this rank; that of the job where it is None.
        ranks: how many there are; those of the job where it is None.
        shuffle: False keeps the dataset's order.
        seed: of the shuffles.
        every: batches after which the shares follow the speeds.
        ahead: batches that a `DataLoader` reads ahead, the same on every rank: workers times
            `prefetch_factor`.

    Raises:
        UsageError: there are fewer samples than ranks, or a number makes no sense.
    """

    def __init__(
        self,
        data: Sized | int,
        batch: int,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        every: int = 20,
        ahead: int = 0,
    ) -> None:
        self._samples = data if isinstance(data, int) else len(data)
        if (rank is None or ranks is None) and not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                f"rank={rank}, ranks={ranks}, and there is no job that has the rest: give both, or "
                "call init_process_group first"
            )
        self._rank = dist.get_rank() if rank is None else rank
        self._ranks = dist.get_world_size() if ranks is None else ranks
        if not 0 <= self._rank < self._ranks:
            raise UsageError(f"rank={self._rank} of ranks={self._ranks}: ranks count from 0")
        if type(batch) is not int or not self._ranks <= batch <= self._samples:
            raise UsageError(
                f"batch={batch} with {self._ranks} ranks and {self._samples} samples: a global "
                "batch has at least one sample for each rank, and no more than there are"
            )
        if every < 1 or ahead < 0:
            raise UsageError(f"every={every}, ahead={ahead}: give at least 1 and at least 0")
        self._batch, self._shuffle, self._seed = batch, shuffle, seed
        self._every, self._ahead = every, ahead
        full, rest = divmod(self._samples, batch)
        self._length = full + (rest >= self._ranks)  # batches of an epoch
        self._start = 0  # of the next `iter`; batches are counted over the whole run
        self._read = 0  # batches that were handed out
        self._trained = 0  # batches that were followed
        self._changes: list[Change] = [(0, (1.0,) * self._ranks)]
        self._seen: list[tuple[float, ...]] = []  # speeds since the last change

    def __len__(self) -> int:
        return self._length - self._start % self._length

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: a DataLoader with workers asks for two of them, and uses one.
        start = self._start
        epoch, first = divmod(start, self._length)
        self._start = start - first + self._length
        self._read = self._trained = start
        order = self._order(epoch)
        for place in range(first, self._length):
            batch = order[place * self._batch : (place + 1) * self._batch].tolist()
            sizes = shares(len(batch), self._speeds(start - first + place))
            mine = sum(sizes[: self._rank])
            self._read += 1
            yield batch[mine : mine + sizes[self._rank]]

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._samples)
        generator = torch.Generator().manual_seed(self._seed + epoch)
        return torch.randperm(self._samples, generator=generator)

    def _speeds(self, batch: int) -> tuple[float, ...]:
        """Return the speeds by which a batch of the run is divided."""
        return self._since(batch)[0][1]

    def follow(self, speeds: Sequence[float]) -> None:
        """Note that a batch was trained on, at these speeds: `mbs.speeds`. Every rank calls it.

        Args:
            speeds: of all ranks, the same on every rank. None of them counts where one is 0: it is
                not known yet.

        Raises:
            UsageError: they are no speeds of these ranks; or batches that were read already would
                change, so `ahead` is too small.
        """
        if len(speeds) != self._ranks or not all(0 <= each < math.inf for each in speeds):
            raise UsageError(
                f"speeds={list(speeds)!r:.200} for {self._ranks} ranks: give `mbs.speeds` after "
                "each batch, a number of samples per second for each rank"
            )
        self._trained += 1
        if all(speeds):
            self._seen.append(tuple(speeds))
        if self._trained % self._every or not self._seen:
            return
        first = self._trained + self._ahead
        if first < self._read:
            raise UsageError(
                f"shares change from batch {first} on, and {self._read} have been read: give "
                f"ahead={self._read - self._trained} or more, the same on every rank"
            )
        # A call that compiled, or that ran out of memory, tells little of those to come.
        speeds = tuple(map(statistics.median, zip(*self._seen, strict=True)))
        self._changes = [*self._since(self._trained), (first, speeds)]
        self._seen = []

    def _since(self, batch: int) -> list[Change]:
        """Return the change that a batch is divided by, and those after it."""
        past = sum(first <= batch for first, _ in self._changes)
        return self._changes[past - 1 :]

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the run and the shares, as JSON; the same on every rank."""
        return {
            "batch": self._trained,
            "changes": [[first, list(speeds)] for first, speeds in self._changes],
            "data": self._data(),
        }

    def _data(self) -> dict[str, Any]:
        return {
            "samples": self._samples,
            "batch": self._batch,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next `iter` go on after the batches that were trained on.

        With another number of ranks the parts are equal again.

        Raises:
            UsageError: it is no state of a sampler, or data or options differ.
        """
        try:
            batch, saved = state["batch"], state["data"]
            changes = [(int(at), tuple(map(float, speeds))) for at, speeds in state["changes"]]
            good = type(batch) is int and batch >= changes[0][0] >= 0
            good = good and all(0 < each < math.inf for _, speeds in changes for each in speeds)
        except (TypeError, LookupError, ValueError):
            good = False
        if not good:
            raise UsageError(
                f"{state!r:.200} is no state of a ShareSampler: load what state_dict() returned"
            )
        if saved != self._data():
            raise UsageError(
                f"the saved run had {saved}, and this one has {self._data()}: they must be the same"
            )
        if any(len(speeds) != self._ranks for _, speeds in changes):
            changes = [(0, (1.0,) * self._ranks)]
        self._changes, self._seen = changes, []
        self._start = self._read = self._trained = batch
