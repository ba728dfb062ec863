"""The example scripts in examples run as they are: they train, memory runs out, and the last line tells how often."""

import re
import runpy
from pathlib import Path

import pytest

from tests.helpers.room import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_learns_through_out_of_memory_errors(
    script: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # where a trainer leaves its files
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    loss = re.search(r"loss ([\d.]+) → ([\d.]+)", said)
    errors = re.search(r"(\d+) out-of-memory errors survived", said)
    assert loss
    assert float(loss[2]) < float(loss[1])
    assert errors
    assert int(errors[1]) > 0


def test_there_is_an_example_for_each_integration_and_none_is_longer_than_60_lines() -> None:
    assert {"accelerate_loop", "fabric_loop", "lightning_trainer"} <= {
        script.stem for script in SCRIPTS
    }
    assert [script.stem for script in SCRIPTS if len(script.read_text().splitlines()) > 60] == []
