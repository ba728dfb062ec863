"""The controller against a simulated device: how many failures and moves a change of memory may cost, and how fast full size comes back."""

import itertools
import math
import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_mbs.controller.controller import Policy
from elastic_mbs.controller.fit import UNCHECKED
from tests.helpers.device_sim import Device, Job, Ran

Need = Callable[[int], int]
BATCH = 64
PATIENCE = Policy().patience * (1 + Policy().jitter)


def bert(x: int) -> int:  # BERT-Large as PAPAYA measured it, in MB
    return 5260 + 209 * x


def bent(pieces: list[tuple[int, int]]) -> Need:
    """Convex: the maximum of affine functions, none of which falls."""
    return lambda x: max(base + slope * x for base, slope in pieces)


def largest(need: Need, capacity: int) -> int:
    """The largest size that really fits."""
    x = 0
    while need(x + 1) <= capacity and x < 10_000:
        x += 1
    return x


def pieces(size: int, batch: int = BATCH) -> int:
    return -(-batch // size)


def run_until(job: Job, until: float, batch: int = BATCH) -> list[Ran]:
    begin = len(job.history)
    while job.device.clock.now < until:
        job.call(batch)
    return job.history[begin:]


def sizes(history: list[Ran]) -> list[int]:
    return [ran.size for ran in history]


needs = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 400)), min_size=1, max_size=4)
starts = st.one_of(st.none(), st.integers(1, 100))


@settings(deadline=None, max_examples=60)
@given(
    needs,
    st.integers(500, 20_000),
    st.integers(1, 300),
    starts,
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
    st.sampled_from([1, 1, 4]),
)
def test_steady_memory_costs_one_failure_at_most_once_settled_and_then_no_move(
    lines: list[tuple[int, int]],
    total: int,
    batch: int,
    start: int | None,
    measured: bool,
    sensed: bool,
    seed: int,
    align: int,
) -> None:
    need = bent(lines)
    if need(min(batch, align)) > total:
        return
    job = Job(
        Device(total),
        need,
        start=start,
        seed=seed,
        measured=measured,
        sensed=sensed,
        policy=Policy(align=align),
    )
    for _ in range(160):
        job.call(batch)
    settled = next(i for i, ran in enumerate(job.history) if not ran.ooms)
    after = job.history[settled:]
    failed = [i for i, ran in enumerate(after) if ran.ooms]
    assert sum(ran.ooms for ran in after) <= 1
    if failed:
        assert not [ran.move for ran in after[failed[0] + 1 :] if ran.move]
    assert len(set(sizes(job.history[-60:]))) == 1, "a size must stay put"
    # Each growth saves a piece and goes to at most the double; a bisection adds as many steps
    # again.
    assert sum(1 for ran in after if ran.move) <= 2 * math.ceil(math.log2(batch + 1)) + 1


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 8000),
    st.integers(5, 400),
    st.integers(0, 40),
    st.integers(2, 300),
    starts,
    st.integers(0, 2**16),
)
def test_in_steady_memory_the_settled_size_is_the_best_that_fits(
    base: int, slope: int, room: int, batch: int, start: int | None, seed: int
) -> None:
    need = bent([(base, slope)])
    kept = (1 - Policy().margin) / (1 + UNCHECKED)
    total = math.ceil((base + slope * (1 + room)) / kept)
    job = Job(Device(total), need, start=start, seed=seed)
    for _ in range(160):
        job.call(batch)
    # Sizes that fit with both margins must be used; when a guess of a sixteenth fails, the sizes
    # within that step are lost.
    fitting = largest(need, int(total * kept))
    gained = (job.per_sample + job.per_piece / min(job.size, batch)) / (
        job.per_sample + job.per_piece / min(fitting, batch)
    ) - 1
    assert pieces(job.size, batch) <= pieces(fitting, batch) or gained < 0.06, (job.size, fitting)


def square_wave(period: float, low: int) -> Callable[[float], int]:
    return lambda t: low if int(t / period) % 2 else 0


@settings(deadline=None, max_examples=12)
@given(
    st.floats(40, 90),
    st.integers(1500, 6500),
    st.one_of(st.none(), st.integers(8, 100)),
    st.integers(0, 2**16),
)
def test_square_wave_costs_one_failure_per_halving_and_full_size_returns(
    period: float, low: int, start: int | None, seed: int
) -> None:
    device = Device(12_800, others=square_wave(period, low))
    job = Job(device, bert, start=start, seed=seed)
    full = run_until(job, period)[-1].size
    assert full >= 32
    halvings = max(0, math.ceil(math.log2(full / largest(bert, device.total - low))))
    for n in range(1, 9):
        phase = run_until(job, (n + 1) * period)
        moves = [ran.move for ran in phase if ran.move]
        failures = sum(1 for t in job.oom_times if n * period <= t < (n + 1) * period)
        if n % 2:
            # Halving until it fits, then at most one bisection that fails.
            assert failures <= halvings + 1
            assert len(moves) <= 3 + math.ceil(math.log2(full))
        else:
            assert failures == 0
            assert len(moves) <= halvings + 2
            assert pieces(phase[-1].size) <= pieces(full), (
                "full size is back before the co-tenant is"
            )


