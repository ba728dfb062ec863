"""The controller against an oracle: each step at the largest size that fits, in simulated time."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_mbs.controller.controller import Policy
from tests.helpers.device_sim import Device, Job

# the whole batch fits into what is there without the co-tenant
BATCH, TOTAL, BASE, SLOPE = 64, 12_800, 1000, 150
STEPS = [0.005, 0.05, 0.5, 5.0]
DELTA = 0.02  # of a step at the whole batch is what each piece costs besides its samples


def need(size: int) -> int:
    return BASE + SLOPE * size


def seconds(size: int, step: float) -> float:
    """Return the time of a call in pieces of this size."""
    return step * (1 - DELTA) + step * DELTA * -(-BATCH // size)


def job(device: Device, step: float, seed: int = 0) -> Job:
    return Job(
        device,
        need,
        seed=seed,
        per_piece=step * DELTA,
        per_sample=step * (1 - DELTA) / BATCH,
        rest=0.002,
    )


def oracle(device: Device, step: float, calls: int) -> float:
    """Return the time of the calls, each in the fewest pieces that fit at its start."""
    now = 0.0
    for _ in range(calls):
        room = device.total - device.others(now)
        now += seconds(max(1, min(BATCH, (room - BASE) // SLOPE)), step)
    return now


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("steps", [20, 60])
def test_a_visit_costs_little_more_than_the_oracle(step: float, steps: int) -> None:
    device = Device(TOTAL, others=lambda t: 6000 if 40 * step <= t < (40 + steps) * step else 0)
    ours = job(device, step)
    for _ in range(200):
        ours.call(BATCH)
    assert device.clock.now <= 1.01 * oracle(Device(TOTAL, others=device.others), step, 200)
    assert ours.ooms == 1


@settings(deadline=None, max_examples=40)
@given(st.floats(0.005, 5), st.integers(3000, 9000), st.integers(5, 200), st.integers(0, 2**16))
def test_full_speed_is_back_two_steps_after_the_reading_that_shows_it(
    step: float, held: int, stay: int, seed: int
) -> None:
    device = Device(TOTAL, others=lambda t: held if 10 * step <= t < (10 + stay) * step else 0)
    ours = job(device, step, seed)
    while device.clock.now < (30 + stay) * step + 1.1:
        ours.call(BATCH)
    left = (10 + stay) * step
    shown = next(at for at in ours.readings if at >= left)
    later = [ran for ran in ours.history if ran.at + 1e-9 >= shown]
    assert [ran.size for ran in later[2:4]] == [BATCH] * 2
    if step <= 0.5:
        assert shown - left <= 8 * step, (
            "readings are asked for, once the patience is over: steps do not wait for the "
            "monitor's second"
        )


@settings(deadline=None, max_examples=40)
@given(
    st.floats(0.005, 5),
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 10_000)), min_size=1, max_size=40),
    st.integers(0, 2**16),
)
def test_memory_that_comes_and_goes_costs_1_percent_over_a_fixed_size(
    step: float, visits: list[tuple[int, int]], seed: int
) -> None:
    until = list(itertools.accumulate(length * step for length, _ in visits))

    def others(now: float) -> int:
        return next((held for end, (_, held) in zip(until, visits, strict=True) if now < end), 0)

    device = Device(TOTAL, others=others)
    ours, calls = job(device, step, seed), 0
    while device.clock.now < until[-1]:
        ours.call(BATCH)
        calls += 1
    fixed = seconds(
        max(1, min(BATCH, (TOTAL - max(held for _, held in visits) - BASE) // SLOPE)), step
    )
    falls = 7  # the size falls from the whole batch to one sample once, whoever decides
    assert device.clock.now <= (1 + 1 / Policy().cooldown) * calls * fixed + falls * 2 * step


def test_a_co_tenant_that_flaps_stops_growth() -> None:
    rng = random.Random(0)
    phases = [0.0]
    while phases[-1] < 200:
        phases.append(phases[-1] + rng.uniform(0.2, 0.6))

    def others(now: float) -> int:
        return 6000 if sum(now >= at for at in phases) % 2 else 0

    device = Device(TOTAL, others=others)
    ours = job(device, 0.05)
    while device.clock.now < 200:
        ours.call(BATCH)
    assert ours.ooms <= 40, len(phases)
