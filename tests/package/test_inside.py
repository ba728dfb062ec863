"""benchmarks/inside.py works: samples train in the share that it says, with exact gradients."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks import inside
from benchmarks.inside import measured, summary

pytestmark = pytest.mark.no_oom_injection


@pytest.mark.parametrize("name", ["GPT by hand", "diffusion MLP"])
def test_one_sample_trains_in_a_quarter_of_its_activations(name: str) -> None:
    row = measured(name, shares=(0.25,))
    assert row.share == 0.25
    assert row.error <= 1e-12
    assert row.rungs


def test_a_model_that_no_rung_helps_is_in_the_table_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "inside.json"
    row = measured("U-Net", escalate=("logits",), shares=(0.25,))
    assert row.share is None
    assert row.rungs == ()
    assert "U-Net needs more: float64 (1, 16, 128, 128), 2.0 MiB" in summary([row])
    assert inside.main(["GPT by hand", "--escalate", "logits", "--json", str(out)]) == 0
    (found,) = json.loads(out.read_text())["rows"]
    assert found["rungs"] == ["logits"]
    assert found["share"] <= 0.25
    assert "1 of 1 in 0.25" in capsys.readouterr().out


def test_the_time_in_half_of_the_need_is_that_of_a_step_with_rungs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "halved", partial(inside.halved, rounds=1))
    out = tmp_path / "half.json"
    assert inside.main(["GPT by hand", "--half", "--json", str(out)]) == 0
    (found,) = json.loads(out.read_text())["rows"]
    assert found["rungs"]
    assert found["slower"] > 0
