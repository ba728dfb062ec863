"""The controller's rules, one by one, and its saved state; growth has a file of its own."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_mbs.controller.controller import Decision, Extent, Key, Move, Policy, shape_class
from elastic_mbs.errors import UsageError
from tests.helpers.controller_driver import KEY, Driver


def test_auto_starts_with_the_whole_batch_however_large_the_next_one_is() -> None:
    driver = Driver()
    assert driver.controller.begin(KEY, Extent(40, 1, 40)) == Decision(size=40, learning=True)
    driver.controller.abandon(KEY)
    assert driver.clean(40) is None
    assert driver.controller.begin(KEY, Extent(400, 1, 400)).size == 400
    assert driver.controller.out_of_memory(KEY, 400, driver.reading()) == 200
    driver.controller.abandon(KEY)
    assert driver.controller.begin(KEY, Extent(800, 1, 800)).size == 200
    assert (
        Driver(max_micro_batch_size=30, align=4).controller.begin(KEY, Extent(64, 1, 64)).size == 28
    )


def test_an_int_starts_there() -> None:
    assert Driver(9, align=2).controller.begin(KEY, Extent(64, 1, 64)) == Decision(
        size=8, learning=True
    )


def test_without_grow_a_size_never_rises_but_auto_may_settle() -> None:
    fixed, settling = Driver(4, grow=False), Driver(grow=False)
    assert not fixed.controller.begin(KEY, Extent(64, 1, 64)).learning, "peaks are for growing"
    assert fixed.until_move() == (40, None)
    fixed.failing(4)
    assert fixed.until_move() == (40, None)
    settling.failing(64)
    assert settling.size() == 32
    assert settling.until_move() == (40, None)
    settling.failing(32)
    assert settling.size() == 16, "nor is it tried again where memory does not explain the failure"
    assert settling.until_move() == (40, None)


def test_without_grow_a_loaded_trial_brings_no_size_back() -> None:
    growing, fixed = Driver(12), Driver(grow=False)
    growing.until_move()
    fixed.controller.load_state_dict(growing.controller.state_dict())
    assert fixed.size() == 22
    assert fixed.failing(22) == ([11], None)
    assert growing.failing(22) == ([11], Move(11, 12, "limit"))


def test_an_escalation_after_an_unexplained_failure_ends_no_call() -> None:
    driver = Driver(7, min_micro_batch_size=4)
    for _ in range(3):
        driver.clean(7)
    decision = driver.controller.begin(KEY, Extent(7, 1, 7))
    assert driver.controller.out_of_memory(KEY, 7, driver.reading()) is None
    driver.controller.needs_other(KEY)
    assert driver.finish(decision, 7, 1, KEY, size=4, ooms=1) == Move(4, 7, "grow")


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 9))
def test_a_failure_halves_what_was_attempted_aligned_and_above_the_minimum(
    attempted: int, minimum: int, align: int
) -> None:
    driver = Driver(max(500, minimum), min_micro_batch_size=minimum, align=align)
    floor = driver.policy.limits.floor
    driver.controller.begin(KEY, Extent(500, 1, 500))
    size = driver.controller.out_of_memory(KEY, attempted, None)
    assert driver.size() == max(floor, max(1, attempted // 2 // align) * align)
    if size is None:
        assert attempted < 2 * floor or attempted <= align
    else:
        assert size == driver.size()
        assert size < attempted


def test_at_the_floor_a_failure_has_no_size_to_go_on_with() -> None:
    driver = Driver(2, min_micro_batch_size=2)
    assert driver.failing(2)[0] == [None]
    assert driver.failing(3)[0] == [None], "3 samples cannot be cut into pieces of at least 2"
    assert driver.failing(4)[0] == [2]


def test_longer_samples_of_the_class_get_a_smaller_size_for_that_call_only() -> None:
    driver = Driver(16)
    driver.failing(16, elements=8)
    driver.controller.begin(KEY, Extent(64, 8, 64))
    assert driver.size() == 8
    assert driver.controller.begin(KEY, Extent(64, 15, 64)).size == 8, (
        "120 elements are below the 128 that failed"
    )
    assert driver.controller.begin(KEY, Extent(64, 16, 64)).size == 7
    assert driver.controller.begin(KEY, Extent(64, 8, 64)).size == 8
    assert Driver(16).controller.begin(KEY, Extent(64, 400, 64)).size == 16


def test_two_thrashing_calls_halve_and_leave_a_ceiling() -> None:
    driver = Driver(16)
    assert driver.clean(retries=1) is None
    assert driver.clean() is None
    assert driver.clean(retries=3) is None
    assert driver.clean(retries=1) == Move(16, 8, "thrash")
    assert driver.ceilings() == [[16, 15, None, 2.0]], "as much memory is there as before"
    floor = Driver(1)
    assert [floor.clean(retries=1) for _ in range(4)] == [None] * 4


def test_thrashing_after_a_growth_is_a_failed_growth() -> None:
    driver = Driver(12)
    driver.until_move()
    assert [driver.clean(retries=1) for _ in range(2)] == [None, Move(22, 12, "thrash")]
    assert driver.until_move(200) == (200, None)


def test_peaks_are_wanted_only_while_a_size_is_learned() -> None:
    driver = Driver(64)
    wanted = []
    for _ in range(8):
        decision = driver.controller.begin(KEY, Extent(64, 1, 64))
        wanted.append(decision.learning)
        driver.finish(decision, 64, 1, KEY, size=64)
    assert wanted == [True] * 4 + [False] * 4
    assert (
        driver.controller.begin(KEY, Extent(64, 2, 64)).learning is False
        or driver.controller.begin(KEY, Extent(64, 1, 64)).learning is False
    )
    blind = Driver(64)
    blind.need = None
    for _ in range(8):
        blind.clean()
    assert not blind.controller.begin(KEY, Extent(64, 1, 64)).learning, (
        "whoever resets the statistics too is left in peace"
    )


def test_a_new_shape_class_starts_from_the_nearest_one_by_elements() -> None:
    driver = Driver()
    driver.capacity = 10**6
    known = Key("loss", "train", shape_class(100))
    driver.controller.begin(known, Extent(128, 100, 128))
    driver.controller.out_of_memory(known, 128, driver.reading())
    new = Key("loss", "train", shape_class(300))
    assert driver.controller.begin(new, Extent(64, 300, 64)) == Decision(size=21, learning=True)
    assert (
        driver.controller.begin(Key("loss", "train", 1), Extent(9999, 3, 9999)).size
        == 64 * 100 // 3
    )
    assert driver.controller.begin(Key("loss", "eval", 8), Extent(64, 300, 64)).size == 64
    assert driver.controller.begin(Key("other", "train", 8), Extent(64, 300, 64)).size == 64


def test_of_two_neighbours_the_one_of_longer_samples_decides() -> None:
    driver = Driver()
    state = driver.controller.state_dict()
    for shape, size in ((4, 64), (6, 2)):
        driver.controller = driver.make()
        driver.controller.begin(Key("loss", "train", shape), Extent(64, 2**shape, 64))
        saved: Any = driver.controller.state_dict()["tracks"]
        saved[0] |= {"size": size}
        tracks: Any = state["tracks"]
        tracks.extend(saved)
    driver.controller = driver.make()
    driver.controller.load_state_dict(state)
    assert driver.controller.begin(Key("loss", "train", 5), Extent(64, 32, 64)).size == 2 * 64 // 32


def test_tracks_do_not_disturb_each_other() -> None:
    driver = Driver(16)
    driver.clean()
    other = Key("loss", "eval", 0)
    driver.controller.begin(other, Extent(64, 1, 64))
    driver.controller.out_of_memory(other, 16, driver.reading())
    driver.controller.abandon(other)
    assert driver.size() == 16
    assert driver.size(other) == 8


def test_an_open_call_is_abandoned_by_the_next_one() -> None:
    driver = Driver(16)
    driver.controller.begin(KEY, Extent(64, 1, 64))
    driver.controller.out_of_memory(KEY, 16, driver.reading())
    assert driver.controller.begin(KEY, Extent(64, 1, 64)).size == 8
    driver.controller.abandon(KEY)
    driver.controller.abandon(KEY)
    driver.controller.abandon(Key("unknown", "train", 0))
    assert driver.size() == 8


def test_the_same_clock_and_seed_give_the_same_decisions() -> None:
    def history(seed: int) -> list[object]:
        driver = Driver(4, jitter=0.5, seed=seed)
        out: list[object] = [driver.until_move() for _ in range(3)]
        out.append(driver.failing(32))
        driver.capacity = 20_000
        out.append(driver.until_move(200))
        return [*out, driver.controller.state_dict()]

    assert history(7) == history(7)
    assert any(history(7) != history(seed) for seed in range(8, 12))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Policy(max_micro_batch_size=3, align=4), "align=4, which is 4"),
        (lambda: Policy(patience=0), "patience=0"),
        (lambda: Policy(patience=2.0), "patience=2.0"),  # type: ignore[arg-type]  # the mistake
        (lambda: Policy(jitter=-0.1), "jitter=-0.1"),
        (lambda: Policy(cooldown=float("nan")), "cooldown=nan"),
        (lambda: Policy(margin=1.0), "margin=1.0"),
        (lambda: Driver().controller.out_of_memory(KEY, 1, None), r"begin\(\) comes first"),
    ],
)
def test_bad_values_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


# ---------------------------------------------------------------------- the saved state is JSON


SAVED = (
    '{"version": 4, "tracks": [{"name": "loss", "mode": "train", "shape": 0, "size": 24, '
    '"patience": 5, "epoch": 5, "clean": 1, "calls": 1, '
    '"cooldown_left": 3.5, "fragmentation": 1.0, "proven": [[16, 5000]], "trial": [16, 16, 3, '
    '5000, 96, false], "ceilings": [[32, 31, null, 7.5], '
    '[64, 63, 5000, 0.0]], "recent": [[48, 1], [48, 1]], "memory": [[16, 1, [260, 260], 2], [24, '
    '1, [340], 3]], "time": [[16, 0.26], [24, 0.34]]}]}'
)
FIELDS = json.loads(SAVED)["tracks"][0].keys()
MALFORMED = [
    ("name", None),
    ("shape", "x"),
    ("size", 0),
    ("size", True),
    ("cooldown_left", -1),
    ("cooldown_left", "x"),
    ("cooldown_left", float("nan")),
    ("fragmentation", 10**400),
    ("trial", [1, 2, 3]),
    ("proven", [1, 2]),
    ("proven", [[1, "x"]]),
    ("ceilings", [[1, 2]]),
    ("ceilings", [[1, 2, 3, 0.0]]),
    ("ceilings", [[2, 1, 3, -1.0]]),
    ("recent", [[0, 2]]),
    ("recent", []),
    ("recent", [[2**62, 1]]),
    ("memory", [[16, 1, [260], 2**62]]),
    ("memory", [[1, 2, 3, 4]]),
    *(
        ("memory", [row])
        for row in (
            ["x", 1, [1], 1],
            [0, 1, [1], 1],
            [3, 1, [], 1],
            [3, 0, [1], 1],
            [3, 1, [1], None],
            [3, 1, [-1], 1],
            [3, 1, ["a"], 1],
        )
    ),
    ("time", 3),
    *(("time", [row]) for row in (["x", 1.0], [3, None], [3, 0.0], [3, float("inf")])),
]


def learned() -> Driver:
    driver = Driver(8, jitter=0.25)
    driver.seconds = lambda m: 0.1 + 0.01 * m
    driver.until_move()
    driver.until_move()
    driver.lost = 0.1
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


def test_present_limits_win_over_saved_sizes() -> None:
    driver = Driver(32)
    driver.clean()
    state = driver.controller.state_dict()
    for other, expected in (
        (Driver(max_micro_batch_size=10, align=4), 8),
        (Driver(min_micro_batch_size=50), 50),
        (Driver(6, grow=False), 6),
        (Driver(6), 32),
    ):
        other.controller.load_state_dict(state)
        assert other.size() == expected


def changed(name: str, *value: object) -> dict[str, object]:
    """Return a saved state whose first track has another value there, or none."""
    state: dict[str, Any] = json.loads(SAVED)
    track = state["tracks"][0]
    del track[name]
    track.update(zip([name], value, strict=False))
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "version None"),
        ({"version": 99, "tracks": []}, "version 99"),
        ([], r"version \[\]"),
        ({"version": 4}, "'tracks'"),
        ({"version": 4, "tracks": [3]}, "malformed"),
        ({"version": 4, "tracks": [{}]}, "'name'"),
        *((changed(name), f"'{name}'") for name in FIELDS),
        *((changed(name, value), "malformed") for name, value in MALFORMED),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(state: Any, message: str) -> None:
    driver = Driver(8)
    driver.clean()
    before = driver.controller.state_dict()
    with pytest.raises(UsageError, match=message):
        driver.controller.load_state_dict(state)
    assert driver.controller.state_dict() == before


def test_a_saved_state_loads_and_is_written_as_it_was() -> None:
    # as the code saved it: a growth on trial, a cooldown, and two ceilings, one of them with a
    # cooldown of its own
    driver = Driver()
    driver.controller.load_state_dict(json.loads(SAVED))
    assert json.dumps(driver.controller.state_dict()) == SAVED
    assert driver.failing(24, samples=48)[1] == Move(12, 16, "limit")


@pytest.mark.parametrize("seconds", [1e-12, 1.0])
def test_a_saved_state_of_huge_sizes_ends_no_call(seconds: float) -> None:
    driver = Driver()
    state = changed("time", [[2**62, seconds], [2**61, seconds]])
    state["tracks"][0]["memory"] = [[2**62, 1, [2**62], 1]]  # type: ignore[index]  # it is a list
    driver.controller.load_state_dict(state)
    for _ in range(6):
        driver.clean(48)
    assert driver.controller.models()
