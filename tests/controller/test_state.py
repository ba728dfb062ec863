"""What the controller saves is JSON and comes back the same; what it did not save is refused and changes nothing."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from elastic_mbs.controller.controller import Limits, Move, Policy
from elastic_mbs.errors import UsageError
from tests.helpers.controller_driver import KEY, Driver


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
