"""The GPU check works, as far as that can be seen without a GPU."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_mbs.errors import UsageError
from stress.limits import simcuda
from stress.record import write_json
from tests.helpers.records import record
from tests.helpers.room import ROOT
from tools import figures

LIMIT = 1.25  # differs from the other waits of a process


@pytest.fixture(scope="module")
def tool() -> Any:
    loader = SourceFileLoader("gpu_check", str(ROOT / "tools" / "gpu_check"))
    spec = spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    before = list(sys.path)
    loader.exec_module(module)
    sys.path[:] = before
    return module


def test_a_dry_run_leaves_one_json_with_figures(tool: Any, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "check.json"
    assert (
        tool.main(
            [
                "--dry-run",
                "--only",
                "breakdown",
                "--only",
                "fragmented",
                "--stretch",
                "20",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    report = json.loads(out.read_text())
    assert (
        report["passed"],
        report["dry_run"],
        report["simulated"],
        report["versions"]["torch"],
    ) == (True, True, False, torch.__version__)
    assert set(report) >= {"device", "commit", "dirty", "began", "seconds"}
    breakdown, fragmented = (report["parts"][name] for name in ("breakdown", "fragmented"))
    assert (breakdown["exit_code"], breakdown["timed_out"], breakdown["limit"]) == (
        0,
        False,
        20 * 33,
    )
    assert breakdown["figures"]["breakdown"]["tiny"]["per_piece"] != 0
    assert fragmented["figures"]["fragmentation"]["ooms"] > 0


def test_a_stress_record_must_be_of_the_right_segments(
    tmp_path: Path,
) -> None:
    path = tmp_path / "stress.json"
    write_json(
        [record(expandable=True), record(expandable=True, process=1, complaints=["no"])], 0, path
    )
    found = figures.read_stress(path, expandable=True)
    assert list(found) == ["made_up", "made_up_2"]
    assert found["made_up_2"]["complaints"] == ["no"]
    with pytest.raises(ValueError, match="segments were expandable, whatever"):
        figures.read_stress(path, expandable=False)
    write_json([], 0, path)
    with pytest.raises(ValueError, match="no scenario was run"):
        figures.read_stress(path)


def test_without_a_device_it_says_so(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tool.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_simulated_device_passes_for_no_other(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worlds: list[str] = []

    def check(world: str, **_: object) -> dict[str, Any]:
        worlds.append(world)
        return {"passed": True, "seconds": 0}

    monkeypatch.setattr(tool, "check", check)
    monkeypatch.setattr(simcuda, "inside", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for arguments in ["--simcuda"], []:
        assert tool.main([*arguments, "--out", str(tmp_path / "check.json")]) == 0
    assert worlds == ["simcuda", "simcuda"]  # asked for or not
    assert tool.default_out("Simulated CUDA device", "2026-01-01").name.startswith(
        "gpu_check-simulated-"
    )
    planned = tool.parts(tmp_path, "simcuda")
    assert [each.name for each in planned] == [
        name for name in tool.NAMES if name not in tool.SPEED
    ]
    assert all("cuda" not in each.command or each.name in {"demo", "ranks"} for each in planned)
    with pytest.raises(SystemExit):
        tool.main(["--only", "overhead"])


def test_without_the_simulation_it_says_so(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start_again() -> None:
        raise UsageError("no compiler")

    monkeypatch.setattr(simcuda, "inside", lambda: False)
    monkeypatch.setattr(simcuda, "start_again", start_again)
    assert tool.main(["--simcuda"]) == 2
    assert "no compiler" in capsys.readouterr().err


def test_all_parts_take_nine_minutes_and_run_every_gpu_test(tool: Any, tmp_path: Path) -> None:
    real = tool.parts(tmp_path, "cuda")
    assert [each.name for each in real] == list(tool.NAMES)
    assert sum(each.limit + 2 * tool.GRACE for each in real) < 9 * 60
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").glob("*/test_*.py")
        if "mark." + "gpu" in path.read_text() or path.match("promises/test_gpu*.py")
    }
    simulated = {path for path in marked if path.startswith("tests/simcuda/")}  # nothing for a card
    assert {
        argument for argument in real[0].command if argument.startswith("tests/")
    } == marked - simulated


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_part_that_runs_over_reports_and_ends_its_children(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, junit, pid = tmp_path / "test_it.py", tmp_path / "junit.xml", tmp_path / "pid"

    class Popen(subprocess.Popen):  # type: ignore[type-arg]  # generic only to the type checker
        """A part with LIMIT seconds, which runs over it when its child has said who it is.

        That may take any time.
        """

        def wait(self, timeout: float | None = None) -> int:
            if timeout != LIMIT:
                return super().wait(timeout)
            while not (pid.exists() and pid.read_text()) and self.poll() is None:
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(tool, "GRACE", 600.0)
    child = (
        f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); "
        "time.sleep(3600)"
    )
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(3600)"
    tests.write_text(f"import subprocess, sys, time\ndef test_a(): pass\ndef test_b(): {start}\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
        f"--junit-xml={junit}",
        str(tests),
    ]
    outcome = tool.run(tool.Part("it", command, LIMIT, lambda _: figures.read_junit(junit)))
    assert (outcome.timed_out, outcome.passed) == (True, False)
    assert outcome.figures["passed"] == 1
    assert "test_b" in outcome.tail
    while not (text := pid.read_text()) or alive(int(text)):  # ends, or hangs
        time.sleep(0.01)


@pytest.mark.parametrize(
    "code",
    ["import os, elastic_mbs; print(os.environ['PATH'])", "raise SystemExit(3)", "print('torn')"],
)
def test_one_part_that_failed_or_left_no_figures_fails_the_check(
    tool: Any, code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passed, out = "elastic_mbs" in code, tmp_path / "check.json"
    monkeypatch.setenv("PATH", "")  # no git
    monkeypatch.delenv("PYTHONPATH", raising=False)
    part = tool.Part(
        "it",
        [sys.executable, "-c", code],
        600.0,
        lambda text: {} if "torn" not in text else figures.read_object(text),
    )
    monkeypatch.setattr(tool, "parts", lambda folder, world: [part])
    assert tool.main(["--dry-run", "--out", str(out)]) == (0 if passed else 1)
    report = json.loads(out.read_text())
    assert report["passed"] is report["parts"]["it"]["passed"] is passed
    assert report["commit"] is None


def test_pytests_report_becomes_figures(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='tests.promises.test_gpu' name='a' time='2.5'/>"
        "<testcase classname='tests.promises.test_gpu' name='b' "
        "time='0.5'><failure>no</failure></testcase>"
        "<testcase classname='tests.promises.test_gpu' name='c' "
        "time='0'><skipped/></testcase></testsuite></testsuites>"
    )
    found = figures.read_junit(report)
    assert (found["run"], found["passed"], found["slowest"][0]) == (3, 1, ["a", 2.5])
    assert found["why"] == {"tests.promises.test_gpu::b": "no"}
    report.write_text("<testsuites/>")
    with pytest.raises(ValueError, match="no test was run"):
        figures.read_junit(report)


def test_what_a_test_records_is_a_figure(tool: Any, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test_it(record_property): record_property('seen', 7)")
    part = tool.parts(tmp_path, "cuda")[0]
    # without `-m gpu`
    command = [each for each in part.command if not each.startswith("tests/")][:-2]
    outcome = tool.run(
        replace(part, command=[*command, "-c", "pyproject.toml", str(file)], limit=600.0)
    )
    assert (outcome.passed, outcome.figures["recorded"]) == (True, {"seen": "7"})


def test_what_the_demo_and_the_doctor_print_becomes_figures() -> None:
    printed = (
        f"step  micro-batch   loss\n   1       3   1.0   1.0\n\n{'time':<22}3.1 s "
        "limited\n\nEQUAL within rounding: the run.\n"
    )
    assert figures.read_demo(printed) == {
        "time": "3.1 s limited",
        "verdict": "EQUAL within rounding: the run.",
    }
    with pytest.raises(ValueError, match="no summary"):
        figures.read_demo("elastic-mbs: something is wrong")
    assert figures.read_object(
        'UserWarning: of something\n{"healthy": true,\n "findings": []}\nand more\n'
    ) == {"healthy": True, "findings": []}
    with pytest.raises(ValueError):
        figures.read_object("nothing")
