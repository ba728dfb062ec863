"""A run of a script in examples/, with a check of its last lines."""

import re
import runpy

import pytest

from tests.helpers.room import ROOT


def check_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a script and check that its loss fell, or its reward rose, although memory ran out."""
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    learned = re.search(r"(loss|reward) ([\d.]+) → ([\d.]+)", said)
    errors = re.search(r"(\d+) out-of-memory errors survived", said)
    assert learned
    before, after = float(learned[2]), float(learned[3])
    assert after < before if learned[1] == "loss" else after > before
    assert errors
    assert int(errors[1]) > 0
