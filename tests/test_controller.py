"""The controller's rules, one by one."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_mbs.controller import Capacity, Controller, Key, Limits, Move, Observation, Plan, Policy, shape_class
from elastic_mbs.errors import UsageError

KEY = Key("loss", "train", 0)
CALM = Policy(jitter=0.0)


class Driver:
    """Runs calls by hand: what a call sees is said by the test."""

    def __init__(self, start: int | None = None, *, limits: Limits | None = None, grow: bool = True, policy: Policy = CALM, seed: int = 0) -> None:
        self.now = 0.0
        self.capacity: int | None = 10_000
        self.need: Callable[[int], int] | None = lambda x: 100 + 10 * x
        self.fragmentation = 1.0
        self.seconds: Callable[[int], float] | None = None
        self.arguments: dict[str, Any] = {"start": start, "limits": limits or Limits(), "grow": grow, "policy": policy}
        self.seed = seed
        self.controller = self.make()

    def make(self) -> Controller:
        return Controller(**self.arguments, clock=lambda: self.now, random=random.Random(self.seed))

    def reading(self) -> Capacity | None:
        return None if self.capacity is None else Capacity(self.capacity, self.now)

    def peak(self, x: int) -> int | None:
        return None if self.need is None else self.need(x)

    def probe(self, samples: int, lengths: list[int], elements: int = 1, key: Key = KEY) -> list[int]:
        """A probing call whose pieces have these lengths; the size after each."""
        plan = self.controller.begin(key, samples, elements)
        after = [self.controller.piece_done(key, n, self.peak(n * elements), self.reading()) for n in lengths]
        self.finish(plan, samples, elements, key, size=after[-1] if after else plan.size, pieces=len(lengths))
        return after

    def finish(
        self,
        plan: Plan,
        samples: int,
        elements: int,
        key: Key,
        *,
        size: int,
        pieces: int = 1,
        retries: int = 0,
        ooms: int = 0,
        epoch: int | None = None,
    ) -> Move | None:
        self.now += 1
        longest = -(-samples // -(-samples // size))
        observation = Observation(
            size=size,
            epoch=plan.epoch if epoch is None else epoch,
            samples=samples,
            elements=elements,
            pieces=pieces,
            peak=self.peak(longest * elements) if plan.learning and not ooms else None,
            fragmentation=self.fragmentation,
            seconds=None if self.seconds is None else pieces * self.seconds(longest),
            retries=retries,
            ooms=ooms,
        )
        return self.controller.end(key, observation, self.reading())

    def clean(self, samples: int = 64, elements: int = 1, *, retries: int = 0, key: Key = KEY) -> Move | None:
        plan = self.controller.begin(key, samples, elements)
        return self.finish(plan, samples, elements, key, size=plan.size, pieces=-(-samples // plan.size), retries=retries)

    def failing(self, attempted: int, *more: int, samples: int = 64, elements: int = 1) -> tuple[list[int | None], Move | None]:
        """A call in which pieces of these lengths fail, one after the other."""
        plan = self.controller.begin(KEY, samples, elements)
        sizes = [self.controller.out_of_memory(KEY, n, self.reading()) for n in (attempted, *more)]
        last = sizes[-1]
        return sizes, self.finish(plan, samples, elements, KEY, size=last or 1, ooms=len(sizes))

    def until_move(self, calls: int = 40, samples: int = 64, elements: int = 1) -> tuple[int, Move | None]:
        """Clean calls until the size changes: how many, and the change."""
        for n in range(1, calls + 1):
            if move := self.clean(samples, elements):
                return n, move
        return calls, None

    def size(self) -> int | None:
        return self.controller.size(KEY)

    def ceilings(self) -> list[Any]:
        tracks: Any = self.controller.state_dict()["tracks"]
        return list(tracks[0]["ceilings"])


def test_auto_doubles_from_piece_to_piece_until_the_batch_is_whole() -> None:
    driver = Driver()
    assert driver.probe(40, [1, 2, 4, 8, 13, 12]) == [2, 4, 8, 16, 26, 26]
    assert driver.controller.begin(KEY, 40, 1) == Plan(size=26, epoch=5, probing=True, learning=True)
    assert driver.controller.piece_done(KEY, 20, 300, driver.reading()) == 40
    driver.controller.abandon(KEY)
    driver.probe(40, [40])
    assert not driver.controller.begin(KEY, 40, 1).probing
    assert driver.size() == 40


def test_probing_starts_at_the_policys_size_aligned() -> None:
    assert Driver(policy=Policy(probe=8), limits=Limits(align=3)).controller.begin(KEY, 64, 1).size == 6
    assert Driver(limits=Limits(minimum=5, align=4)).controller.begin(KEY, 64, 1).size == 8


def test_probing_stops_where_the_double_is_predicted_not_to_fit() -> None:
    driver = Driver()
    driver.capacity = 430  # 95 % of it hold 30 samples
    assert driver.probe(64, [1, 2, 4, 8, 16, 11]) == [2, 4, 8, 16, 16, 16]
    assert not driver.controller.begin(KEY, 64, 1).probing


def test_probing_stops_where_the_measured_peak_itself_does_not_fit() -> None:
    driver = Driver()
    driver.capacity = 100
    assert driver.probe(64, [1]) == [1]
    assert not driver.controller.begin(KEY, 64, 1).probing


def test_probing_goes_on_without_sensor_or_peaks_until_the_first_failure() -> None:
    blind, unmeasured = Driver(), Driver()
    blind.capacity, unmeasured.need = None, None
    assert blind.probe(64, [1, 2, 4]) == [2, 4, 8]
    assert unmeasured.probe(64, [1, 2, 4]) == [2, 4, 8]
    assert blind.failing(8)[0] == [4]
    assert not blind.controller.begin(KEY, 64, 1).probing


def test_probing_never_passes_the_maximum_and_ends_there() -> None:
    driver = Driver(limits=Limits(maximum=10, align=4))
    assert driver.probe(64, [4, 8, 8]) == [8, 8, 8]
    driver.probe(64, [8, 8])
    assert not driver.controller.begin(KEY, 64, 1).probing


def test_a_small_batch_after_a_large_one_does_not_end_probing() -> None:
    driver = Driver()
    driver.probe(64, [1, 2])
    assert driver.probe(3, [3]) == [3]
    assert driver.controller.begin(KEY, 64, 1).probing


def test_an_int_starts_there_and_does_not_probe() -> None:
    driver = Driver(9, limits=Limits(align=2))
    assert driver.controller.begin(KEY, 64, 1) == Plan(size=8, epoch=0, probing=False, learning=True)
    assert driver.controller.piece_done(KEY, 8, 100, driver.reading()) == 8


def test_a_size_is_never_above_the_batch() -> None:
    assert Driver(32).controller.begin(KEY, 5, 1).size == 5


def test_without_grow_a_size_never_rises_but_auto_may_settle() -> None:
    fixed, settling = Driver(4, grow=False), Driver(grow=False)
    assert not fixed.controller.begin(KEY, 64, 1).learning, "peaks are for growing"
    assert fixed.until_move() == (40, None)
    fixed.failing(4)
    assert fixed.until_move() == (40, None)
    assert settling.probe(64, [1, 2]) == [2, 4]
    settling.failing(4)
    assert settling.until_move() == (40, None)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 9))
def test_a_failure_halves_what_was_attempted_aligned_and_above_the_minimum(attempted: int, minimum: int, align: int) -> None:
    limits = Limits(minimum=minimum, align=align)
    driver = Driver(max(500, minimum), limits=limits)
    driver.controller.begin(KEY, 500, 1)
    size = driver.controller.out_of_memory(KEY, attempted, None)
    assert driver.size() == max(limits.floor, max(1, attempted // 2 // align) * align)
    if size is None:
        assert attempted < 2 * limits.floor or attempted <= align
    else:
        assert size == driver.size()
        assert size < attempted


def test_at_the_floor_a_failure_has_no_size_to_go_on_with() -> None:
    driver = Driver(2, limits=Limits(minimum=2))
    assert driver.failing(2)[0] == [None]
    assert driver.failing(3)[0] == [None], "3 samples cannot be cut into pieces of at least 2"
    assert driver.failing(4)[0] == [2]


def test_failures_follow_each_other_down_within_one_call() -> None:
    driver = Driver(64)
    assert driver.failing(64, 32, 16, 8)[0] == [32, 16, 8, 4]
    assert driver.size() == 4
    assert driver.ceilings() == [[8, 7, 10_000]], "a failure with as much memory at a smaller size says it all"


def test_growth_waits_for_patience_and_the_cooldown() -> None:
    driver = Driver(8)
    assert driver.until_move() == (4, Move(8, 16, "grow"))
    slow = Driver(16, policy=Policy(jitter=0.0, cooldown=30.0))
    slow.failing(16)
    slow.capacity = 20_000
    began = slow.now
    slow.until_move(100)
    assert slow.now - began >= 29


def test_growth_needs_a_reading_and_one_newer_than_the_last_move() -> None:
    driver = Driver(8)
    driver.capacity = None
    assert driver.until_move() == (40, None)
    driver.capacity = 10_000
    assert driver.clean() == Move(8, 16, "grow")
    stale = Capacity(10_000, driver.now)
    for _ in range(20):
        plan = driver.controller.begin(KEY, 64, 1)
        driver.now += 1
        observation = Observation(plan.size, plan.epoch, 64, 1, 4, 300, 1.0, None, 0, 0)
        assert driver.controller.end(KEY, observation, stale) is None
    assert driver.clean() == Move(16, 32, "grow")


def test_observations_of_an_older_epoch_do_not_count() -> None:
    driver = Driver(8)
    driver.until_move()
    for _ in range(20):
        plan = driver.controller.begin(KEY, 64, 1)
        assert driver.finish(plan, 64, 1, KEY, size=plan.size, pieces=4, epoch=plan.epoch - 1) is None


def test_growth_counts_margin_and_fragmentation() -> None:
    for fragmentation, expected in ((1.0, 22), (1.3, 16)):
        driver = Driver(8)
        driver.fragmentation = fragmentation
        driver.clean(48)
        driver.capacity = int(330 / 0.95)  # room for 23 samples; a batch of 48 is cut into 6 × 8, 5 × 10, 4 × 12, 3 × 16 or 2 × 24
        while driver.until_move(20, samples=64)[1]:
            pass
        assert driver.size() == {22: 22, 16: 13}[expected]


def test_growth_stops_at_the_fewest_pieces_and_at_the_maximum() -> None:
    whole, capped = Driver(40), Driver(4, limits=Limits(maximum=30, align=4))
    assert whole.until_move()[1] == Move(40, 64, "grow")
    assert whole.until_move() == (40, None)
    while capped.until_move()[1]:
        pass
    assert capped.size() == 24, "three pieces of at most 24, as 28 would be"


def test_a_size_that_saves_no_piece_is_no_growth() -> None:
    driver = Driver(32)
    driver.clean(40)
    driver.capacity = int(730 / 0.95)  # room for 63, but not for the whole batch
    assert driver.until_move() == (40, None)


def test_growth_is_not_worth_it_below_the_smallest_gain() -> None:
    for delta, grows in ((0.0001, False), (1.0, True)):
        driver = Driver(4)
        driver.seconds = lambda m, delta=delta: delta + 0.01 * m
        moves = []
        while (move := driver.until_move()[1]) is not None:
            moves.append(move)
        assert (driver.size() == 64) is grows
        assert moves, "the second size is exploration: without it nothing is known"


def test_times_that_become_known_later_count_as_well() -> None:
    for delta, grows in ((0.0001, False), (1.0, True)):
        driver = Driver(4)
        while True:
            observation = Observation(4, 0, 64, 1, 64 // (driver.size() or 4), None, 1.0, None, 0, 0)
            move = driver.until_move()[1]
            if move is None:
                break
            pieces = -(-64 // move.before)
            driver.controller.timed(KEY, observation._replace(pieces=pieces, seconds=pieces * (delta + 0.01 * 64 / pieces)))
            driver.controller.timed(KEY, observation._replace(seconds=1e-9, ooms=1))
            driver.controller.timed(KEY, observation._replace(seconds=float("nan")))
        assert (driver.size() == 64) is grows
    driver.controller.timed(Key("unknown", "train", 0), observation)


def test_with_one_size_measured_growth_takes_the_smallest_step_that_says_something() -> None:
    driver = Driver(16)
    driver.need = lambda x: 9000 + 10 * x  # most of it does not depend on the size: in proportion nothing more would fit
    assert driver.until_move(samples=256)[1] == Move(16, 18, "grow")
    assert driver.until_move(samples=256)[1] == Move(18, 32, "grow")


def test_with_one_size_measured_growth_in_proportion_needs_no_exploration() -> None:
    driver = Driver(16)
    driver.capacity = 500
    assert driver.until_move(samples=256)[1] == Move(16, 29, "grow")


def test_nothing_grows_while_the_measured_peak_itself_does_not_fit() -> None:
    driver = Driver(16)
    driver.capacity = 200
    assert driver.until_move() == (40, None)


def test_without_any_peak_growth_goes_on_only_while_no_ceiling_stands() -> None:
    driver = Driver(8)
    driver.need = None
    assert driver.until_move()[1] == Move(8, 16, "grow")
    driver.failing(16, 8)
    assert driver.until_move(100) == (100, None)


def test_between_the_last_good_and_the_last_bad_size_growth_bisects() -> None:
    driver = Driver(32)
    driver.failing(32, samples=320)
    moves = []
    while (move := driver.until_move(samples=320)[1]) is not None:
        moves.append(move.after)
    assert moves == [23, 27, 30], "the smallest sizes for 14, 12 and 11 pieces: 24, 28 and 30 halve the way to 32"


def test_memory_that_comes_back_does_not_make_everyone_grow_at_once() -> None:
    def waits(jitter: float) -> set[int]:
        calls = set()
        for seed in range(8):
            driver = Driver(16, policy=Policy(jitter=jitter, cooldown=40.0), seed=seed)
            driver.capacity = 200
            driver.until_move(20)
            driver.capacity = 10_000
            calls.add(driver.until_move(20)[0])
        return calls

    assert waits(0.0) == {1}
    assert len(waits(0.25)) > 3
    assert max(waits(0.25)) <= 12


def test_a_chance_to_grow_that_passes_is_forgotten() -> None:
    driver = Driver(16, policy=Policy(jitter=0.25, cooldown=400.0), seed=1)
    driver.capacity = 200
    driver.until_move(20)
    driver.capacity = 10_000
    assert driver.clean() is None
    driver.capacity = 200
    driver.until_move(200)
    driver.capacity = 10_000
    assert driver.clean() is None, "a new draw, from now"


def test_a_failed_growth_goes_back_and_is_not_tried_again_on_the_same_evidence() -> None:
    driver = Driver(8)
    driver.until_move()
    sizes, move = driver.failing(16)
    assert (sizes, move) == ([8], None), "the half is where it came from"
    driver = Driver(12)
    driver.until_move()
    sizes, move = driver.failing(22)
    assert sizes == [11]
    assert move == Move(11, 12, "limit")
    assert driver.until_move(300) == (300, None)
    assert driver.ceilings() == [[22, 11, 10_000]]


def test_batches_too_small_to_use_the_new_size_prove_nothing() -> None:
    driver = Driver(12, limits=Limits(maximum=22))
    driver.until_move()
    for _ in range(10):
        driver.clean(11)
    assert driver.failing(22)[1] == Move(11, 12, "limit")


def test_a_second_failure_in_the_call_of_a_failed_growth_stays_down() -> None:
    driver = Driver(12)
    driver.until_move()
    sizes, move = driver.failing(22, 11)
    assert sizes == [11, 5]
    assert move is None
    assert driver.size() == 5


def test_a_failed_growth_goes_back_even_if_the_call_is_abandoned() -> None:
    driver = Driver(12)
    driver.until_move()
    driver.controller.begin(KEY, 64, 1)
    driver.controller.out_of_memory(KEY, 22, driver.reading())
    driver.controller.abandon(KEY)
    assert driver.size() == 12


def test_changed_evidence_lifts_a_ceiling_after_the_cooldown() -> None:
    driver = Driver(8)
    driver.until_move()
    driver.failing(16)
    driver.capacity = 10_400
    assert driver.until_move(100) == (100, None), "a rise of 4 % is no change"
    driver.capacity = 10_600
    assert driver.clean() == Move(8, 16, "grow")


def test_each_failed_growth_doubles_the_cooldown_and_a_long_clean_run_resets_it() -> None:
    driver = Driver(8, limits=Limits(maximum=16))
    waits = []
    driver.until_move()
    for _ in range(4):
        driver.failing(16)
        driver.capacity = int((driver.capacity or 0) * 1.1)
        waits.append(driver.until_move(400)[0])
    assert waits == [9, 19, 39, 79], "10, 20, 40 and 80 seconds, at a second a call, the failing one included"
    for _ in range(80):
        driver.clean()
    driver.failing(16)
    driver.capacity = int((driver.capacity or 0) * 1.1)
    assert driver.until_move(400)[0] == 4


def test_the_cooldown_is_capped() -> None:
    driver = Driver(8, policy=Policy(jitter=0.0, max_cooldown=20.0))
    for _ in range(8):
        driver.until_move(100)
        driver.failing(16)
        driver.capacity = int((driver.capacity or 0) * 1.1)
    calls, move = driver.until_move(100)
    assert move is not None
    assert calls <= 21


def test_a_reading_from_before_the_co_tenant_does_not_hide_that_memory_comes_back() -> None:
    driver = Driver(16)
    driver.clean(16)
    plan = driver.controller.begin(KEY, 16, 1)
    driver.controller.out_of_memory(KEY, 16, Capacity(10_000, driver.now - 0.5))
    driver.capacity = 200
    driver.finish(plan, 16, 1, KEY, size=8, ooms=1)
    assert driver.ceilings() == [[16, 15, 200]]
    driver.until_move(20, samples=16)
    driver.capacity = 10_000
    assert driver.until_move(20, samples=16)[1] == Move(8, 16, "grow")


def test_a_failure_that_no_reading_explains_is_tried_again_once() -> None:
    driver = Driver(16)
    for _ in range(3):
        driver.clean(16)
    driver.failing(16, samples=16)
    assert driver.ceilings() == [[16, 15, None]]
    assert driver.until_move(20, samples=16)[1] == Move(8, 16, "grow")
    driver.failing(16, samples=16)
    assert driver.until_move(300, samples=16) == (300, None), "the second time it is believed"


def test_ceilings_of_full_memory_count_again_when_the_co_tenant_has_left() -> None:
    driver = Driver(8)
    driver.until_move()
    driver.failing(16)
    driver.clean()
    driver.capacity = 5000
    driver.failing(8)
    assert driver.ceilings() == [[8, 7, 5000], [16, 8, 10_000]]
    driver.capacity = 10_000
    assert driver.until_move()[1] == Move(4, 8, "grow")
    assert driver.until_move(200) == (200, None)


def test_a_failure_seen_with_more_memory_makes_one_with_less_redundant() -> None:
    driver = Driver(64, limits=Limits(minimum=8))
    driver.failing(8)
    driver.capacity = 5000
    driver.clean(4)
    driver.failing(32)
    assert driver.ceilings() == [[8, 7, 10_000]]


def test_a_clean_call_above_a_ceiling_disproves_it() -> None:
    driver = Driver(16, limits=Limits(minimum=8))
    driver.failing(8, samples=8)
    assert driver.ceilings() == [[8, 7, 10_000]]
    driver.clean(8)
    assert driver.ceilings() == []


def test_longer_samples_of_the_class_get_a_smaller_size_for_that_call_only() -> None:
    driver = Driver(16)
    driver.failing(16, elements=8)
    driver.controller.begin(KEY, 64, 8)
    assert driver.size() == 8
    assert driver.controller.begin(KEY, 64, 15).size == 8, "120 elements are below the 128 that failed"
    assert driver.controller.begin(KEY, 64, 16).size == 7
    assert driver.controller.begin(KEY, 64, 8).size == 8
    assert Driver(16).controller.begin(KEY, 64, 400).size == 16


def test_two_thrashing_calls_halve_and_leave_a_ceiling() -> None:
    driver = Driver(16)
    assert driver.clean(retries=1) is None
    assert driver.clean() is None
    assert driver.clean(retries=3) is None
    assert driver.clean(retries=1) == Move(16, 8, "thrash")
    assert driver.ceilings() == [[16, 15, 10_000]]
    floor = Driver(1)
    assert [floor.clean(retries=1) for _ in range(4)] == [None] * 4


def test_thrashing_after_a_growth_is_a_failed_growth() -> None:
    driver = Driver(12)
    driver.until_move()
    assert [driver.clean(retries=1) for _ in range(2)] == [None, Move(22, 12, "thrash")]
    assert driver.until_move(200) == (200, None)


def test_thrashing_ends_probing() -> None:
    driver = Driver()
    driver.probe(64, [1, 2, 4, 8])
    for _ in range(2):
        driver.clean(retries=2)
    assert not driver.controller.begin(KEY, 64, 1).probing
    assert driver.size() == 8


def test_peaks_are_wanted_only_while_a_size_is_learned() -> None:
    driver = Driver(64)
    wanted = []
    for _ in range(8):
        plan = driver.controller.begin(KEY, 64, 1)
        wanted.append(plan.learning)
        driver.finish(plan, 64, 1, KEY, size=64)
    assert wanted == [True] * 4 + [False] * 4
    assert driver.controller.begin(KEY, 64, 2).learning is False or driver.controller.begin(KEY, 64, 1).learning is False
    blind = Driver(64)
    blind.need = None
    for _ in range(8):
        blind.clean()
    assert not blind.controller.begin(KEY, 64, 1).learning, "whoever resets the statistics too is left in peace"


def test_a_new_shape_class_starts_from_the_nearest_one_by_elements() -> None:
    driver = Driver()
    driver.capacity = 10**6
    for n in ([1, 2, 4, 8, 16, 32], [64]):
        driver.probe(64, n, elements=100, key=Key("loss", "train", shape_class(100)))
    new = Key("loss", "train", shape_class(300))
    assert driver.controller.begin(new, 64, 300) == Plan(size=21, epoch=0, probing=False, learning=True)
    assert driver.controller.begin(Key("loss", "train", 1), 9999, 3).size == 64 * 100 // 3
    assert driver.controller.begin(Key("loss", "eval", 8), 64, 300).probing
    assert driver.controller.begin(Key("other", "train", 8), 64, 300).probing


def test_of_two_neighbours_the_one_of_longer_samples_decides() -> None:
    driver = Driver()
    state = driver.controller.state_dict()
    for shape, size in ((4, 64), (6, 2)):
        driver.controller = driver.make()
        driver.controller.begin(Key("loss", "train", shape), 64, 2**shape)
        saved: Any = driver.controller.state_dict()["tracks"]
        saved[0] |= {"size": size, "probing": False}
        tracks: Any = state["tracks"]
        tracks.extend(saved)
    driver.controller = driver.make()
    driver.controller.load_state_dict(state)
    assert driver.controller.begin(Key("loss", "train", 5), 64, 32).size == 2 * 64 // 32


def test_tracks_do_not_disturb_each_other() -> None:
    driver = Driver(16)
    driver.clean()
    other = Key("loss", "eval", 0)
    driver.controller.begin(other, 64, 1)
    driver.controller.out_of_memory(other, 16, driver.reading())
    driver.controller.abandon(other)
    assert driver.size() == 16
    assert driver.controller.size(other) == 8


def test_an_open_call_is_abandoned_by_the_next_one() -> None:
    driver = Driver(16)
    driver.controller.begin(KEY, 64, 1)
    driver.controller.out_of_memory(KEY, 16, driver.reading())
    assert driver.controller.begin(KEY, 64, 1).size == 8
    driver.controller.abandon(KEY)
    driver.controller.abandon(KEY)
    driver.controller.abandon(Key("unknown", "train", 0))
    assert driver.size() == 8


def test_the_same_clock_and_seed_give_the_same_decisions() -> None:
    def history(seed: int) -> list[object]:
        driver = Driver(4, policy=Policy(jitter=0.5), seed=seed)
        out: list[object] = [driver.until_move() for _ in range(3)]
        out.append(driver.failing(32))
        driver.capacity = 20_000
        out.append(driver.until_move(200))
        return [*out, driver.controller.state_dict()]

    assert history(7) == history(7)
    assert any(history(7) != history(seed) for seed in range(8, 12))


def learned() -> Driver:
    driver = Driver(8, policy=Policy(jitter=0.25))
    driver.seconds = lambda m: 0.1 + 0.01 * m
    driver.until_move()
    driver.until_move()
    driver.failing(32)
    driver.capacity = 5000
    driver.clean()
    return driver


def test_a_saved_state_is_json_and_comes_back_the_same() -> None:
    driver = learned()
    state = json.loads(json.dumps(driver.controller.state_dict()))
    again = driver.make()
    again.load_state_dict(state)
    assert again.state_dict() == driver.controller.state_dict() == state
    assert again.size(KEY) == driver.size()


def test_what_is_left_of_a_cooldown_survives_another_clock() -> None:
    driver = learned()
    state = driver.controller.state_dict()
    driver.now = 1e6
    driver.controller = driver.make()
    driver.controller.load_state_dict(state)
    tracks: Any = state["tracks"]
    assert tracks[0]["cooldown_left"] > 1
    driver.now += tracks[0]["cooldown_left"] / 2
    later: Any = driver.controller.state_dict()["tracks"]
    assert later[0]["cooldown_left"] == pytest.approx(tracks[0]["cooldown_left"] / 2)


def test_a_growth_on_trial_is_still_on_trial_after_loading() -> None:
    driver = Driver(12)
    driver.until_move()
    state = driver.controller.state_dict()
    driver.controller = driver.make()
    driver.controller.load_state_dict(state)
    assert driver.failing(22)[1] == Move(11, 12, "limit")


def test_present_limits_win_over_saved_sizes() -> None:
    driver = Driver(32)
    driver.clean()
    state = driver.controller.state_dict()
    for limits, grow, start, expected in (
        (Limits(maximum=10, align=4), True, None, 8),
        (Limits(minimum=50), True, None, 50),
        (Limits(), False, 6, 6),
        (Limits(), True, 6, 32),
    ):
        other = Driver(start, limits=limits, grow=grow).controller
        other.load_state_dict(state)
        assert other.size(KEY) == expected


def corrupt(change: Callable[[dict[str, Any]], object]) -> dict[str, object]:
    state = json.loads(json.dumps(learned().controller.state_dict()))
    change(state["tracks"][0])
    return dict(state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "version None"),
        ({"version": 99, "tracks": []}, "version 99"),
        ([], r"version \[\]"),
        ({"version": 1}, "tracks=None"),
        ({"version": 1, "tracks": [3]}, "tracks="),
        ({"version": 1, "tracks": [{}]}, "name=None"),
        (corrupt(lambda t: t.update(size=0)), "size=0"),
        (corrupt(lambda t: t.update(size=True)), "size=True"),
        (corrupt(lambda t: t.pop("patience")), "patience=None"),
        (corrupt(lambda t: t.update(probing=1)), "probing=1"),
        (corrupt(lambda t: t.update(cooldown_left=-1)), "cooldown_left=-1"),
        (corrupt(lambda t: t.update(cooldown_left="x")), "cooldown_left='x'"),
        (corrupt(lambda t: t.update(trial=[1, 2])), "trial="),
        (corrupt(lambda t: t.update(passed_with=[1, "x"])), "passed_with="),
        (corrupt(lambda t: t.update(ceilings=[[1, 2]])), "ceilings="),
        (corrupt(lambda t: t.update(ceilings=[[1, 2, 3]])), "no saved ceiling"),
        (corrupt(lambda t: t.update(recent=[[0, 2]])), "no saved batch"),
        (corrupt(lambda t: t.update(recent=[])), "seen no batch"),
        (corrupt(lambda t: t.update(memory=[[1, 2, 3]])), "memory measurement"),
        (corrupt(lambda t: t.update(time=3)), "time=3"),
    ],
)
def test_a_state_that_is_unknown_or_malformed_is_refused_and_changes_nothing(state: Any, message: str) -> None:
    driver = Driver(8)
    driver.clean()
    before = driver.controller.state_dict()
    with pytest.raises(UsageError, match=message):
        driver.controller.load_state_dict(state)
    assert driver.controller.state_dict() == before


def test_a_loaded_probe_goes_on_unless_a_size_was_given() -> None:
    driver = Driver()
    driver.probe(64, [1, 2])
    state = driver.controller.state_dict()
    auto, fixed = Driver().controller, Driver(4).controller
    auto.load_state_dict(state)
    fixed.load_state_dict(state)
    assert auto.begin(KEY, 64, 1).probing
    assert not fixed.begin(KEY, 64, 1).probing


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Limits(minimum=0), "min_micro_batch_size=0"),
        (lambda: Limits(align=0), "align=0"),
        (lambda: Limits(minimum=5, maximum=4), "max_micro_batch_size=4"),
        (lambda: Limits(maximum=3, align=4), "smallest allowed one is 4"),
        (lambda: Policy(patience=0), "patience=0"),
        (lambda: Policy(jitter=-0.1), "jitter=-0.1"),
        (lambda: Policy(cooldown=float("nan")), "cooldown=nan"),
        (lambda: Policy(margin=1.0), "margin=1.0"),
        (lambda: Policy(cooldown=10, max_cooldown=5), "max_cooldown=5"),
        (lambda: Driver(0), "micro_batch_size=0"),
        (lambda: Driver(20, limits=Limits(maximum=10)), "micro_batch_size=20"),
        (lambda: Driver(2, limits=Limits(minimum=4)), "micro_batch_size=2"),
        (lambda: shape_class(0), "elements=0"),
        (lambda: Driver().controller.begin(KEY, 0, 1), "batch of 0 samples"),
        (lambda: Driver().controller.begin(KEY, 1, 0), "0 elements"),
        (lambda: Driver().controller.piece_done(KEY, 1, None, None), r"begin\(\) comes first"),
    ],
)
def test_bad_values_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_keys_and_shape_classes_are_readable() -> None:
    assert [shape_class(n) for n in (1, 2, 3, 4, 1023, 1024)] == [0, 1, 1, 2, 9, 10]
    assert str(Key("lm", "train", 10)) == "lm (train, 2^10 elements per sample)"


def test_an_unknown_track_has_no_size() -> None:
    assert Driver().controller.size(KEY) is None
