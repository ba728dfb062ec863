"""What the controller saves is JSON and comes back the same; what it did not save is refused and changes nothing."""

import json
from typing import Any

import pytest

from elastic_mbs.controller.controller import Key, Move
from elastic_mbs.errors import UsageError
from tests.helpers.controller_driver import KEY, Driver

VERSION_1 = (
    '{"version": 1, "tracks": [{"name": "loss", "mode": "train", "shape": 0, "size": 24, "probing": false, "patience": 5, "epoch": 5, '
    '"clean": 1, "calls": 1, "strikes": 0, "young": true, "cooldown_left": 0.0, "fragmentation": 1.0, "passed_with": [16, 5000], "trial": '
    '[16, 16, 3], "ceilings": [], "recent": [[48, 1], [48, 1], [48, 1], [48, 1], [48, 1], [48, 1], [48, 1]], "memory": [[1, [150], 1], [2, '
    '[160], 2], [4, [180], 3], [8, [220], 4], [12, [220, 260], 6], [16, [260, 260, 260], 9], [24, [340], 10]], "time": [[16, 0.26], [24, '
    '0.33999999999999997]]}, {"name": "loss", "mode": "eval", "shape": 3, "size": 2, "probing": false, "patience": 4, "epoch": 3, "clean": '
    '0, "calls": 0, "strikes": 0, "young": false, "cooldown_left": 3.7292275493187894, "fragmentation": 1.0, "passed_with": null, "trial": '
    'null, "ceilings": [[32, 31, 5000]], "recent": [[48, 8]], "memory": [[8, [180], 1], [16, [260], 2]], "time": []}, {"name": "other", '
    '"mode": "train", "shape": 0, "size": 4, "probing": true, "patience": 4, "epoch": 2, "clean": 0, "calls": 1, "strikes": 0, "young": '
    'false, "cooldown_left": 0.0, "fragmentation": 1.0, "passed_with": [2, 5000], "trial": null, "ceilings": [], "recent": [[48, 1], [48, '
    '1]], "memory": [[1, [130], 1], [2, [120, 140], 3]], "time": []}]}'
)
FIELDS = json.loads(VERSION_1)["tracks"][0].keys()
MALFORMED = [
    ("name", None),
    ("shape", "x"),
    ("size", 0),
    ("size", True),
    ("probing", 1),
    ("cooldown_left", -1),
    ("cooldown_left", "x"),
    ("cooldown_left", float("nan")),
    ("fragmentation", 10**400),
    ("trial", [1, 2]),
    ("passed_with", [1, "x"]),
    ("ceilings", [[1, 2]]),
    ("ceilings", [[1, 2, 3]]),
    ("recent", [[0, 2]]),
    ("recent", []),
    ("memory", [[1, 2, 3]]),
    *(("memory", [row]) for row in (["x", [1], 1], [0, [1], 1], [3, [], 1], [3, [1], None], [3, [-1], 1], [3, ["a"], 1])),
    ("time", 3),
    *(("time", [row]) for row in (["x", 1.0], [3, None], [3, 0.0], [3, float("inf")])),
]


def learned() -> Driver:
    driver = Driver(8, jitter=0.25)
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
    """A saved state whose first track has another value there, or none."""
    state: dict[str, Any] = json.loads(VERSION_1)
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
        ({"version": 1}, "'tracks'"),
        ({"version": 1, "tracks": [3]}, "malformed"),
        ({"version": 1, "tracks": [{}]}, "'name'"),
        *((changed(name), f"'{name}'") for name in FIELDS),
        *((changed(name, value), "malformed") for name, value in MALFORMED),
    ],
)
def test_a_state_that_is_unknown_or_malformed_is_refused_and_changes_nothing(state: Any, message: str) -> None:
    driver = Driver(8)
    driver.clean()
    before = driver.controller.state_dict()
    with pytest.raises(UsageError, match=message):
        driver.controller.load_state_dict(state)
    assert driver.controller.state_dict() == before


def test_a_state_of_the_first_release_loads_and_is_written_as_it_was() -> None:
    # three tracks as that code saved them: a growth on trial, a ceiling with a cooldown, and one that still probes
    driver = Driver()
    driver.controller.load_state_dict(json.loads(VERSION_1))
    assert json.dumps(driver.controller.state_dict()) == VERSION_1
    assert driver.failing(24, samples=48)[1] == Move(12, 16, "limit")
    assert driver.controller.begin(Key("loss", "eval", 3), 48, 8).size == 2
    assert driver.controller.begin(Key("other", "train", 0), 48, 1).probing


def test_a_loaded_probe_goes_on_unless_a_size_was_given() -> None:
    driver = Driver()
    driver.probe(64, [1, 2])
    state = driver.controller.state_dict()
    auto, fixed = Driver().controller, Driver(4).controller
    auto.load_state_dict(state)
    fixed.load_state_dict(state)
    assert auto.begin(KEY, 64, 1).probing
    assert not fixed.begin(KEY, 64, 1).probing
