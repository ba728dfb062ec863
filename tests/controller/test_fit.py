"""Fits of memory and time: safe where they interpolate, silent where nothing is known."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_mbs.controller.fit import KNOTS, MemoryFit, TimeFit
from tests.helpers.steps import there

affine = st.tuples(st.integers(0, 10_000), st.integers(1, 500))


def convex(pieces: list[tuple[int, int]], x: int) -> int:
    """Return a peak as it really is: the maximum of affine functions."""
    return max(base + slope * x for base, slope in pieces)


def fitted(pieces: list[tuple[int, int]], sizes: list[int]) -> MemoryFit:
    fit = MemoryFit()
    for x in sizes:
        fit.add(x, convex(pieces, x), elements=1)
    return fit


@settings(deadline=None, max_examples=200)
@given(
    st.lists(affine, min_size=1, max_size=5), st.lists(st.integers(1, 300), min_size=1, max_size=12)
)
def test_predictions_between_measurements_never_fall_below_a_convex_peak(
    pieces: list[tuple[int, int]], sizes: list[int]
) -> None:
    fit = fitted(pieces, sizes)
    for x in range(min(sizes), max(sizes) + 1):
        assert there(fit.at(1).predict(x)) >= convex(pieces, x) - 1e-6 * convex(pieces, x)
    for x in sizes:
        assert fit.at(1).predict(x) == convex(pieces, x)


@settings(deadline=None, max_examples=100)
@given(affine, st.integers(2, 500))
def test_a_line_is_extrapolated_exactly_to_the_double_and_no_further(
    line: tuple[int, int], last: int
) -> None:
    fit = fitted([line], [last // 2, last])
    assert fit.at(1).predict(2 * last) == pytest.approx(convex([line], 2 * last))
    assert fit.at(1).predict(2 * last + 1) is None


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 10**6)), min_size=1, max_size=30))
def test_predictions_never_fall_with_the_size_whatever_was_measured(
    readings: list[tuple[int, int]],
) -> None:
    fit = MemoryFit()
    for x, peak in readings:
        fit.add(x, peak, elements=1)
    known = [
        p
        for p in (fit.at(1).predict(x) for x in range(1, 2 * fit.at(1).largest_observed + 1))
        if p is not None
    ]
    assert known == sorted(known)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 10**6)), min_size=1, max_size=30),
    st.integers(0, 10**6),
    st.integers(0, 700),
)
def test_largest_is_the_largest_size_predicted_to_fit(
    readings: list[tuple[int, int]], budget: int, limit: int
) -> None:
    fit = MemoryFit()
    for x, peak in readings:
        fit.add(x, peak, elements=1)
    fitting = [x for x in range(1, limit + 1) if fit.at(1).fits(x, budget)]
    assert fit.at(1).largest(budget, limit) == max(fitting, default=0)


def test_one_size_gives_an_upper_bound_below_it_and_no_slope_above_it() -> None:
    assert (
        MemoryFit().at(1).predict(1),
        MemoryFit().at(1).largest(10**9, 100),
        MemoryFit().at(1).slope,
        TimeFit().gain(1, 2),
    ) == (None, 0, None, None)
    fit = fitted([(100, 10)], [8])
    assert fit.at(1).predict(3) == fit.at(1).predict(8) == 180
    assert fit.at(1).predict(9) is None


def test_the_slope_is_the_steepest_of_sizes_far_enough_apart() -> None:
    bent = [(1000, 1), (0, 30)]
    fit = fitted(bent, [2, 8, 64, 128])
    assert fit.at(1).slope == pytest.approx(30)
    assert fit.at(1).predict(256) == pytest.approx(convex(bent, 256))
    assert fitted([(100, 10)], [63, 64]).at(1).slope is None
    assert fitted([(100, 10)], [60, 64]).at(1).slope == pytest.approx(10)


def test_the_highest_of_the_latest_readings_counts() -> None:
    fit = MemoryFit()
    for peak in (100, 90, 95):
        fit.add(4, peak, elements=1)
    assert fit.at(1).predict(4) == 100
    fit.add(4, 92, elements=1)
    assert fit.at(1).predict(4) == 95


def test_optimizer_state_moves_the_peaks_measured_before_it() -> None:
    line = [(1000, 50)]
    fit = fitted(line, [8, 16, 32])
    fit.add(32, convex(line, 32) + 5000, elements=1)
    assert fit.at(1).slope == pytest.approx(50)
    assert fit.at(1).predict(8) == convex(line, 8) + 5000
    assert fit.at(1).predict(64) == convex(line, 64) + 5000
    fit = fitted(line, [8, 32])
    fit.add(8, 1400, elements=1)
    fit.add(32, 2700, elements=1)
    assert fit.at(1).predict(8) == 1400


def test_a_newer_reading_replaces_what_it_contradicts() -> None:
    fit = fitted([(0, 10)], [4, 8, 16])
    fit.add(12, 70, elements=1)
    assert fit.at(1).predict(8) == pytest.approx(40 + (70 - 40) * 4 / 8), (
        "less memory for 12 than for 8: the older reading of 8 is gone"
    )
    fit.add(2, 500, elements=1)
    assert fit.at(1).largest_observed == 2


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32))
def test_memory_of_the_fits_is_bounded_and_keeps_the_ends(seed: int) -> None:
    rng = random.Random(seed)
    fit, time, line = MemoryFit(), TimeFit(), [(500, 7)]
    sizes = [rng.randint(1, 5000) for _ in range(200)]
    for x in sizes:
        fit.add(x, convex(line, x), elements=1)
        time.add(x, 0.5 + 0.25 * x)
    assert len(fit.state()) <= KNOTS
    assert len(time.state()) <= 2 * KNOTS
    assert time.coefficients() == pytest.approx((0.25, 0.5))
    assert fit.at(1).largest_observed == max(sizes)
    assert fit.at(1).predict(max(sizes) * 2) == pytest.approx(convex(line, max(sizes) * 2))


@settings(deadline=None, max_examples=100)
@given(affine, st.integers(2, 500), st.integers(1, 500))
def test_below_the_smallest_size_the_line_goes_on_down_to_the_bytes_held(
    line: tuple[int, int], size: int, held: int
) -> None:
    one, two = fitted([line], [size]), fitted([line], [size, 2 * size])
    assert one.at(1).predict(1) == convex([line], size), (
        "an upper bound, as long as nothing else is known"
    )
    assert two.at(1).predict(1) == pytest.approx(convex([line], 1))
    one.hold(line[0])
    assert one.at(1).predict(1) == pytest.approx(convex([line], 1))
    two.hold(convex([line], 1) + held)
    assert there(two.at(1).predict(1)) >= min(convex([line], 1) + held, convex([line], size))


def test_a_prediction_is_trusted_as_far_as_earlier_ones_were_right() -> None:
    fit = fitted([(0, 100)], [4, 8])
    assert [fit.at(1).fits(x, 1000) for x in (8, 9, 10)] == [True, True, False], (
        "one twentieth stays free as long as nothing was compared"
    )
    fit.add(12, 1200, elements=1)
    assert fit.at(1).fits(16, 1600)
    fit.add(20, 2200, elements=1)  # 2000 were predicted
    assert [fit.at(1).fits(x, 2640) for x in (20, 21, 22)] == [True, True, False]
    assert fit.at(1).fits(20, 2200), "what was measured is certain"


def test_a_size_that_seemed_slow_on_a_busy_device_does_not_stay_so() -> None:
    fit = TimeFit()
    for _ in range(10):
        fit.add(64, 9.0)
    for _ in range(2 * TimeFit.RECENT):
        fit.add(32, 1.0)
    assert fit.gain(32, 64) is None
    fit.add(64, 1.8)
    assert there(fit.gain(32, 64)) > 0


@settings(deadline=None, max_examples=50)
@given(
    st.floats(1e-5, 1),
    st.floats(0, 1),
    st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True),
)
def test_time_recovers_the_line_and_the_efficiency(
    gamma: float, delta: float, sizes: list[int]
) -> None:
    fit = TimeFit()
    for m in sizes:
        fit.add(m, gamma * m + delta)
    if min(sizes) > 0.8 * max(sizes):
        assert fit.gain(1, 2) is None
        return
    before, after = 10.0, 20.0
    efficiency = [m / (m + delta / gamma) for m in (before, after)]
    assert fit.gain(before, after) == pytest.approx(1 - efficiency[0] / efficiency[1], abs=1e-6)


def test_sizes_below_the_knee_do_not_flatten_the_line_above_it() -> None:
    fit = TimeFit()
    # milliseconds of a convolutional net on a CPU, as measured
    for m, t in ((8, 4.88), (16, 5.34), (32, 8.32)):
        fit.add(m, t)
    gamma, delta = fit.coefficients() or (0.0, 0.0)
    for m, t in ((64, 14.33), (128, 26.44)):
        assert gamma * m + delta == pytest.approx(t, rel=0.06)


def test_time_keeps_minima_because_outliers_go_one_way() -> None:
    fit, clean = TimeFit(), TimeFit()
    for m in (4, 8, 16):
        clean.add(m, 0.1 + 0.01 * m)
        for outlier in (3.0, 0.0, 0.7):
            fit.add(m, 0.1 + 0.01 * m + outlier)
    assert fit.coefficients() == clean.coefficients()


def test_time_coefficients_are_never_negative() -> None:
    steep, falling = TimeFit(), TimeFit()
    for m, t in ((10, 1.0), (20, 2.5)):
        steep.add(m, t)
    for m, t in ((10, 2.0), (20, 1.0)):
        falling.add(m, t)
    gamma, delta = steep.coefficients() or (0.0, 1.0)
    assert gamma == pytest.approx(0.121, abs=0.003)
    assert delta == 0
    assert steep.gain(10, 20) == pytest.approx(0)
    gamma, delta = falling.coefficients() or (1.0, 0.0)
    assert gamma == 0
    assert 1 <= delta <= 2
    assert falling.gain(10, 20) == pytest.approx(0.5)


def test_peaks_move_with_the_bytes_held_from_the_first_figure_on() -> None:
    fit = MemoryFit()
    fit.hold(1000)
    fit.add(8, 1800, elements=1)
    fit.hold(3000)
    fit.add(16, 4600, elements=1)
    assert fit.at(1).predict(8) == 3800
    assert fit.at(1).slope == 100
    fit.hold(500)
    assert fit.at(1).predict(16) == 2100
    # a fit that was saved and loaded does not know the bytes held at its measurements
    loaded = fitted([(1000, 100)], [8])
    loaded.hold(10_000)
    assert loaded.at(1).predict(8) == 1800
