"""benchmarks/papers/papaya.py works: its figures are there, and what it counts is right.

Speed is not asserted here.
"""

import json
from pathlib import Path

import pytest

from benchmarks.papers import papaya


def test_the_comparison_with_papaya_has_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papaya, "SHARES", (0.25,))  # each budget is a plan of all ways
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    papaya.main(["gpt", "--quick", "--json", str(figures), "--png", str(picture)])
    assert "PAPAYA: more than 0.97" in capsys.readouterr().out
    (found,) = json.loads(figures.read_text())["models"]
    assert found["memory"]["worst"] <= 0.001
    assert found["memory"]["r2"] >= 0.999
    assert [size["size"] for size in found["sizes"]] == [2 * each for each in papaya.MULTIPLES]
    assert found["slowdown"].keys() == {"none", "offload", "checkpoint"}
    for choice in found["choices"]:
        assert choice["measured"].keys() == choice["predicted"].keys() == choice["sizes"].keys()
        assert choice["sizes"]["none"] <= min(choice["sizes"].values())
        assert choice["best"] == min(choice["measured"], key=lambda name: choice["measured"][name])
        assert choice["picked"] == min(
            choice["predicted"], key=lambda name: choice["predicted"][name]
        )
    assert picture.stat().st_size > 0


@pytest.mark.parametrize(
    ("pairs", "r2", "worst"),
    [([(1.0, 1.0), (2.0, 2.0), (4.0, 4.0)], 1, 0), ([(1.0, 2.0), (3.0, 2.0)], 0, 1)],
)
def test_a_prediction_is_held_against_the_measured(
    pairs: list[tuple[float, float]], r2: float, worst: float
) -> None:
    fit = papaya.Fit.of(pairs)
    assert (fit.r2, fit.worst) == pytest.approx((r2, worst))


def test_a_model_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit):
        papaya.main(["nonsense"])
