"""A planned peak: the highest of its lines at any size, corrected by measurements."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_mbs.controller.memory_model import UNCHECKED
from elastic_mbs.controller.peak import Line, PeakModel, envelope
from tests.helpers.steps import there

lines = st.lists(
    st.builds(Line, st.integers(0, 1000), st.integers(-2000, 10_000), st.integers(-20, 500)),
    min_size=1,
    max_size=12,
)
sizes = st.integers(1, 2000)


def model_of(found: list[Line], **rest: Any) -> PeakModel:
    return PeakModel(found, found, **{"held": 1000, **rest})


STEEP, FLAT = Line(100, 50, 10), Line(100, 900, 1)


@settings(deadline=None, max_examples=200)
@given(lines, st.floats(1, 5000))
def test_the_envelope_has_the_highest_line_of_every_size_and_no_other(
    found: list[Line], x: float
) -> None:
    hull = envelope(found)
    assert max(line.at(x) for line in hull) == pytest.approx(max(line.at(x) for line in found))
    assert [line.slope for line in hull] == sorted({line.slope for line in hull})


def test_two_lines_that_differ_by_rounding_are_one() -> None:
    lower, upper = Line(104896, 8216.0, 136.0), Line(113088, 24.0, 136.0)
    hull = envelope([Line(139776, 24.0, 24.0), lower, upper])
    assert [line.slope for line in hull] == [24.0, 136.0]


@settings(deadline=None, max_examples=100)
@given(sizes, st.sampled_from([0.5, 0.9, 1.0, 1.3, 4.0]))
def test_one_measurement_corrects_every_size(measured: int, factor: float) -> None:
    model = model_of([Line(100, 0, 10), Line(100, 0, 7)])
    model.add(measured, round(1100 + factor * 10 * measured), elements=1)
    assert model.kappa == pytest.approx(factor)
    assert there(model.predict(3 * measured)) == pytest.approx(1100 + factor * 30 * measured)


def test_a_peak_without_activations_changes_nothing() -> None:
    model = model_of([STEEP], step=5000)
    model.add(10, 6000, elements=1)  # as high as the optimizer's step
    model.add(10, 900, elements=1)  # less than what is held
    assert (model.kappa, model.largest_observed) == (1.0, 0)
    model.add(1000, 13_000, elements=1)
    assert model.kappa > 1


def test_measurements_that_disagree_widen_what_is_kept_free() -> None:
    model = model_of([Line(0, 0, 10)])
    model.add(100, 2000, elements=1)
    assert (model.spread, model.largest(3000 * (1 + UNCHECKED), 10**6)) == (UNCHECKED, 200)
    model.add(200, 3600, elements=1)
    assert model.kappa == pytest.approx(3600 / 3000)
    # at 100 elements 2200 are predicted, and 2000 were measured
    assert model.spread == pytest.approx(200 / 2000)
    assert model.largest(1.1 * (1000 + 12 * 210), 10**6) == 210
    assert model.largest(1000 + 12 * 200, 10**6) == 200, "what was measured is certain"


def test_a_call_that_makes_the_gradients_has_lines_of_its_own() -> None:
    model = PeakModel([STEEP, FLAT], [STEEP._replace(fixed=0), FLAT._replace(fixed=90)], held=1000)
    assert model.predict(10) == 1000 + 100 + 910
    assert model.predict(10, first=True) == 1000 + 90 + 910
    assert model.predict(1000, first=True) == 1000 + 10_050
    model.add(1000, 1000 + 2 * 10_050, first=True, elements=1)
    assert model.kappa == 2


def test_optimizer_state_is_expected_before_it_is_there() -> None:
    model = model_of([STEEP])
    model.hold(400)  # 600 of state are yet to come
    assert model.predict(10) == 1000 + 250
    model.add(10, 400 + 250, elements=1)
    assert model.kappa == 1
    model.hold(3000)
    assert model.predict(10) == 3000 + 250


@settings(deadline=None, max_examples=200)
@given(lines, st.integers(0, 10**6), st.integers(0, 3000), st.one_of(st.none(), sizes))
def test_largest_is_the_largest_size_that_fits(
    found: list[Line], budget: int, limit: int, reach: int | None
) -> None:
    rising = [line._replace(slope=abs(line.slope)) for line in found]
    model = model_of(rising, reach=reach)
    best = model.largest(budget, limit)
    assert best <= min(limit, reach or limit)
    assert best == 0 or model.fits(best, budget)
    assert best + 1 > min(limit, reach or limit) or not model.fits(best + 1, budget)


@settings(deadline=None, max_examples=50)
@given(
    lines,
    st.lists(st.tuples(sizes, st.integers(1, 10**7)), max_size=12),
    st.one_of(st.none(), sizes),
)
def test_what_is_known_survives_being_saved(
    found: list[Line], readings: list[tuple[int, int]], reach: int | None
) -> None:
    model = model_of(found, step=20, reach=reach)
    for x, peak in readings:
        model.add(x, peak, elements=1)
    other = PeakModel.restored(json.loads(json.dumps(model.state())))
    assert [other.predict(x) for x in (1, 10, 1000)] == [model.predict(x) for x in (1, 10, 1000)]
    assert (other.spread, other.largest_observed) == (model.spread, model.largest_observed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"later": []},
        {"first": [[0, 1]]},
        {"held": -1},
        {"step": "a"},
        {"reach": 0},
        {"seen": [[1, 0, 1, 1]]},
        {"seen": 3},
    ],
)
def test_a_malformed_state_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        PeakModel.restored({**model_of([STEEP]).state(), **wrong})
