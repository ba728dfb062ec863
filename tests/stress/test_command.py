"""`python -m stress`: its place, its output, its refusals, and its ends."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elastic_mbs.cli import command
from elastic_mbs.cli.command import main
from stress.limits import KINDS, available
from stress.options import writable
from stress.record import Run
from stress.scenarios import command as scenarios
from stress.scenarios.catalogue import LINES, SCENARIOS, Order
from stress.scenarios.command import summary
from stress.scenarios.processes import failed
from tests.helpers.records import record, step
from tests.helpers.room import ROOT

STEADY = ["stress", "--kind", "budget", "--scenario", "steady"]


def test_the_list_has_every_scenario_with_kinds_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["stress", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SCENARIOS)
    assert all(
        LINES[scenario.name] in line and " ".join(scenario.kinds) in line
        for scenario, line in zip(SCENARIOS.values(), lines, strict=True)
    )
    assert all(set(scenario.kinds) <= set(KINDS) for scenario in SCENARIOS.values())
    assert all(
        kind in SCENARIOS[name].kinds for kind, names in scenarios.QUICK.items() for name in names
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--budget abc", "--budget: 'abc' is no amount of memory: give a number of bytes above 0"),
        ("--budget 100000 --kind budget --scenario steady", "are below the model"),
        ("--steps 0", "--steps: 0 is below 6: give a whole number of at least 6"),
        ("--seed 4294967296", "--seed: 4294967296 is above 4294967295"),
        (
            "--json {folder}",
            "--json: {folder} cannot be written (Is a directory); name another file",
        ),
        (
            "--html {folder}/none/x.html",
            "--html: {folder}/none/x.html cannot be written (No such file or directory)",
        ),
        ("--scenario steady --json {folder}/{long}.json", "cannot be written (File name too long)"),
        ("--json {folder}/x --html {folder}/x", "goes to the same file"),
        ("--scenario nonsense", "argument --scenario: invalid choice: 'nonsense' (choose from"),
        ("--kind nonsense", "argument --kind: invalid choice: 'nonsense' (choose from"),
        ("--scenario kill --kind shim", "none of the scenarios kill runs on shim"),
        ("--model nonsense", "--model nonsense: no such model; one of wide"),
        (
            "--model mine.py",
            "no such model; one of wide, mlp, cnn, heads, gpt, gpt_bursts, adam, name its "
            "factory, as in mine.py:make",
        ),
        ("--model mine.py:make", "--model mine.py:make: there is no file mine.py"),
        ("--model {file}:make", "{file} is no Python file, whose name ends in .py"),
        ("nonsense", "invalid choice: 'nonsense'"),
        (
            "--steps 9 montecarlo --runs 1",
            "--steps stands before the command montecarlo, which does not see it there: put it "
            "behind montecarlo",
        ),
        (
            "montecarlo --minutes inf",
            "--minutes: 'inf' is no length of time that can be used: give a number of minutes "
            "above 0",
        ),
        (
            "montecarlo --shrink -1",
            "--shrink: '-1' is no length of time that can be used: give a number of seconds from "
            "0 on",
        ),
        ("montecarlo --only 1 --case {{}}", "it is one or the other"),
        ("montecarlo --case x", "--case x: this is no case"),
        ("montecarlo --json {folder}", "--json: {folder} cannot be written"),
        ("exhaustive nonsense", "unknown case 'nonsense'; one of mlp"),
        ("exhaustive --json {folder}/none/x", "--json: {folder}/none/x cannot be written"),
        ("soak --samples 3", "--samples: 3 is below 16: give a whole number of at least 16"),
        ("soak --model nonsense", "--model nonsense: no such model"),
        ("soak --json {folder}", "--json: {folder} cannot be written"),
        ("hammer --failures 0", "--failures: 0 is below 1"),
        ("hammer --only 5 --model mlp --model gpt", "--only 5 is a round of one model"),
        ("hammer --json {folder}", "--json: {folder} cannot be written"),
    ],
)
def test_bad_input_is_one_line_with_the_way_out(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "shim" in line and available("shim") is not None:
        pytest.skip(str(available("shim")))
    file = tmp_path / "notes.txt"
    file.write_text("no model")
    names = {"folder": tmp_path, "file": file, "long": "x" * 300}
    assert main(["stress", *(word.format(**names) for word in line.split())]) == 2
    told = capsys.readouterr()
    assert said.format(**names) in told.err
    assert told.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file], "nothing is left behind"


def test_a_place_is_checked_by_opening_it_and_its_content_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    for path in (kept, tmp_path / "fresh.json"):
        assert writable(str(path)) == path
    assert kept.read_text() == "old"
    assert list(tmp_path.iterdir()) == [kept]


def test_the_last_lines_count_verdicts_and_tell_complaints_in_words() -> None:
    good, bad = (
        record(passed=True),
        record(kind="shim", complaints=["3 out-of-memory errors, where 2 are explained"]),
    )
    said = summary(
        [good, bad, record(passed=True, unshown="memory never ran out, so nothing was shown")]
    )
    assert "made_up on shim: 3 out-of-memory errors, where 2 are explained" in said
    assert (
        said.splitlines()[-1]
        == "1 of 3 passed, 1 showed nothing, 1 FAILED; 0 out-of-memory errors survived"
    )


def test_a_line_is_rewritten_on_a_terminal_and_written_once_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def play(order: Order, tell: Any) -> list[Run]:
        tell(step(0, ooms=1))
        return [record(scenario="steady", steps=[step(0, ooms=1)]), failed(order, "no")]

    monkeypatch.setattr(scenarios, "perform", play)
    for live in (True, False):
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda live=live: live)
        monkeypatch.setattr(sys, "stdout", out)
        list(scenarios.run_all([Order("steady", "budget", "wide", 0, 6)]))
        assert ("\r" in out.getvalue()) is live
        assert out.getvalue().count("\n") == 2
        assert ("step 1/6" in out.getvalue()) is live


# ---------------------------------------------------------------------- errors on the way


def test_bad_input_that_is_found_late_is_a_failed_record(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = [*STEADY, "--steps", "6", "--budget", "4MiB", "--json", str(out)]
    assert main([*arguments, "--scenario", "optimizer_first_step"]) == 1
    found = {each["scenario"]: each for each in json.loads(out.read_text())["runs"]}
    assert found["optimizer_first_step"]["complaints"][0].startswith(
        "--budget: 4.0 MiB are below the model"
    )
    assert found["steady"]["steps"]


def test_an_interrupt_leaves_the_records_that_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(order: Order, tell: Any) -> list[Run]:
        if order.scenario == "too_big":
            raise KeyboardInterrupt
        return [failed(order, "made up")]

    monkeypatch.setattr(scenarios, "perform", play)
    out = tmp_path / "found.json"
    assert main([*STEADY, "--scenario", "too_big", "--json", str(out)]) == 130
    assert [each["scenario"] for each in json.loads(out.read_text())["runs"]] == ["steady"]
    assert "interrupted: 1 records of 2" in capsys.readouterr().out


def test_where_a_record_cannot_be_written_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scenarios, "perform", lambda order, tell: [failed(order, "made up")])
    monkeypatch.setattr(Path, "write_text", full)
    assert main([*STEADY, "--json", str(tmp_path / "found.json")]) == 2
    assert (
        "the records cannot be written: [Errno 28] No space left on device"
        in capsys.readouterr().err
    )


def test_a_slow_model_gets_a_later_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(scenarios, "check", lambda *args: None)
    monkeypatch.setattr("stress.scenarios.command.time.monotonic", lambda: next(clock))
    order = Order("steady", "shim", "mine.py:make", 0, 30)
    assert scenarios.check_models([order])[0].deadline == order.deadline + 20 * 30 * 2


# ---------------------------------------------------------------------- names that others have, too


@pytest.mark.parametrize("place", ["a checkout", "inside the package"])
def test_the_tool_wins_over_a_package_of_its_name(place: str, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "stress").mkdir(parents=True)
    (foreign / "stress" / "__init__.py").write_text(
        "raise AssertionError('this is another distribution')\n"
    )
    path = ROOT
    tool = ROOT / "stress"
    command = ["elastic_mbs", "stress"]
    if place == "inside the package":  # as the wheel has it
        path = tmp_path / "site"
        tool = tmp_path / "site" / "elastic_mbs" / "stress"
        command = ["elastic_mbs.stress"]
        skip = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / "elastic_mbs", path / "elastic_mbs", ignore=skip)
        shutil.copytree(ROOT / "stress", tool, ignore=skip)
    code = (
        "import runpy, sys\n"
        f"sys.path[:0] = [{str(foreign)!r}, {str(path)!r}]\n"
        f"sys.argv[1:] = {[*command[1:], '--help']!r}\n"
        "try:\n"
        f"    runpy.run_module({command[0]!r}, run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended\n"
        "print('from', *sorted({str(m.__file__) for n, m in sys.modules.items() if "
        "n.endswith('stress.command')}))\n"
    )
    environment = {"PYTHONPATH": "", "PATH": "", "SYSTEMROOT": ""}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: elastic-mbs stress" in done.stdout
    assert done.stdout.splitlines()[-1] == f"from {tool / 'command.py'}"


def test_another_package_that_was_imported_in_its_place_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = ModuleType("stress")
    foreign.__file__ = "/elsewhere/stress/__init__.py"
    foreign.__path__ = ["/elsewhere/stress"]
    monkeypatch.setitem(sys.modules, "stress", foreign)
    assert command.main(["stress", "--help"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "/elsewhere/stress/__init__.py" in error


def test_a_package_that_was_copied_alone_runs_its_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "__file__", str(tmp_path / "elastic_mbs" / "cli" / "command.py"))
    assert command.main(["report", "no.jsonl"]) == 2
    assert "no.jsonl" in capsys.readouterr().err
    assert command.main(["stress", "--scenario", "steady"]) == 2
    assert "no stress tool" in capsys.readouterr().err
