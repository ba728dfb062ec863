"""Where the `stress` command finds its tool: inside the installed package, or beside it in a checkout, and never somebody else's."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import elastic_mbs
from elastic_mbs.cli import command

ROOT = Path(elastic_mbs.__file__).resolve().parents[1]
FOREIGN = "raise AssertionError('this is another distribution')\n"


@pytest.fixture
def not_imported() -> Iterator[None]:
    """As in a fresh interpreter, in which nobody has imported the tool yet."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "stress"}
    for name in kept:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "stress"]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.mark.usefixtures("not_imported")
def test_in_a_checkout_the_folder_beside_the_package_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another distribution has a package of that name, which lies first on the path."""
    (tmp_path / "stress").mkdir()
    (tmp_path / "stress" / "__init__.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(["stress", "--help"])
    assert ended.value.code == 0
    assert "elastic-mbs stress" in capsys.readouterr().out
    assert str(sys.modules["stress.command"].__file__) == str(ROOT / "stress" / "command.py")


@pytest.mark.usefixtures("not_imported")
def test_another_package_that_was_imported_in_its_place_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    foreign = ModuleType("stress")
    foreign.__file__, foreign.__path__ = "/elsewhere/stress/__init__.py", ["/elsewhere/stress"]
    sys.modules["stress"] = foreign
    assert command.main(["stress", "--help"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "/elsewhere/stress/__init__.py" in error
    assert command.main(["report", "no.jsonl"]) == 2
    assert "no.jsonl" in capsys.readouterr().err, "the other commands do not need it"


def test_a_package_that_was_copied_alone_runs_its_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "__file__", str(tmp_path / "elastic_mbs" / "cli.py"))
    assert command.main(["report", "no.jsonl"]) == 2
    assert "no.jsonl" in capsys.readouterr().err
    assert command.main(["stress", "--scenario", "steady"]) == 2
    assert "no stress tool" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["a checkout, from another folder", "inside the package"])
def test_the_tool_runs_with_the_path_alone(place: str, tmp_path: Path) -> None:
    path, module = ROOT, "elastic_mbs"
    if place == "inside the package":  # as the wheel has it
        path, module = tmp_path / "site", "elastic_mbs.stress"
        skip = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / "elastic_mbs", path / "elastic_mbs", ignore=skip)
        shutil.copytree(ROOT / "stress", path / "elastic_mbs" / "stress", ignore=skip)
    arguments = ["--help"] if module.endswith("stress") else ["stress", "--help"]
    code = (
        "import runpy, sys\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try:\n"
        f"    runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended\n"
        "print('from', *sorted({str(m.__file__) for n, m in sys.modules.items() if n.endswith('stress.command')}))\n"
    )
    environment = {"PYTHONPATH": str(path), "PATH": "", "SYSTEMROOT": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: elastic-mbs stress" in done.stdout
    folder = path / "stress" if module == "elastic_mbs" else path / "elastic_mbs" / "stress"
    assert done.stdout.splitlines()[-1] == f"from {folder / 'command.py'}"
