"""Growth: when and how far. It needs evidence, a piece saved, and a peak predicted to fit."""

import math

import pytest

from elastic_mbs.controller.controller import CallOutcome, Capacity, Extent, Key, Move
from elastic_mbs.controller.growth import Margin
from elastic_mbs.controller.track import Track
from tests.helpers.controller_driver import KEY, Driver
from tests.helpers.steps import there


def test_growth_waits_for_patience() -> None:
    driver = Driver(8)
    assert driver.until_move() == (4, Move(8, 16, "grow"))


def test_growth_needs_a_reading_and_one_newer_than_the_last_move() -> None:
    driver = Driver(8)
    driver.capacity = None
    assert driver.until_move() == (40, None)
    driver.capacity = 10_000
    assert driver.clean() == Move(8, 16, "grow")
    stale = Capacity(10_000, driver.now)
    for _ in range(20):
        driver.controller.begin(KEY, Extent(64, 1, 64))
        driver.now += 1
        assert driver.controller.end(KEY, CallOutcome(64, 1, 4, 300, 1.0, None, 0), stale) is None
    assert driver.clean() == Move(16, 32, "grow")


def test_growth_counts_margin_and_fragmentation() -> None:
    for fragmentation, expected in ((1.0, 22), (1.3, 16)):
        driver = Driver(8)
        driver.fragmentation = fragmentation
        driver.clean(48)
        # room for 23 samples, so for three pieces of 22
        driver.capacity = math.ceil(330 / (1 - Margin.LEAST))
        while driver.until_move(20, samples=64)[1]:
            pass
        assert driver.size() == {22: 22, 16: 13}[expected]


def test_growth_stops_at_the_fewest_pieces_and_at_the_maximum() -> None:
    whole, capped = Driver(40), Driver(4, max_micro_batch_size=30, align=4)
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


