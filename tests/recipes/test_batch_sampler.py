"""The sampler's batches follow from the place in the run alone, with workers and after a resume."""

import json
from itertools import islice
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from elastic_mbs import NoiseScale, UsageError
from elastic_mbs.recipes import BatchSchedule, ElasticBatchSampler

SCHEDULES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=5).map(
    lambda moves: [
        (sum(step for step, _ in moves[:i]), 1 + sum(more for _, more in moves[:i]))
        for i in range(len(moves) + 1)
    ]
)
OPTIONS = st.fixed_dictionaries(
    {
        "unit": st.sampled_from(["epoch", "batch"]),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 9),
    }
)


def sampler(samples: int, changes: Any, **options: Any) -> ElasticBatchSampler:
    return ElasticBatchSampler(samples, BatchSchedule(changes), **options)


@given(st.integers(1, 60), SCHEDULES, OPTIONS)
def test_each_sample_comes_once_per_epoch_in_batches_of_the_schedules_size(
    samples: int, changes: Any, options: dict[str, Any]
) -> None:
    one, schedule = sampler(samples, changes, **options), BatchSchedule(changes)
    step, orders = 0, []
    for epoch in range(4):
        length = len(one)
        batches = list(one)
        assert len(batches) == length
        sizes = [
            schedule.batch(epoch if options["unit"] == "epoch" else step + number)
            for number in range(len(batches))
        ]
        assert [len(batch) for batch in batches[:-1]] == sizes[:-1]
        assert 1 <= len(batches[-1]) <= sizes[-1]
        orders.append([index for batch in batches for index in batch])
        assert sorted(orders[-1]) == list(range(samples))
        step += len(batches)
    assert options["shuffle"] or orders == [list(range(samples))] * 4
    assert not (options["shuffle"] and samples > 20) or len(set(map(tuple, orders))) == 4


@given(st.integers(20, 60), SCHEDULES, OPTIONS)
def test_drop_last_leaves_full_batches_and_drops_as_little_as_possible(
    samples: int, changes: Any, options: dict[str, Any]
) -> None:
    changes = [(step, min(size, 20)) for step, size in changes]
    one, whole = (sampler(samples, changes, **options, drop_last=last) for last in (True, False))
    batches, all_of_them = list(one), list(whole)
    assert batches == all_of_them[: len(batches)]
    assert len(all_of_them) - len(batches) <= 1
    if len(batches) < len(all_of_them):
        size = BatchSchedule(changes).batch(0 if options["unit"] == "epoch" else len(batches))
        assert len(all_of_them[-1]) < size


@given(st.integers(1, 40), SCHEDULES, OPTIONS, st.data())
def test_a_run_resumed_at_any_batch_goes_on_in_the_same_order(
    samples: int, changes: Any, options: dict[str, Any], data: st.DataObject
) -> None:
    first = sampler(samples, changes, **options)
    wanted = [list(first) for _ in range(4)]
    epoch = data.draw(st.integers(0, 2))
    done = data.draw(st.integers(0, len(wanted[epoch])))
    ahead = data.draw(st.integers(0, 3))  # read by workers, and not trained on yet
    broken = sampler(samples, changes, **options)
    for _ in range(epoch):
        list(broken)
    resumed = sampler(samples, changes, **options)
    read = len(list(islice(iter(broken), done + ahead)))
    # the epoch has not begun where nothing was read: the saved one can be the next
    state = broken.state_dict(done, epoch=epoch)
    assert read or state["batches"] == 0
    resumed.load_state_dict(json.loads(json.dumps(state)))
    rest = wanted[epoch][done:]
    epochs = range((4 if rest else 3) - epoch)
    assert [list(resumed) for _ in epochs] == [*([rest] if rest else []), *wanted[epoch + 1 :]]


