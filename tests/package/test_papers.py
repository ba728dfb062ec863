"""Tables of the source works, made by one command each.

Their figures take minutes, and are not asserted here.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers import goyal, mbs, smith
from benchmarks.papers.common import digits


@pytest.mark.parametrize(
    "module", [smith, goyal, mbs], ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_a_small_run_prints_its_table_and_writes_figures_and_a_picture(
    module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mbs, "TIMES", (1, 16))
    monkeypatch.setattr(mbs, "ROUNDS", 1)
    monkeypatch.setattr(mbs, "TRAINED_ON", 260)
    figures, picture = tmp_path / "figures.json", tmp_path / "sub" / "picture.png"
    assert module.main(
        ["--seeds", "1", "--epochs", "1", "--json", str(figures), "--picture", str(picture)]
    ) in {0, 3}
    assert "paper" in capsys.readouterr().out
    written = json.loads(figures.read_text())
    assert written["paper"]
    assert written["ours"]
    assert picture.stat().st_size > 10_000


def test_a_streamed_batch_is_as_accurate_as_a_whole_one() -> None:
    train, test = digits()
    limit = (mbs.peak(8, train) + mbs.peak(16, train)) // 2
    assert [mbs.fits(samples, limit, train) for samples in (8, 16)] == [True, False]
    found = mbs.streamed(0, 64, 1, limit, train, test)
    assert found["peak"] <= limit
    assert found["ooms"] > 0
    assert found["micro_batch"] == 8
    assert found["accuracy"] == pytest.approx(mbs.whole(0, 64, 1, train, test), abs=0.01)
