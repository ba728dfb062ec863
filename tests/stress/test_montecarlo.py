"""The Monte Carlo run: its cases are right, it can fail, and its failures can be repeated."""

import json
import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.batch.schedule import Range, Schedule
from elastic_mbs.cli.command import main
from elastic_mbs.engine import gradients
from elastic_mbs.engine.gradients import CallGradients, Left
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.rollback.random_streams import RandomStreams
from stress.console import case_seed
from stress.models.layers import LAYERS
from stress.models.plan import Fault, Plan, draw, read, smaller
from stress.montecarlo.command import shrink
from stress.montecarlo.faults import SENSORS, Faults
from stress.montecarlo.trial import Outcome, run_trial
from stress.reference.state import error_of
from stress.streams import Streams

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> int:
    return main(["stress", "montecarlo", *arguments])


@given(st.integers(0, 2**48 - 1))
def test_a_case_is_the_same_each_time_and_survives_being_printed(seed: int) -> None:
    plan = draw(seed)
    assert plan == draw(seed)
    assert read(json.dumps(plan.changes())) == plan
    assert plan.samples >= 1


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        "7",
        '{"depth": 3}',
        '{"layers": ["lava"]}',
        '{"faults": [{"where": 1}]}',
        '{"samples": "many"}',
    ],
)
def test_what_is_no_case_is_refused_in_one_line(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--case", text) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "--case" in told


@pytest.mark.parametrize("at", [0.34, 0.42, 0.5])
def test_another_error_that_ends_a_recovery_may_keep_it_from_being_told(at: float) -> None:
    faults = [{"step": 1, "at": 0.28}, {"step": 1, "at": at, "error": "alien"}]
    assert run("--case", json.dumps({"layers": ["batchnorm"], "samples": 1, "faults": faults})) == 0


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_trains_exactly_with_and_without_faults(name: str) -> None:
    size = 2 if name == "batchnorm" else 1
    plan = Plan(
        seed=1,
        layers=(name, "linear"),
        samples=6,
        length=2,
        size=3,
        minimum=size,
        evaluate=True,
        guarded=True,
    )
    calm = run_trial(plan)
    assert (calm.calls, calm.struck, sum(calm.modes.values())) == (1, 0, 0)
    struck = [
        run_trial(replace(plan, faults=(Fault(at=at), Fault(place="optimizer", at=0.1)))).struck
        for at in (0.2, 0.45)
    ]
    assert sum(struck) >= 2


@pytest.mark.parametrize("name", SENSORS)
def test_no_sensor_can_end_a_training_step(name: str) -> None:
    outcome = run_trial(
        Plan(
            seed=5,
            layers=("wide",),
            samples=12,
            size=0,
            grow=True,
            steps=3,
            sensor=name,
            limits=(0.4, 0.6, 1.0),
        )
    )
    assert outcome.limits_hit > 0
    assert outcome.modes


def test_faults_strike_where_they_are_told_to() -> None:
    faults = Faults(
        [Fault(at=0.2, times=2, gap=3, error="host"), Fault(at=0.9, times=0, error="heap")], 10
    )
    struck: list[tuple[int, str]] = []
    for number in range(1, 13):
        try:
            faults.step("op")
        except (RuntimeError, MemoryError) as error:
            struck.append((number, type(error).__name__))
    assert struck == [
        (3, "RuntimeError"),
        (6, "RuntimeError"),
        (10, "MemoryError"),
        (11, "MemoryError"),
        (12, "MemoryError"),
    ]


def test_an_error_that_is_no_lack_of_memory_has_to_come_out_as_it_is() -> None:
    outcome = run_trial(Plan(faults=(Fault(at=0.3, error="alien"),)))
    assert outcome.errors == {"AlienError": 1}


def test_a_trial_leaves_the_random_streams_as_they_were() -> None:
    import numpy as np

    before = Streams.now()
    run_trial(Plan(layers=("dropout", "host mask"), faults=(Fault(at=0.3),)))
    assert before.same(Streams.now())
    for draw_one in (np.random.rand, random.random, lambda: torch.rand(1)):  # which `same` sees
        draw_one()
        assert not before.same(Streams.now())
        before.restore()
    assert before.same(Streams.now())


def _no_weight(self: Schedule, size: int, hand_out: Any = Schedule.next) -> Range | None:
    piece: Range | None = hand_out(self, size)
    if piece is not None:
        piece.weights = dict.fromkeys(piece.weights or (), 1.0)
    return piece


def _forgets_commits(self: CallGradients, attempt: object, **how: bool) -> Left:
    return Left()


BRANCHED = Plan(seed=1, branches=2, samples=8, size=4, steps=2, faults=(Fault(step=1, at=0.3),))

PLANTED: dict[str, tuple[Any, str, Any, Plan]] = {
    "weight": (
        Schedule,
        "next",
        _no_weight,
        Plan(layers=("linear", "wide"), samples=6, steps=2, grow=True),
    ),
    "stream": (
        RandomStreams,
        "restore",
        lambda self, state: None,
        Plan(layers=("dropout",), faults=(Fault(at=0.2),)),
    ),
    "buffer": (
        BufferCopies,
        "restore",
        lambda self, *, to_call_start: None,
        Plan(layers=("running",), faults=(Fault(at=0.6),)),
    ),
    "commit": (CallGradients, "left_by", _forgets_commits, BRANCHED),
    "queue": (
        gradients,
        "drop_unrun",
        lambda: None,
        Plan(count="both", faults=(Fault(at=0.65, times=3, gap=4),), seed=1868015217, samples=2),
    ),
}


def test_cases_with_partly_committed_pieces_are_common() -> None:
    assert run_trial(BRANCHED).partial == 1
    plans = [draw(case_seed(1, number)) for number in range(300)]
    assert sum(bool(plan.branches and plan.faults) for plan in plans) > 60
    assert (
        sum(
            run_trial(plan).partial
            for plan in [plan for plan in plans if plan.branches and plan.faults][:8]
        )
        >= 2
    )


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_made_small_and_can_be_repeated(
    bug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, name, broken, plan = PLANTED[bug]
    assert run("--case", json.dumps(plan.changes())) == 0
    monkeypatch.setattr(owner, name, broken)
    capsys.readouterr()
    assert run("--case", json.dumps(plan.changes()), "--shrink", "2") == 3
    told = capsys.readouterr().out
    assert "WRONG: " in told
    repeat = shlex.split(re.findall(r"repeat: (.*)", told)[-1])
    assert repeat[:4] == ["python", "-m", "stress", "montecarlo"]
    assert run(*repeat[4:], "--shrink", "0.01") == 3


def test_a_seed_that_fails_is_printed_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Schedule, "next", _no_weight)
    assert run("--runs", "3", "--seed", "3", "--shrink", "0", "--baseline") == 3
    only = re.findall(
        r"repeat: python -m stress montecarlo (--only \d+ --baseline)", capsys.readouterr().out
    )
    assert only
    assert run(*shlex.split(only[0]), "--shrink", "0") == 3


def test_an_error_of_another_kind_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("mine")

    monkeypatch.setattr(RandomStreams, "read", broken)
    assert run("--case", "{}", "--shrink", "0") == 4
    told = capsys.readouterr().out
    assert "UNEXPECTED KeyError" in told
    assert "raised in " in told


def test_a_hang_ends_the_process_with_its_code_and_the_stacks() -> None:
    code = """
import sys, time
from elastic_mbs.batch.schedule import Schedule
def stuck_for_ever(*args, **kwargs): time.sleep(60)
Schedule.next = stuck_for_ever
from elastic_mbs.cli.command import main
sys.exit(main(["stress", "montecarlo", "--case", "{}", "--deadline", "3"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 5, ended.stderr
    assert "HANG: not done after 3 s" in ended.stdout
    assert "stuck_for_ever" in ended.stdout
    assert "repeat: python -m stress montecarlo --case" in ended.stdout


def test_shrinking_keeps_what_makes_a_case_fail_and_nothing_else() -> None:
    plan = draw(case_seed(0, 14))
    plan = replace(
        plan,
        layers=("linear", "dropout", "conv"),
        samples=17,
        faults=(Fault(at=0.5, times=3), Fault(step=1, gap=7)),
    )
    small = shrink(
        plan, lambda each: "dropout" in each.layers and each.samples >= 5 and len(each.faults) >= 1
    )
    assert small.layers == ("dropout",)
    assert small.samples == 5
    assert len(small.faults) == 1
    assert small.changes().keys() <= {"seed", "layers", "samples", "faults"}
    assert plan not in list(smaller(plan))
    assert shrink(plan, lambda _: True, seconds=0) == plan


def test_a_bounded_run_passes_and_meets_every_mode_of_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert run("--runs", "24", "--seed", "7", "--json", str(figures)) == 0
    told = capsys.readouterr().out
    assert "seed 7, 24 runs" in told
    written = json.loads(figures.read_text())
    assert written["runs"] == 24
    assert written["failures"] == {}
    assert written["modes"].keys() == {"piece", "step", "isolate"}
    assert {"forward", "backward"} <= written["phases"].keys()
    assert written["worst"] <= 1e-12


def test_an_event_in_the_baseline_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--runs", "10", "--seed", "7", "--baseline") == 0
    monkeypatch.setattr(
        "stress.montecarlo.command.run_trial", lambda plan: Outcome(phases=Counter(forward=1))
    )
    assert run("--runs", "1", "--seed", "1", "--baseline", "--shrink", "0") == 3
    assert "although nothing was made to fail" in capsys.readouterr().out


def test_processes_share_the_cases_and_their_figures_add_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert run("--runs", "2", "--seed", "2", "--jobs", "2", "--json", str(figures)) == 0
    assert json.loads(figures.read_text())["runs"] == 2
    assert "2 (" in capfd.readouterr().out


def test_a_minute_bound_ends_the_run_early(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--runs", "100000", "--seed", "2", "--minutes", "0.000001") == 0
    assert re.search(r"runs +1 ", capsys.readouterr().out)


def test_zeros_of_samples_that_do_not_count_are_no_wrong_gradient() -> None:
    # An expert that only such samples reach has no gradient where they are alone, and zeros where
    # a failed attempt had them beside others.
    case = {
        "seed": 681276007,
        "layers": ["experts", "tied"],
        "branches": 2,
        "tokens": "dense",
        "samples": 8,
        "count": "weights",
        "size": 4,
    }
    assert run("--case", json.dumps({**case, "faults": [{"at": 0.7677}]})) == 0


def test_errors_are_relative_to_each_leaf_and_infinite_for_nonsense() -> None:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])
    assert error_of([one, None], [one, None]) == 0
    assert error_of([two], [one]) == pytest.approx(0.05, rel=1e-5)
    assert error_of([one], [None]) == error_of([None], [one]) == float("inf")
    assert error_of([one * float("nan")], [one]) == float("inf")
    assert error_of([torch.zeros(2) + 1e-3], [torch.zeros(2)]) == pytest.approx(1e-3)
    assert error_of([one + 1e-3, one * 1000], [one * 0, one * 1000], floor=0.01) < 1
