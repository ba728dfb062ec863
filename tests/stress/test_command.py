"""`python -m stress`: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from elastic_mbs.cli.command import main
from stress.limits import KINDS, available
from stress.record import read_json
from stress.scenarios.catalogue import SCENARIOS
from stress.scenarios.command import QUICK
from stress.scenarios.console import Progress, summary, table
from stress.scenarios.order import Order
from stress.scenarios.perform import failed
from tests.stress.test_scenarios import record, step

SMALL = """
import torch
from torch import nn

def good():
    model = nn.Linear(8, 4096)
    batches = [torch.randn(8, 8) for _ in range(3)]
    return model, lambda x: model(x).tanh().square().mean(), batches

state = [0]

def restless():
    state[0] += 1
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.fill_(state[0])
    return model, lambda x: model(x).square().mean(), [torch.ones(4, 8)]

def restless_batches():
    state[0] += 1
    model = nn.Linear(8, 8)
    return model, lambda x: model(x).square().mean(), [torch.full((4, 8), float(state[0]))]

def one_sample():
    model = nn.Linear(8, 8)
    return model, lambda x: model(x).square().mean(), [torch.ones(1, 8)]

def fails():
    model = nn.Linear(8, 8)
    return model, lambda x: model(x[:, :3]).mean(), [torch.ones(4, 8)]

def flat():
    model = nn.Linear(8, 8)
    return model, lambda x: (model(x) * 0).mean(), [torch.ones(4, 8)]
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "small_models_of_a_user.py"
    path.write_text(SMALL)
    return path


def test_the_list_has_every_scenario_with_its_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SCENARIOS)
    assert all(scenario.line in line and " ".join(scenario.kinds) in line for scenario, line in zip(SCENARIOS.values(), lines, strict=True))


def test_kinds_and_the_bounded_set_name_what_there_is() -> None:
    assert all(set(scenario.kinds) <= set(KINDS) for scenario in SCENARIOS.values())
    assert all(kind in SCENARIOS[name].kinds for kind, names in QUICK.items() for name in names)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "nonsense"], "no such scenario; one of steady"),
        (["--kind", "nonsense"], "no such kind of limit; one of budget"),
        (["--steps", "2"], "--steps: 2 is too few"),
        (["--seed", "-1"], "--seed: -1 is below 0"),
        (["--model", "nonsense"], "no such model; one of wide"),
        (["--model", "nowhere.py:factory"], "there is no file nowhere.py"),
        (["--budget", "lots"], "lots"),
        (["--budget", "100000", "--kind", "budget", "--scenario", "steady"], "are below the model"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--html", "/"], "this is a folder"),
        (["--device", "cpu", "--kind", "cuda"], "leaves none of --kind cuda"),
        (["--scenario", "kill", "--kind", "rlimit"], "none of the scenarios kill runs on rlimit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "rlimit" in arguments and available("rlimit") is not None:
        pytest.skip("no rlimit here")
    assert main(["stress", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("restless", "two models made from seed 0 differ"),
        ("restless_batches", "two first batches made from seed 0 differ"),
        ("fails", "its step fails on its first batch: RuntimeError"),
        ("flat", "the gradient of its first batch is zero"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_line(factory: str, said: str, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "--kind", "budget", "--scenario", "steady", "--model", f"{models}:{factory}"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_kind_that_cannot_be_had_is_refused_where_it_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    missing = next((kind for kind in KINDS if available(kind) is not None), None)
    if missing is None:
        pytest.skip("all kinds can be had here")
    assert main(["stress", "--kind", missing]) == 2
    assert f"--kind {missing}:" in capsys.readouterr().err


def test_a_users_model_in_float32_is_run_and_its_record_written(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert main(["stress", "--kind", "budget", "--scenario", "sawtooth", "--steps", "12", "--model", f"{models}:good", "--json", str(out)]) == 0
    told = capsys.readouterr().out
    assert "1e-05 of a loss, 1e-03 of a weight in float32" in told
    assert "1 of 1 passed" in told
    (run,) = read_json(out)
    assert (run.scenario, run.dtype, len(run.steps)) == ("sawtooth", "float32", 12)


def test_the_table_tells_verdicts_and_complaints_in_words() -> None:
    good, bad = record(passed=True), record(kind="shim", complaints=["3 out-of-memory errors, where 2 are explained"])
    order = Order("kill", "budget", "wide", 0, 6)
    rows = table([good, bad, failed(order, "the process ended")]).splitlines()
    assert [row.split()[-1] for row in rows] == ["verdict", "ok", "FAILED", "FAILED"]
    said = summary([good, bad])
    assert "made_up on shim: 3 out-of-memory errors, where 2 are explained" in said
    assert "1 of 2 passed" in said
    many = record(steps=[step(i, size=i + 1) for i in range(9)])
    assert "1 2 3 … 8 9" in table([many])


def test_a_run_that_shows_nothing_is_not_counted_as_passed() -> None:
    """Of a user's conv net 7 of 26 runs had shown nothing, one of them ended by an error, and the last line said `26 of 26 passed`."""
    good, nothing = record(passed=True), record(passed=True, unshown="memory never ran out, so nothing was shown")
    assert summary([good, nothing]).splitlines()[-1] == "1 of 2 passed, 1 showed nothing; 0 out-of-memory errors survived"
    assert summary([nothing, record()]).splitlines()[-1] == "0 of 2 passed, 1 showed nothing, 1 FAILED; 0 out-of-memory errors survived"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_rewritten_on_a_terminal_and_written_once_elsewhere() -> None:
    order = Order("steady", "budget", "wide", 0, 6)
    for out, live in ((Terminal(), True), (io.StringIO(), False)):
        progress = Progress([order], out)
        progress.begin(order)
        progress.step(step(0, ooms=1))
        progress.end([record(scenario="steady", steps=[step(0, ooms=1)])])
        progress.end([failed(order, "no")])
        assert ("\r" in out.getvalue()) is live
        assert out.getvalue().count("\n") == 2
        assert ("step 1/6" in out.getvalue()) is live
