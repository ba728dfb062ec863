"""Each rank's part of a global batch follows its speed, and together they are the global batch."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import unequal_ranks
from elastic_mbs import UsageError
from elastic_mbs.recipes import ShareSampler
from elastic_mbs.recipes.share_sampler import shares

SPEEDS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


def job(ranks: int, samples: int, batch: int, **options: Any) -> list[ShareSampler]:
    return [
        ShareSampler(samples, batch, rank=rank, ranks=ranks, **options) for rank in range(ranks)
    ]


def epoch(samplers: list[ShareSampler], speeds: Any) -> list[list[list[int]]]:
    """Train for an epoch; return the parts of each batch."""
    found = []
    for parts in zip(*samplers, strict=True):
        found.append(list(parts))
        for sampler in samplers:
            sampler.follow(speeds)
    return found


def joined(parts: list[list[int]]) -> list[int]:
    return [sample for part in parts for sample in part]


# ---------------------------------------------------------------- the division


def slowest(sizes: list[int], speeds: tuple[float, ...]) -> float:
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True))


@given(st.integers(0, 40), SPEEDS)
def test_shares_add_up_and_none_is_empty(more: int, speeds: list[float]) -> None:
    sizes = shares(len(speeds) + more, speeds)
    assert sum(sizes) == len(speeds) + more
    assert min(sizes) >= 1


@given(st.integers(1, 14), st.floats(0.05, 20.0))
def test_the_last_rank_ends_as_early_as_in_any_other_division(more: int, ratio: float) -> None:
    samples, speeds = 2 + more, (1.0, ratio)
    best = min(slowest([n, samples - n], speeds) for n in range(1, samples))
    assert slowest(shares(samples, speeds), speeds) == pytest.approx(best)


# ---------------------------------------------------------------- batches


@settings(max_examples=50)
@given(st.integers(4, 60), SPEEDS, st.integers(1, 5), st.booleans(), st.data())
def test_parts_are_the_global_batches_of_one_process_whatever_the_speeds(
    samples: int, speeds: list[float], every: int, shuffle: bool, data: st.DataObject
) -> None:
    ranks = min(len(speeds), samples)
    batch = data.draw(st.integers(ranks, samples))
    samplers = job(ranks, samples, batch, every=every, shuffle=shuffle)
    (alone,) = job(1, samples, batch, shuffle=shuffle)
    for _ in range(3):
        whole = [each for each in alone if len(each) >= ranks]
        parts = epoch(samplers, speeds[:ranks])
        assert list(map(joined, parts)) == whole
        assert all(map(all, parts))
        assert len(samplers[0]) == len(whole)


def test_parts_follow_the_speeds_of_the_batches_since_the_last_change() -> None:
    samplers = job(2, 600, 60, every=4, shuffle=False)
    parts = iter(zip(*samplers, strict=True))
    sizes = []
    for speeds in [(1.0, 2.0)] * 5 + [(2.0, 1.0)] * 4 + [(1.0, 1.0)]:
        sizes.append(len(next(parts)[0]))
        for sampler in samplers:
            sampler.follow(speeds)
    # the median of each: of the four batches before the second change three are at (2, 1)
    assert sizes == [30] * 4 + [20] * 4 + [40] * 2


def test_speeds_that_are_not_known_change_nothing() -> None:
    samplers = job(2, 40, 4, every=1)
    assert {tuple(map(len, each)) for each in epoch(samplers, (0.0, 3.0))} == {(2, 2)}


def test_a_job_of_one_rank_to_two_is_near_the_ideal_division() -> None:
    found = unequal_ranks.simulate([1.0, 2.0])
    assert found.equal > 1.45
    assert found.shared <= 1.05


# ---------------------------------------------------------------- read ahead, and resumed


@pytest.mark.parametrize(("workers", "ahead"), [(0, 0), (2, 4)])
def test_a_loader_with_workers_reads_ahead_of_a_change(workers: int, ahead: int) -> None:
    sampler = ShareSampler(120, 4, rank=0, ranks=2, every=5, ahead=ahead)
    loader = DataLoader(
        TensorDataset(torch.arange(120)), batch_sampler=sampler, num_workers=workers
    )
    sizes = []
    for (batch,) in loader:
        sizes.append(len(batch))
        sampler.follow((3.0, 1.0))
    assert sizes == [2] * (5 + ahead) + [3] * (25 - ahead)


def test_a_change_of_batches_that_were_read_is_refused_and_the_advice_helps() -> None:
    def run(ahead: int) -> None:
        sampler = ShareSampler(40, 4, rank=0, ranks=2, every=2, ahead=ahead)
        batches = iter(sampler)
        list(islice(batches, 4))  # two more than are trained on
        for _ in range(2):
            sampler.follow((3.0, 1.0))

    with pytest.raises(UsageError, match="from batch 2 on, and 4 have been read: give ahead=2"):
        run(ahead=0)
    run(ahead=2)


def test_a_run_resumed_at_any_batch_goes_on_with_the_same_parts() -> None:
    def train(sampler: ShareSampler, batches: int) -> list[list[int]]:
        found: list[list[int]] = []
        while len(found) < batches:
            for part in islice(iter(sampler), batches - len(found)):
                found.append(part)
                sampler.follow((3.0, 1.0))
        return found

    wanted = train(job(2, 40, 4, every=1)[0], 25)
    for done in (0, 1, 7, 10, 13):
        first, again = (job(2, 40, 4, every=1)[0] for _ in range(2))
        train(first, done)
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert train(again, 25 - done) == wanted[done:]


def test_another_number_of_ranks_goes_on_at_the_same_batch_in_equal_parts() -> None:
    before = job(2, 40, 8, every=1)
    epoch(before, (3.0, 1.0))
    after, whole = job(4, 40, 8), job(1, 40, 8)
    for sampler in (*after, *whole):
        sampler.load_state_dict(before[0].state_dict())
    parts = epoch(after, (1.0, 1.0, 1.0, 1.0))
    assert list(map(joined, parts)) == list(whole[0])
    assert {len(part) for each in parts for part in each} == {2}


# ---------------------------------------------------------------- bad input


def one(**changes: Any) -> ShareSampler:
    return ShareSampler(**{"data": 20, "batch": 4, "rank": 0, "ranks": 2, **changes})


STATE = one().state_dict()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: one(rank=None), "rank=None, ranks=2, and there is no job"),
        (lambda: one(rank=2), "rank=2 of ranks=2: ranks count from 0"),
        (lambda: one(batch=1), "batch=1 with 2 ranks and 20 samples"),
        (lambda: one(batch=21), "batch=21 with 2 ranks and 20 samples"),
        (lambda: one(batch=4.0), "batch=4.0 with 2 ranks"),
        (lambda: one(every=0), "every=0, ahead=0: give at least 1"),
        (lambda: one(ahead=-1), "every=20, ahead=-1"),
        (lambda: one().follow(()), r"speeds=\[\] for 2 ranks: give `mbs.speeds`"),
        (lambda: one().follow((1.0, -1.0)), "for 2 ranks"),
        (lambda: one().follow((1.0, float("nan"))), "for 2 ranks"),
        (lambda: one().load_state_dict({}), "is no state of a ShareSampler"),
        (lambda: one().load_state_dict({**STATE, "batch": "1"}), "is no state"),
        (lambda: one().load_state_dict({**STATE, "changes": []}), "is no state"),
        (lambda: one().load_state_dict({**STATE, "changes": [[3, [1, 1]]]}), "is no state"),
        (lambda: one().load_state_dict({**STATE, "changes": [[0, [1, 0]]]}), "is no state"),
        (lambda: one(seed=1).load_state_dict(STATE), "'seed': 0.*must be the same"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(make: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        make()


def test_a_state_that_is_refused_changes_nothing() -> None:
    sampler = one()
    with pytest.raises(UsageError):
        sampler.load_state_dict({**STATE, "batch": 3, "changes": [[0, [1, 0]]]})
    assert sampler.state_dict() == STATE
