"""The scenarios of the stress tool.

Scripts are pure, a few runs hold every check, and planted faults are found.
"""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from elastic_mbs.engine.gradients import CallGradients, Left
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.rollback.random_streams import RandomStreams
from stress.limits import open_limit
from stress.models.factory import make
from stress.record import Needs, Step, write_json
from stress.scenarios.catalogue import SCENARIOS, Order
from stress.scenarios.measure import measure
from stress.scenarios.processes import perform, two_on
from stress.scenarios.reference import relative, weight_difference
from stress.scenarios.scripts import Room, Supply
from tests.helpers import jobs
from tests.helpers.records import NEEDS, SAME, mark, record, step

# ---------------------------------------------------------------------- scripts


@pytest.mark.parametrize("name", list(SCENARIOS))
@pytest.mark.parametrize("steps", [6, 18, 200])
def test_a_script_is_a_pure_function_of_the_step(name: str, steps: int) -> None:
    script = SCENARIOS[name].script
    room = Room(NEEDS, 32)
    found = [script(i, steps, 3) for i in range(steps)]
    assert found == [script(i, steps, 3) for i in range(steps)]
    for each in found:
        assert 0 < each.left <= each.capacity
        assert room.capacity(each) - room.others(each) >= (0 if each.starved else NEEDS.one)


@pytest.mark.parametrize("model", ["mlp", "adam"])  # one large parameter; many small ones
def test_the_optimizers_first_step_has_room_one_parameter_at_a_time(model: str) -> None:
    with open_limit("budget") as memory:
        needs = measure(memory, make(model, 0), 2)
    there = Room(needs, needs.samples).capacity(Supply(optimizer=True))
    copies = sum(each.nbytes for each in make(model, 0).model.parameters())
    assert needs.held < needs.singly <= there < needs.optimizer + copies


def test_needs_are_a_line_between_measured_sizes() -> None:
    assert [NEEDS.at(size) for size in (1, 8, 12, 32, 64)] == [1100, 1800, 2200, 4200, 7400]
    assert [NEEDS.fits(size) for size in (1099, 1100, 2200, 9000)] == [0, 1, 12, 32]
    single = Needs(4, 100, [4], [300])
    assert (single.at(2), single.at(8)) == (200, 500)
    assert replace(NEEDS, peaks=[1100, 1800, 2600, 2600]).foreseen() == NEEDS.foreseen() == NEEDS


# ---------------------------------------------------------------------- records


def test_a_record_is_written_whole_and_nan_as_a_word(
    tmp_path: Path,
) -> None:
    low = step(0, partition=[[0, 8], [8, 32]], lowest=5)
    run = record(
        [low],
        marks=[mark("oom", 1, 32, 16)],
        differences=replace(SAME, loss=math.inf, norm=math.nan),
    )
    path = tmp_path / "found.json"
    write_json([run], 0, path)
    plain = json.loads(path.read_text())
    (back,) = plain["runs"]
    assert plain["schema"] == "elastic-mbs/stress/1"
    assert (back["totals"]["largest_difference"], back["differences"]["loss"]) == (
        "NaN",
        "Infinity",
    )
    for name in ("scenario", "steps", "marks", "end", "needs", "passed", "complaints"):
        assert back[name] == json.loads(json.dumps(asdict(run)[name]))


def test_a_curve_that_diverges_in_the_same_way_is_the_same_curve() -> None:
    nan, inf = math.nan, math.inf
    assert relative([1.0, inf, nan], [1.0, inf, nan]) == 0.0
    assert (
        relative([1.0, nan], [1.0, 2.0])
        == relative([1.0, 2.0], [1.0, nan])
        == relative([1.0], [1.0, 2.0])
        == inf
    )
    a, b = torch.tensor([1.0, nan, inf]), torch.tensor([1.0, nan, 2.0])
    assert weight_difference({"w": a}, {"w": a.clone()}) == 0.0
    assert weight_difference({"w": a}, {"w": b}) == inf
    assert (
        weight_difference({"w": torch.tensor([2.0, nan])}, {"w": torch.tensor([1.0, nan])}) == 1.0
    )