@pytest.mark.parametrize("later", [False, True], ids=["known at once", "known later"])
@pytest.mark.parametrize(("delta", "grows"), [(0.0001, False), (1.0, True)])
def test_growth_is_not_worth_it_below_the_smallest_gain(
    delta: float, grows: bool, later: bool
) -> None:
    driver, moves, outcome = Driver(4), list[Move](), CallOutcome(64, 1, 16, None, 1.0, None, 0)
    driver.seconds = None if later else lambda m: delta + 0.01 * m
    while (move := driver.until_move()[1]) is not None:
        moves.append(move)
        if later:
            pieces = -(-64 // move.before)
            driver.controller.timed(
                KEY, outcome._replace(pieces=pieces, seconds=pieces * (delta + 0.01 * 64 / pieces))
            )
            driver.controller.timed(KEY, outcome._replace(seconds=1e-9, ooms=1))
            driver.controller.timed(KEY, outcome._replace(seconds=float("nan")))
            driver.controller.timed(Key("unknown", "train", 0), outcome)
    assert (driver.size() == 64) is grows
    assert moves, "the second size is exploration: without it nothing is known"


def test_the_whole_batch_comes_back_with_its_memory_also_where_that_saves_no_time() -> None:
    driver = Driver()
    driver.seconds = lambda m: 0.01 * m  # a piece more costs nothing
    for _ in range(3):
        driver.clean()
    driver.capacity = 300  # a co-tenant
    driver.failing(64, 32)
    for _ in range(20):
        driver.clean()
    assert driver.size() < 64, "without its memory it stays away"
    driver.capacity = 10_000
    move = driver.until_move()[1]
    assert move is not None
    assert move.after == 64


def test_a_move_names_no_more_samples_than_the_batch_has() -> None:
    driver = Driver()
    for _ in range(3):
        driver.clean()
    assert driver.failing(64) == ([32], Move(32, 64, "grow"))


def test_a_move_from_the_whole_batch_names_its_samples() -> None:
    driver = Driver(thrash_calls=1)
    assert driver.clean(retries=1) == Move(64, 32, "thrash")


@pytest.mark.parametrize(
    ("base", "capacity", "sizes"),
    [
        # most of it does not depend on the size: in proportion nothing more would fit
        (9000, 10_000, [18, 32]),
        (100, 500, [29]),  # in proportion, which needs no exploration
        (100, 200, []),  # the measured peak itself does not fit
    ],
)
def test_with_one_size_measured_growth_takes_the_smallest_useful_step(
    base: int, capacity: int, sizes: list[int]
) -> None:
    driver = Driver(16)
    driver.need, driver.capacity = lambda x: base + 10 * x, capacity
    assert [there(driver.until_move(samples=256)[1]).after for _ in sizes] == sizes
    assert sizes or driver.until_move(samples=256) == (40, None)


def test_without_any_peak_growth_goes_on_only_while_no_ceiling_stands() -> None:
    driver = Driver(8)
    driver.need = None
    assert driver.until_move()[1] == Move(8, 16, "grow")
    driver.failing(16)
    assert driver.until_move(100) == (100, None)


def test_between_the_last_good_and_the_last_bad_size_growth_bisects() -> None:
    driver = Driver(32)
    driver.failing(32, samples=320)
    moves = []
    while (move := driver.until_move(samples=320)[1]) is not None:
        moves.append(move.after)
    assert moves == [23, 27, 30], (
        "the smallest sizes for 14, 12 and 11 pieces: 24, 28 and 30 halve the way to 32"
    )


def test_a_failed_growth_goes_back_and_needs_new_evidence() -> None:
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
    assert driver.ceilings() == [[22, 11, 10_000, 0.0]]


def test_batches_too_small_to_use_the_new_size_prove_nothing() -> None:
    driver = Driver(12, max_micro_batch_size=22)
    driver.until_move()
    for _ in range(10):
        driver.clean(11)
    assert driver.failing(22)[1] == Move(11, 12, "limit")


def test_a_failed_growth_goes_back_unless_a_second_failure_follows() -> None:
    driver = Driver(12)
    driver.until_move()
    assert driver.failing(22, 11) == ([11, 5], None)
    assert driver.size() == 5
    driver = Driver(12)
    driver.until_move()
    driver.controller.begin(KEY, Extent(64, 1, 64))
    driver.controller.out_of_memory(KEY, 22, driver.reading())
    driver.controller.abandon(KEY)
    assert driver.size() == 12


def test_changed_evidence_lifts_a_ceiling() -> None:
    driver = Driver(8)
    driver.until_move()
    driver.failing(16)
    driver.capacity = 10_400
    assert driver.until_move(100) == (100, None), "a rise of 4 % is no change"
    driver.capacity = 10_600
    assert driver.clean() == Move(8, 16, "grow")


def test_a_failed_growth_is_followed_by_a_cooldown_of_100_times_its_loss() -> None:
    driver = Driver(8, max_micro_batch_size=16)
    waits = []
    driver.until_move()
    for driver.lost in (0.1, 0.4):
        driver.failing(16)
        driver.capacity = int((driver.capacity or 0) * 1.1)
        waits.append(driver.until_move(400)[0])
    assert waits == [10, 40], "at a second a call"


def test_a_growth_that_has_saved_more_than_it_lost_has_no_cooldown() -> None:
    driver = Driver(8, max_micro_batch_size=16, patience=2)
    # a call of 64 samples takes 1.04 s in pieces of 8, and 0.84 s in pieces of 16
    driver.seconds = lambda m: 0.05 + 0.01 * m
    driver.until_move()
    driver.lost = 0.5
    for calls, wait in ((1, 30), (6, 2)):
        for _ in range(calls):
            driver.clean()
        alone, driver.capacity = there(driver.capacity), 5000
        driver.failing(16)
        driver.capacity = int(alone * 1.1)
        assert driver.until_move(400)[0] == pytest.approx(wait, abs=1)


def test_a_size_proven_with_this_memory_comes_back_at_once() -> None:
    driver = Driver()
    for _ in range(4):
        driver.clean()
    driver.capacity = 200
    driver.failing(64, 32, 16)
    assert driver.until_move(10) == (10, None)
    driver.capacity = 10_000
    assert driver.clean() == Move(8, 64, "grow")
    assert driver.clean() is None
    driver.failing(64)
    assert driver.until_move(3) == (3, None), (
        "it has failed with as much memory: not proven any more"
    )


def test_a_newer_reading_is_wanted_while_only_that_is_missing() -> None:
    driver = Driver(8)
    driver.capacity = 175  # less than the double needs
    wanted = []
    for _ in range(6):
        driver.clean()
        wanted.append(driver.controller.begin(KEY, Extent(64, 1, 64)).wants_reading)
    assert wanted == [False] * 3 + [True] * 3
    whole = Driver()
    for _ in range(6):
        whole.clean()
        assert not whole.controller.begin(KEY, Extent(64, 1, 64)).wants_reading, (
            "there is nothing to grow to"
        )


def test_a_failure_without_a_reading_is_explained_by_the_next_one() -> None:
    driver = Driver(16)
    driver.clean(16)
    decision = driver.controller.begin(KEY, Extent(16, 1, 16))
    driver.controller.out_of_memory(KEY, 16, None)
    driver.capacity = 200
    driver.finish(decision, 16, 1, KEY, size=8, ooms=1)
    assert driver.ceilings() == [[16, 15, 200, 0.0]]
    driver.until_move(20, samples=16)
    driver.capacity = 10_000
    assert driver.until_move(20, samples=16)[1] == Move(8, 16, "grow")


def test_after_an_unexplained_failure_the_size_comes_back_once() -> None:
    driver = Driver(16)
    for _ in range(3):
        driver.clean(16)
    assert driver.failing(16, samples=16) == ([8], Move(8, 16, "grow"))
    assert driver.ceilings() == []
    driver.clean(16)
    assert driver.failing(16, samples=16) == ([8], None)
    assert driver.ceilings() == [[16, 8, 10_000, 0.0]]
    assert driver.until_move(300, samples=16) == (300, None)


def test_two_unexplained_failures_are_retried_when_small_pieces_cost_as_much() -> None:
    driver = Driver(16)
    # 16 samples take 0.26 s in one piece, and 0.56 s in four
    driver.seconds = lambda m: 0.1 + 0.01 * m
    for _ in range(3):
        driver.clean(16)
    driver.lost = 4.0
    assert driver.failing(16, 8, samples=16) == ([8, 4], None)
    assert driver.ceilings() == [[8, 7, None, 4.0], [16, 15, None, 4.0]]
    calls = 0
    while driver.size() < 16:
        driver.clean(16)
        calls += 1
    assert 4 / 0.54 <= calls <= 30, (
        "at a second a call, of which four pieces take 0.54 of the time more"
    )


def test_ceilings_of_full_memory_count_again_when_the_co_tenant_has_left() -> None:
    driver = Driver(8)
    driver.until_move()
    driver.failing(16)
    driver.clean()
    driver.capacity = 5000
    driver.failing(8)
    assert driver.ceilings() == [[8, 7, 5000, 0.0], [16, 8, 10_000, 0.0]]
    driver.capacity = 10_000
    assert driver.until_move()[1] == Move(4, 8, "grow")
    assert driver.until_move(200) == (200, None)


def test_a_clean_call_above_a_ceiling_disproves_it() -> None:
    driver = Driver(16, min_micro_batch_size=8)
    driver.failing(8, samples=8)
    assert driver.ceilings() == [[8, 7, 10_000, 0.0]]
    driver.clean(8)
    assert driver.ceilings() == []


def test_a_failure_that_memory_explains_goes_to_what_fits_at_once() -> None:
    driver = Driver()
    driver.clean()
    driver.clean(128)
    driver.capacity = 100 + 10 * 26  # of 64 samples pieces of 22 are the longest that fit
    sizes, _ = driver.failing(64)
    assert sizes == [22]
    assert driver.until_move(20) == (20, None)
    driver.capacity = 100 + 10 * 10
    assert driver.failing(22, 4)[0] == [8, 2], (
        "a second failure says that the prediction was wrong: it halves"
    )


def test_a_failure_that_memory_does_not_explain_halves() -> None:
    for measured in (True, False):
        driver = Driver()
        driver.need = driver.need if measured else None
        driver.clean()
        driver.capacity = 10_000 if measured else 360
        assert driver.failing(64)[0] == [32]


def test_what_stays_free_follows_how_far_readings_fall() -> None:
    margin, track = Margin(0.05), Track(1, 4, decided_at=0.0)
    seen = []
    for at, room in enumerate([1000, 1000, 970, 980, 500, 500, *[500] * Margin.RECENT]):
        margin.follow(Capacity(room, float(at)))
        margin.follow(Capacity(1, float(at)))  # not a newer reading
        seen.append(1 - margin.budget(track, Capacity(1000, 0.0)) / 1000)
    assert seen[:6] == pytest.approx([0.01, 0.01, 0.03, 0.03, 0.03, 0.03]), (
        "a visit is no fall that a margin could cover"
    )
    assert seen[-1] == pytest.approx(0.01)
    track.fragmentation = 1.25
    assert margin.budget(track, Capacity(1000, 0.0)) == pytest.approx(950 / 1.25), (
        "an allocator that reserves can need one block more"
    )


@pytest.mark.parametrize(("room", "wait"), [(10, 40), (6, 1)])
def test_a_growth_lost_nothing_where_the_size_before_it_would_have_failed(
    room: int, wait: int
) -> None:
    driver = Driver(8, max_micro_batch_size=16)
    driver.until_move()
    for _ in range(4):
        driver.clean()
    driver.lost, driver.capacity = 0.4, math.ceil((100 + 10 * room) / 0.98)
    driver.failing(16)
    driver.capacity = 10_000
    assert driver.until_move(60)[0] == wait, "at a second a call"
