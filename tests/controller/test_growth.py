"""When a size grows and how far: not without evidence, not beyond what is predicted to fit, and not where no piece is saved."""

from elastic_mbs.controller.controller import CallOutcome, Capacity, Key, Move
from tests.helpers.controller_driver import KEY, Driver


def test_growth_waits_for_patience_and_the_cooldown() -> None:
    driver = Driver(8)
    assert driver.until_move() == (4, Move(8, 16, "grow"))
    slow = Driver(16, cooldown=30.0)
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
        driver.controller.begin(KEY, 64, 1)
        driver.now += 1
        assert driver.controller.end(KEY, CallOutcome(64, 1, 4, 300, 1.0, None, 0), stale) is None
    assert driver.clean() == Move(16, 32, "grow")


def test_a_call_that_changed_the_size_is_no_clean_call_at_the_new_one() -> None:
    driver = Driver()
    driver.probe(48, [1, 2, 4, 8, 16])
    driver.capacity = 200
    driver.probe(48, [16])  # stops probing
    driver.capacity = 10_000
    assert driver.until_move(samples=48) == (3, Move(32, 48, "grow")), "the call that stopped probing was the first of four"


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
            outcome = CallOutcome(64, 1, 16, None, 1.0, None, 0)
            move = driver.until_move()[1]
            if move is None:
                break
            pieces = -(-64 // move.before)
            driver.controller.timed(KEY, outcome._replace(pieces=pieces, seconds=pieces * (delta + 0.01 * 64 / pieces)))
            driver.controller.timed(KEY, outcome._replace(seconds=1e-9, ooms=1))
            driver.controller.timed(KEY, outcome._replace(seconds=float("nan")))
        assert (driver.size() == 64) is grows
    driver.controller.timed(Key("unknown", "train", 0), outcome)


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
