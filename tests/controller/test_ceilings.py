"""A growth that failed goes back and leaves a ceiling; cooldown, changed evidence or a clean call above it lifts the ceiling."""

from elastic_mbs.controller.controller import Capacity, Move
from tests.helpers.controller_driver import KEY, Driver


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
    driver = Driver(12, max_micro_batch_size=22)
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
    driver = Driver(8, max_micro_batch_size=16)
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
    driver = Driver(8, max_cooldown=20.0)
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


def test_a_clean_call_above_a_ceiling_disproves_it() -> None:
    driver = Driver(16, min_micro_batch_size=8)
    driver.failing(8, samples=8)
    assert driver.ceilings() == [[8, 7, 10_000]]
    driver.clean(8)
    assert driver.ceilings() == []