def test_training_that_grows_roundings_is_compared_by_one_rounding() -> None:
    whole = [1.0, 1.0, 1.0, 1.0]
    shaken = [1.0, 1.0 + 1e-7, 1.0 + 1e-4, 1.0]
    assert relative([1.0, 1.0 + 1e-7, 1.0 + 1e-3, 1.0 + 1e-3], whole, shaken) == 0.0, (
        "it stays apart"
    )
    assert relative([1.0 + 1e-3, 1.0, 1.0, 1.0], whole, shaken) == pytest.approx(1e-3), (
        "before that it is a difference"
    )
    assert relative([1.0, 1.0, 1.1, 1.0], whole, shaken) == pytest.approx(0.1)


# ---------------------------------------------------------------------- a few real runs
# `make stress` runs every scenario, and some under each limit.


@pytest.mark.parametrize("name", ["steady", "sensor_dies"])
def test_a_scenario_holds_on_the_budget(name: str) -> None:
    seen: list[Step] = []
    (run,) = perform(Order(name, "budget", "wide", 0, SCENARIOS[name].quick), seen.append)
    assert run.complaints == []
    assert run.passed
    assert len(seen) == len(run.steps)


@pytest.mark.usefixtures("forked")
def test_a_scenario_holds_in_processes_of_its_own() -> None:
    runs = perform(Order("kill", "budget", "wide", 0, 12), lambda step: None)
    assert [run.complaints for run in runs] == [[]] * len(runs)


@pytest.mark.parametrize(
    "fault", ["commits are counted twice", "masks are not put back", "statistics are not put back"]
)
def test_a_scenario_fails_where_the_engine_is_wrong(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "commits are counted twice":
        monkeypatch.setattr(CallGradients, "left_by", lambda self, attempt, **how: Left())
    elif fault == "masks are not put back":
        monkeypatch.setattr(RandomStreams, "restore", lambda self, state: None)
    else:
        monkeypatch.setattr(BufferCopies, "restore", lambda self, *, to_call_start: None)
    name, model = (
        ("sawtooth", "wide") if fault == "commits are counted twice" else ("random_walk", "cnn")
    )
    (run,) = perform(Order(name, "budget", model, 0, 12), lambda step: None)
    assert not run.passed
    assert any("from training on the same pieces" in complaint for complaint in run.complaints)


# ---------------------------------------------------------------------- two at once


@pytest.mark.usefixtures("forked")
def test_two_on_a_gpu_begin_together_and_compare_when_both_have_trained() -> None:
    device = MagicMock()
    seen: list[Step] = []
    runs = two_on(device, Order("two_elastic", "budget", "wide", 0, 8), seen.append)
    assert [run.complaints for run in runs] == [[], []]
    assert [run.process for run in runs] == [0, 1]
    assert all(run.differences is not None and run.differences.largest < 1e-9 for run in runs)
    assert [step.step for step in seen] == list(range(8))
    needs = runs[0].needs
    assert [each.args[0] for each in device.leave.mock_calls] == [
        Room(needs, needs.samples, copies=2).of(0.6),
        None,
    ]
    assert all(each.kwargs.get("held", 0) >= 0 for each in device.leave.mock_calls)
    assert device.mock_calls[-1][0] == "__exit__"
    first, second = sorted(runs, key=lambda run: run.began)
    assert second.began + second.steps[0].at < first.began + first.steps[-1].at, (
        "the first did not go on before the second had trained"
    )


@pytest.mark.usefixtures("forked")
def test_two_of_whom_one_fails_are_one_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stress.scenarios.processes.carry_out", jobs.fail)
    (run,) = perform(Order("two_elastic", "shim", "wide", 0, 8), lambda step: None)
    assert "TypeError" in run.complaints[0]
