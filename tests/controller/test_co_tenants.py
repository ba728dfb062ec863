"""Co-tenants that come right after a growth: what they take comes back with the memory."""

import itertools
import random
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_mbs.controller.controller import Policy
from tests.helpers.device_sim import Device, Job

# the whole batch fits into what is there without a co-tenant
BATCH, TOTAL, BASE, SLOPE = 64, 12_800, 1000, 150
WAIT = 30.0


def need(size: int) -> int:
    return BASE + SLOPE * size


@dataclass
class Visits:
    """What co-tenants hold at a time: visits of (from, to, held), on top of `held`."""

    held: int = 0
    visits: list[tuple[float, float, int]] = field(default_factory=list)

    def __call__(self, now: float) -> int:
        return max([self.held, *(held for a, b, held in self.visits if a <= now < b)])


def job_of(others: Visits, step: float, delta: float, seed: int, late: float, sensed: bool) -> Job:
    """Make a job whose pieces cost the fraction `delta` of a step each, beside their samples."""
    return Job(
        Device(TOTAL, others=others),
        need,
        seed=seed,
        per_piece=step * delta,
        per_sample=step * (1 - delta) / BATCH,
        rest=0.002,
        late=late,
        wait=WAIT,
        measured=sensed,
    )


def grown(ours: Job, others: Visits, squeezed: int) -> int:
    """Run at full size, take memory away, give a part back; return the size before the growth."""
    for _ in range(10):
        ours.call(BATCH)
    assert ours.size == BATCH
    others.held = TOTAL - need(squeezed)
    for _ in range(4):
        ours.call(BATCH)
    others.held = TOTAL - need(2 * squeezed + 2)
    while (move := ours.call(BATCH).move) is None:
        pass
    return move.before


@settings(deadline=None, max_examples=60)
@given(
    st.floats(0.002, 2),
    st.floats(0.005, 0.7),
    st.integers(2, 24),
    st.floats(0, 1.1),
    st.floats(0, 60),
    st.sampled_from([0.0, 0.001, 0.1]),
    st.booleans(),
    st.integers(0, 2**16),
)
# halving leaps over the size before the growth
@example(1.0, 0.6875, 3, 1.0, 0.0, 0.0, True, 0)
def test_a_visit_in_the_call_after_a_growth_costs_two_readings(
    step: float,
    delta: float,
    squeezed: int,
    taken: float,
    stay: float,
    late: float,
    sensed: bool,
    seed: int,
) -> None:
    others = Visits()
    ours = job_of(others, step, delta, seed, late, sensed)
    before = grown(ours, others, squeezed)
    begin = ours.device.clock.now
    stay += 2 * (step + late)  # the size before the growth fails, too
    # everything, or down to sizes below the one before the growth
    left = need(0) + int((1 - taken) * (need(before) - need(0))) - 1
    others.visits.append((begin, begin + stay, TOTAL - left))
    others.held = 0
    while ours.device.clock.now < begin + stay:
        ours.call(BATCH)
    end = ours.device.clock.now
    while len([at for at in ours.readings if at >= end]) < 2 or ours.call(BATCH).size != BATCH:
        ours.call(BATCH)
    seen = [at for at in ours.readings if at >= end][1]
    slow = [ran for ran in ours.history if ran.at >= seen and ran.size != BATCH]
    times = [after.at - ran.at for ran, after in itertools.pairwise(ours.history) if ran in slow]
    # Where the reading after the failure came too late to see the visit, smaller pieces have to
    # cost as much as the failure did.
    assert sum(times[2:]) - len(times[2:]) * step <= 2 * ours.lost, times
    assert [ours.call(BATCH).size for _ in range(9)] == [BATCH] * 9


@settings(deadline=None, max_examples=60)
@given(
    st.floats(0.005, 2),
    st.floats(0.005, 0.5),
    st.floats(0.1, 1),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_co_tenants_that_strike_after_growths_cost_1_percent_of_the_time(
    step: float, delta: float, often: float, late: float, sensed: bool, seed: int
) -> None:
    rng = random.Random(seed)
    others = Visits()
    ours = job_of(others, step, delta, seed, late, sensed)
    for _ in range(1500):
        if (move := ours.call(BATCH).move) and move.reason == "grow" and rng.random() < often:
            # in the middle of the next call, down to sizes below the one before the growth
            begin = ours.device.clock.now + rng.uniform(0, step)
            stay, left = rng.uniform(0.1, 20) * step, need(rng.randint(0, move.before))
            others.visits[:] = [(begin, begin + stay, TOTAL - left)]
    # One visit is free, and what a cooldown has not made up for yet.
    free = 2 * (2 * step + late * 14)
    assert ours.lost <= ours.device.clock.now / Policy().cooldown + free
