"""The example scripts run as they are: they train, and tell how often memory ran out."""

import re
import runpy
from pathlib import Path

import pytest

from tests.helpers.room import ROOT

SCRIPTS = sorted((ROOT / "tools" / "examples").glob("*.py"))


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


def test_each_integration_has_an_example_of_at_most_60_lines() -> None:
    assert {"accelerate_loop", "fabric_loop", "lightning_trainer"} <= {
        script.stem for script in SCRIPTS
    }
    assert [script.stem for script in SCRIPTS if len(script.read_text().splitlines()) > 60] == []
