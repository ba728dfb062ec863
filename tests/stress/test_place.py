"""Where the `stress` command finds its tool: inside the installed package, or next to it in a checkout, and never somebody else's."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import elastic_mbs
from elastic_mbs.cli import command

ROOT = Path(elastic_mbs.__file__).resolve().parents[1]


@pytest.mark.parametrize("place", ["a checkout", "inside the package"])
def test_the_tool_is_its_own_although_another_of_its_name_comes_first_on_the_path(place: str, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "stress").mkdir(parents=True)
    (foreign / "stress" / "__init__.py").write_text("raise AssertionError('this is another distribution')\n")
    path, tool, command = ROOT, ROOT / "stress", ["elastic_mbs", "stress"]
    if place == "inside the package":  # as the wheel has it
        path, tool, command = tmp_path / "site", tmp_path / "site" / "elastic_mbs" / "stress", ["elastic_mbs.stress"]
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
        "print('from', *sorted({str(m.__file__) for n, m in sys.modules.items() if n.endswith('stress.command')}))\n"
    )
    environment = {"PYTHONPATH": "", "PATH": "", "SYSTEMROOT": ""}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: elastic-mbs stress" in done.stdout
    assert done.stdout.splitlines()[-1] == f"from {tool / 'command.py'}"


def test_another_package_that_was_imported_in_its_place_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = ModuleType("stress")
    foreign.__file__, foreign.__path__ = "/elsewhere/stress/__init__.py", ["/elsewhere/stress"]
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
