"""The GPU check works, as far as that can be seen without a GPU."""

import json
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch

from stress.record import write_json
from tests.stress.test_scenarios import record

ROOT = Path(__file__).resolve().parents[2]


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


def part(tool: Any, code: str, limit: float = 30.0) -> Any:
    return tool.Part("it", [sys.executable, "-c", code], limit, lambda text: {"printed": text.strip()})


def test_a_dry_run_leaves_one_json_with_figures(tool: Any, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "check.json"
    assert tool.main(["--dry-run", "--only", "breakdown", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["passed"] is True
    assert report["dry_run"] is True
    assert report["versions"]["torch"] == torch.__version__
    assert set(report) >= {"device", "commit", "dirty", "began", "seconds"}
    breakdown = report["parts"]["breakdown"]
    assert breakdown["figures"]["breakdown"]["tiny"]["per_piece"] != 0
    assert (breakdown["exit_code"], breakdown["timed_out"]) == (0, False)


def test_a_dry_run_of_the_stress_tool_has_its_figures(tool: Any, tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    assert tool.main(["--dry-run", "--only", "fragmented", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["parts"]
    fragmentation = found["fragmented"]["figures"]["fragmentation"]
    assert (fragmentation["passed"], fragmentation["complaints"]) == (True, [])
    assert fragmentation["ooms"] > 0
    assert fragmentation["needs"]["samples"] == 32


def test_fragmentation_runs_with_both_kinds_of_segments(tool: Any, tmp_path: Path) -> None:
    real = {each.name: each for each in tool.parts(tmp_path, dry=False)}
    assert set(real["fragmented"].environment.values()) == {"expandable_segments:False"}
    assert real["expandable"].environment == dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
    assert real["tests"].environment == {}
    outcome = tool.run(
        tool.Part("it", [sys.executable, "-c", "import os; print(os.environ['MINE'])"], 30.0, lambda text: {"it": text.strip()}, {"MINE": "1"})
    )
    assert outcome.figures == {"it": "1"}


def test_the_stress_tools_record_becomes_figures_and_must_be_of_the_right_segments(tool: Any, tmp_path: Path) -> None:
    path = tmp_path / "stress.json"
    write_json([record(expandable=True), record(expandable=True, process=1, complaints=["no"])], 0, path)
    figures = tool.read_stress(path, expandable=True)
    assert list(figures) == ["made_up", "made_up_2"]
    assert figures["made_up_2"]["complaints"] == ["no"]
    with pytest.raises(ValueError, match="segments were expandable, whatever"):
        tool.read_stress(path, expandable=False)
    write_json([], 0, path)
    with pytest.raises(ValueError, match="no scenario was run"):
        tool.read_stress(path)


def test_the_help_has_the_limits_of_all_parts(tool: Any, tmp_path: Path) -> None:
    lines = {line.split()[0]: line.split()[-1] for line in tool.__doc__.splitlines() if line.strip()}
    assert {each.name: str(each.limit) for each in tool.parts(tmp_path, dry=False)}.items() <= lines.items()


def test_without_a_device_it_says_so(tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tool.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_all_parts_together_take_less_than_nine_minutes(tool: Any, tmp_path: Path) -> None:
    real = tool.parts(tmp_path, dry=False)
    assert [each.name for each in real] == list(tool.NAMES)
    assert sum(each.limit + 2 * tool.GRACE for each in real) < 9 * 60
    assert "gpu" in real[0].command
    assert all("cuda" in each.command for each in real[1:] if each.name != "doctor")


def test_a_part_that_runs_over_is_ended_with_all_that_it_started(tool: Any, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(alive)!r}).touch()"
    code = f"import subprocess, sys, time; print('begun', flush=True); subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    outcome = tool.run(part(tool, code, limit=1.0))
    assert outcome.timed_out
    assert not outcome.passed
    assert outcome.seconds < 10
    assert "begun" in outcome.tail
    time.sleep(2)
    assert not alive.exists()


def test_a_part_that_runs_over_can_still_tell_of_what_it_has_done(tool: Any, tmp_path: Path) -> None:
    tests = tmp_path / "test_it.py"
    tests.write_text("import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\n")
    junit = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"--junit-xml={junit}", str(tests)]
    outcome = tool.run(tool.Part("it", command, 5.0, lambda _: tool.read_junit(junit)))
    assert outcome.timed_out
    assert not outcome.passed
    assert outcome.figures["passed"] == 1
    assert "test_b" in outcome.tail


def test_limits_can_be_stretched(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tool, "parts", lambda folder, dry: [part(tool, "print(1)", limit=20.0)])
    out = tmp_path / "check.json"
    assert tool.main(["--dry-run", "--stretch", "1.5", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["parts"]["it"]["limit"] == 30.0


def test_every_file_with_a_test_for_a_gpu_is_run(tool: Any, tmp_path: Path) -> None:
    marked = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/test_*.py") if "mark." + "gpu" in path.read_text()}
    assert {argument for argument in tool.parts(tmp_path, dry=False)[0].command if argument.startswith("tests/")} == marked


@pytest.mark.parametrize(("code", "passed"), [("print('fine')", True), ("raise SystemExit(1)", False)])
def test_a_part_passes_by_its_exit_code(tool: Any, code: str, passed: bool) -> None:
    outcome = tool.run(part(tool, code))
    assert outcome.passed is passed
    assert not outcome.timed_out


def test_a_part_whose_figures_cannot_be_read_has_not_passed(tool: Any, tmp_path: Path) -> None:
    broken = tool.Part("it", [sys.executable, "-c", "print('fine')"], 30.0, lambda _: tool.read_json(tmp_path / "nothing.json"))
    outcome = tool.run(broken)
    assert not outcome.passed
    assert "FileNotFoundError" in outcome.tail


def test_one_failed_part_fails_the_check(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tool, "parts", lambda folder, dry: [part(tool, "print(1)"), part(tool, "raise SystemExit(3)")])
    out = tmp_path / "check.json"
    assert tool.main(["--dry-run", "--out", str(out)]) == 1
    assert json.loads(out.read_text())["passed"] is False


def test_subprocesses_find_the_package_without_an_installation(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    outcome = tool.run(part(tool, "import importlib.util; print(importlib.util.find_spec('elastic_mbs').origin)"))
    assert outcome.figures == {"printed": str(ROOT / "elastic_mbs" / "__init__.py")}


def test_pytests_report_becomes_figures(tool: Any, tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='tests.promises.test_gpu' name='a' time='2.5'/>"
        "<testcase classname='tests.promises.test_gpu' name='b' time='0.5'><failure>no</failure></testcase>"
        "<testcase classname='tests.promises.test_gpu' name='c' time='0'><skipped/></testcase></testsuite></testsuites>"
    )
    figures = tool.read_junit(report)
    assert (figures["run"], figures["passed"]) == (3, 1)
    assert figures["failed"] == ["tests.promises.test_gpu::b"]
    assert figures["why"] == {"tests.promises.test_gpu::b": "no"}
    assert figures["slowest"][0] == ["a", 2.5]
    report.write_text("<testsuites/>")
    with pytest.raises(ValueError, match="no test was run"):
        tool.read_junit(report)


def test_the_demos_summary_becomes_figures(tool: Any) -> None:
    printed = "step  micro-batch   loss, limited        loss, unlimited\n   1       3   1.0   1.0\n\n"
    printed += f"{'out-of-memory errors':<22}11 survived (6 in forward)\n{'time':<22}3.1 s limited\n\nEQUAL within rounding: the run.\n"
    assert tool.read_demo(printed) == {
        "out_of_memory_errors": "11 survived (6 in forward)",
        "time": "3.1 s limited",
        "verdict": "EQUAL within rounding: the run.",
    }
    with pytest.raises(ValueError, match="no summary"):
        tool.read_demo("elastic-mbs: something is wrong")


def test_a_warning_beside_the_doctors_json_does_no_harm(tool: Any) -> None:
    assert tool.read_object('UserWarning: of something\n{"healthy": true,\n "findings": []}\nand more\n') == {"healthy": True, "findings": []}
    with pytest.raises(ValueError):
        tool.read_object("nothing")


def test_it_works_without_git(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    about = tool.describe(dry=True)
    assert about["commit"] is None
    assert about["dirty"] is None


def test_the_file_is_named_after_the_device_and_the_day(tool: Any) -> None:
    assert tool.default_out("NVIDIA H200", "2026-11-21") == ROOT / "stress" / "results" / "gpu_check-nvidia-h200-2026-11-21.json"