@settings(deadline=None, max_examples=12)
@given(st.integers(1000, 7000), st.floats(20, 200), st.integers(0, 2**16))
def test_full_size_returns_in_bounded_time_after_the_co_tenant_leaves(
    held: int, stay: float, seed: int
) -> None:
    device = Device(12_800, others=lambda t: held if 30 <= t < 30 + stay else 0)
    job = Job(device, bert, seed=seed)
    full = run_until(job, 30)[-1].size
    *_, last = run_until(job, 30 + stay)
    back = run_until(job, 30 + stay + 120)
    calls = next(
        i for i, ran in enumerate(back) if pieces(ran.size) <= pieces(full) and not ran.ooms
    )
    # What ran before comes back with the first reading that shows the memory, which is at most a
    # second old, and the jitter of a call. with the one that was being made when it left
    step = max(b.at - a.at for a, b in itertools.pairwise([last, *back]))
    assert back[calls].at - (30 + stay) <= 1 + 3 * step
    assert sum(ran.ooms for ran in back[1:]) == 0


def test_a_spike_between_two_readings_does_not_lower_the_size_for_good() -> None:
    spikes = [math.inf]
    device = Device(12_800, others=lambda t: 5000 if 0 <= t - spikes[-1] < 0.6 else 0)
    job = Job(device, bert, rest=1.0)
    full = run_until(job, 40)[-1].size
    job.forget_reading()
    assert job.reading() is not None, (
        "the last one before the spike; the next comes when it is over"
    )
    spikes.append(device.clock.now)
    failures = job.call(BATCH).ooms
    assert failures > 0
    assert job.call(BATCH).size < full
    later = run_until(job, device.clock.now + 2 * Policy().cooldown * job.lost)
    assert later[-1].size >= full
    assert sum(ran.ooms for ran in run_until(job, 300)) == 0


def falls(held: list[int], least: int) -> int:
    """How often memory fell by `least` bytes from a high."""
    count, low = 0, held[0]
    for now in held:
        low = min(low, now)
        if now - low >= least:
            count, low = count + 1, now
    return count


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2**16), st.integers(50, 800))
def test_random_walk_fails_no_oftener_than_memory_falls(seed: int, stride: int) -> None:
    rng, walk = random.Random(seed), [0]
    for _ in range(800):
        walk.append(min(7000, max(0, walk[-1] + rng.randint(-stride, stride))))
    device = Device(12_800, others=lambda t: walk[min(len(walk) - 1, int(t))])
    job = Job(device, bert, seed=seed)
    run_until(job, 800)
    failed = [ran for ran in job.history if ran.ooms]
    # A failing call ends with more pieces than it began with, and a growth, which can climb several
    # sizes at once, takes them away again.
    climbed = sum(
        -(-BATCH // move.before) - -(-BATCH // move.after)
        for ran in job.history
        if (move := ran.move) and move.after > move.before
    )
    assert len(failed) <= climbed + -(-BATCH // job.history[-1].size)
    # What grows fits with the margin, so a failure needs memory to have fallen by as much since (or
    # is an exploration); 5,800 is the least there is.
    assert len(failed) <= falls(walk, int(5800 * Policy().margin)) + 2


def two_jobs(device: Device, seed: int) -> tuple[Job, Job]:
    """Two equal processes whose calls end at the same moments: the clock only counts the first one's time, as if they ran side by side."""
    first = Job(device, bert, start=2, seed=seed)
    second = Job(device, bert, start=2, seed=seed + 1, per_piece=0.0, per_sample=0.0)
    while device.clock.now < 400:
        first.call(BATCH)
        second.call(BATCH)
    return first, second


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2**16), st.integers(13_000, 40_000))
def test_two_jobs_on_one_device_stop_failing(seed: int, total: int) -> None:
    for job in two_jobs(Device(total), seed):
        late = [t for t in job.oom_times if t > 200]
        assert not late
        assert len(set(sizes([ran for ran in job.history if ran.at > 200]))) == 1
        # log2 down from the batch, and a failed growth for each of the other's changes that frees
        # memory.
        assert job.ooms <= 2 * math.ceil(math.log2(BATCH))


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2**16), st.sampled_from([(20_000, 4000), (26_000, 8000), (36_000, 16_000)]))
def test_memory_that_comes_back_to_two_jobs_at_once_costs_each_one_failure_at_most(
    seed: int, memory: tuple[int, int]
) -> None:
    total, held = memory
    for job in two_jobs(Device(total, others=lambda t: held if 60 <= t < 150 else 0), seed):
        assert sum(1 for t in job.oom_times if 150 <= t < 250) <= 1
        assert not [t for t in job.oom_times if t >= 250]


def growth_times(seed: int, jitter: float) -> list[float]:
    """When a job grows to sizes that it has not run before; every process on the device reads the memory in the same second."""
    job = Job(Device(20_000), bert, seed=seed, policy=Policy(jitter=jitter, patience=8), start=2)
    run_until(job, 400)
    return [ran.at for ran in job.history if ran.move and ran.move.reason == "grow"]


def test_jitter_takes_jobs_out_of_step() -> None:
    assert growth_times(1, jitter=0.0) == growth_times(2, jitter=0.0), (
        "without jitter equal jobs grow at the same moments"
    )
    moments = [growth_times(seed, jitter=0.25) for seed in range(6)]
    step = 0.1 * 4
    pairs = [(a, b) for i, a in enumerate(moments) for b in moments[i + 1 :]]
    together = sum(any(abs(t - u) < step for u in b) for a, b in pairs for t in a) / sum(
        len(a) for a, _ in pairs
    )
    assert together < 0.5


def test_a_lost_sensor_stops_growth_and_nothing_else() -> None:
    device = Device(12_800, others=lambda t: 5000 if 20 <= t < 40 else 0)
    job = Job(device, bert)
    run_until(job, 30)
    low = job.size
    job.sensed = False
    lost = run_until(job, 300)
    assert set(sizes(lost)) == {low}
    job.sensed = True
    assert run_until(job, 340)[-1].size > low
