"""`SizeModel` has the closed forms of PAPAYA."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_mbs.controller.controller import Key
from elastic_mbs.controller.fit import TimeFit
from elastic_mbs.controller.memory_model import UNCHECKED
from elastic_mbs.controller.peak import Line, PeakModel
from tests.helpers.controller_driver import KEY, Driver
from tests.helpers.steps import there

GAMMA, DELTA = 0.01, 0.05  # seconds per sample and per piece


def trained(start: int = 8) -> Driver:
    driver = Driver(start, cooldown=0.0)
    driver.seconds = lambda m: DELTA + GAMMA * m
    for _ in range(30):
        driver.clean()
    return driver


def test_knee_and_efficiency_follow_from_the_time_per_sample_and_per_piece() -> None:
    model = trained().controller.models()[str(KEY)]
    assert (model.size, model.elements) == (64, 1)
    assert model.seconds(100) == pytest.approx(DELTA + 100 * GAMMA)
    assert model.knee == pytest.approx(10 * DELTA / GAMMA)
    assert model.efficiency(50) == pytest.approx(10 / 11)
    assert model.peak(32) == 100 + 10 * 32
    assert model.peak(2 * 64 + 1) is None, "too far from what was measured"


def test_what_is_not_known_is_none() -> None:
    driver = Driver()
    driver.clean()
    model = driver.controller.models()[str(KEY)]
    assert [
        model.size,
        model.seconds_per_sample,
        model.knee,
        model.efficiency(8),
        model.seconds(8),
        model.spread,
    ] == [None] * 6
    assert Driver().controller.models() == {}


def test_longer_samples_take_as_much_more_time_each() -> None:
    driver, key = Driver(8, cooldown=0.0), Key("loss", "train", 3)
    driver.seconds = lambda m: DELTA + 8 * GAMMA * m
    for _ in range(30):
        driver.clean(elements=8, key=key)
    model = driver.controller.models()[str(key)]
    assert model.elements == 8
    assert model.seconds_per_sample == pytest.approx(8 * GAMMA)


def test_a_size_model_has_the_error_of_its_plan_and_stays_as_it_was() -> None:
    driver, plan = Driver(8, patience=1), PeakModel([Line(0, 0, 10)], [Line(0, 0, 10)], held=100)
    driver.controller.planned(KEY, 64, 1, plan, 8)
    driver.clean()
    before = driver.controller.models()[str(KEY)]
    driver.need = lambda x: 100 + 11 * x
    driver.clean()
    after = driver.controller.models()[str(KEY)]
    assert (before.spread, before.peak(20)) == (UNCHECKED, 300)
    assert there(after.spread) != UNCHECKED


@settings(deadline=None, max_examples=100)
@given(st.floats(1e-5, 0.1), st.floats(0, 1), st.integers(1, 64), st.integers(0, 2**16))
def test_times_are_predicted_to_a_tenth_up_to_16_times_the_largest_size(
    gamma: float, delta: float, least: int, seed: int
) -> None:
    noise, fit = random.Random(seed), TimeFit()
    for size in (least, 2 * least, 4 * least):
        for _ in range(10):  # noise goes one way: the least of ten is off by 0.3 % at most
            fit.add(size, (delta + gamma * size) * (1 + min(0.003, noise.expovariate(50))))
    per_sample, per_piece = fit.coefficients() or (0.0, 0.0)
    for size in (least, 4 * least, 16 * least, 64 * least):
        assert per_piece + per_sample * size == pytest.approx(delta + gamma * size, rel=0.1)
