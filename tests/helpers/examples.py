"""A run of a script in examples/, with a check of its last lines."""

import re
import runpy

import pytest

from tests.helpers.room import ROOT


def check_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a script and check that the loss fell although memory ran out."""
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    loss = re.search(r"loss ([\d.]+) → ([\d.]+)", said)
    errors = re.search(r"(\d+) out-of-memory errors survived", said)
    assert loss
    assert float(loss[2]) < float(loss[1])
    assert errors
    assert int(errors[1]) > 0