def test_a_run_saved_before_an_epoch_goes_on_with_that_epoch() -> None:
    one = sampler(6, [(0, 2)])
    list(one)
    saved = one.state_dict(batches=0, epoch=1)
    again = sampler(6, [(0, 2)])
    again.load_state_dict(saved)
    assert [list(again), list(again)] == [list(one), list(one)]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_persistent_ones_get_the_same_batches(workers: int) -> None:
    changes, data = [(0, 3), (4, 5), (9, 11)], TensorDataset(torch.arange(37))
    wanted = sampler(37, changes, unit="batch", seed=5)
    loader = DataLoader(
        data,
        batch_sampler=sampler(37, changes, unit="batch", seed=5),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    for _ in range(3):
        assert len(loader) == len(wanted)
        assert [batch[0].tolist() for batch in loader] == list(wanted)


def test_an_epoch_left_early_counts_as_whole_however_far_was_read() -> None:
    changes = [(0, 3), (6, 5)]
    whole = sampler(20, changes, unit="batch")
    wanted = [list(whole) for _ in range(2)]
    for taken in (1, 4):
        one = sampler(20, changes, unit="batch")
        list(islice(iter(one), taken))
        assert list(one) == wanted[1]


# ---------------------------------------------------------------- a schedule that grows meanwhile


def grown(one: ElasticBatchSampler, epochs: int, workers: int = 0) -> list[list[int]]:
    """Return the batches of a run that sees much noise at its fourth batch."""
    loader = DataLoader(TensorDataset(torch.arange(40)), batch_sampler=one, num_workers=workers)
    found, step = [], 0
    for _ in range(epochs):
        for batch in loader:
            found.append(batch[0].tolist())
            if step == 3:
                one.schedule.follow(NoiseScale(8.0, 1.0, 0.0, 9), step)
            step += 1
    return found


def growing(ahead: int) -> ElasticBatchSampler:
    return ElasticBatchSampler(
        40, BatchSchedule.from_noise_scale(2, limit=8, ahead=ahead), unit="batch"
    )


def test_growth_comes_at_its_step_whether_workers_read_ahead_or_not() -> None:
    runs = [grown(growing(8), 2, workers) for workers in (0, 2)]
    assert runs[0] == runs[1]
    assert [len(batch) for batch in runs[0]][:13] == [2] * 11 + [8, 8]


def test_growth_at_a_batch_that_was_read_already_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match="has grown from step 4 on, when batches had been read up to step 7: give it a "
        "larger ahead=",
    ):
        grown(growing(1), 1, workers=2)
    assert len(grown(growing(1), 1)) == 4 + 4


def test_a_resumed_run_has_grown_as_well() -> None:
    whole = grown(growing(8), 2)
    one = growing(8)
    first = grown(one, 1)
    again = growing(8)
    again.load_state_dict(one.state_dict(batches=5))
    assert [*list(again), *list(again)] == whole[5:]
    assert whole[: len(first)] == first


# ---------------------------------------------------------------------- bad input


def begun() -> ElasticBatchSampler:
    """Return a sampler whose first epoch was handed out."""
    one = sampler(9, [(0, 2)])
    list(one)
    return one


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: sampler(0, [(0, 2)]), "there are 0 samples"),
        (lambda: sampler(9, [(0, 2)], unit="step"), "unit='step' is not known"),
        (
            lambda: list(sampler(5, [(0, 8)], drop_last=True)),
            "drop_last leaves nothing of 5 samples in batches of 8",
        ),
        (
            lambda: sampler(9, [(0, 2)]).state_dict(batches=1),
            "batches=1, and 0 of epoch 0 have been handed out",
        ),
        (
            lambda: sampler(9, [(0, 2)]).load_state_dict(sampler(9, [(0, 2)], seed=1).state_dict()),
            "'seed': 1.*they must be the same",
        ),
        (
            lambda: sampler(9, [(0, 2)]).load_state_dict(sampler(9, [(0, 3)]).state_dict()),
            "another schedule",
        ),
        (lambda: begun().state_dict(batches=0), "say epoch=0 to start it again, or epoch=1"),
        (lambda: begun().state_dict(epoch=2), "epoch=2, and the last one that was begun is 0"),
        (lambda: begun().state_dict(batches=1, epoch=1), "batches=1, and 0 of epoch 1"),
        (lambda: begun().load_state_dict({}), "is no state of an ElasticBatchSampler"),
        (
            lambda: begun().load_state_dict(cast(Any, None)),
            "None is no state of an ElasticBatchSampler",
        ),
        (
            lambda: begun().load_state_dict(begun().state_dict() | {"first": "0"}),
            "is no state of an ElasticBatchSampler",
        ),
        (
            lambda: begun().load_state_dict(begun().state_dict() | {"schedule": {"steps": [0]}}),
            "is no state of a BatchSchedule",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(make: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        make()


def test_a_dataset_gives_its_length() -> None:
    assert len(ElasticBatchSampler([1, 2, 3], BatchSchedule([(0, 2)]))) == 2
