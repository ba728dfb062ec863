"""benchmarks/longest.py works: what is said to train does, and the ways compute the same.

Speed is not asserted here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import longest
from stress.reference.state import error_of
from tests.helpers.steps import grads

pytestmark = pytest.mark.no_oom_injection


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORDS": 1024, "WIDTH": 16, "HEADS": 2, "LAYERS": 2, "WINDOW": 64}.items():
        monkeypatch.setattr(longest, name, value)


@pytest.mark.parametrize("way", longest.WAYS)
def test_each_way_has_the_same_gradient(way: str) -> None:
    found = []
    for each in ("stock", way):
        model = longest.made().double()
        with longest.WAYS[each](model) as step:
            step(longest.ids_of(256))
        found.append(grads(model))
    assert error_of(found[1], found[0]) <= 1e-12


def test_the_tables_have_their_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "longest.json"
    assert longest.main(["--budget-mib", "2", "--rounds", "1", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    lengths = {row["way"]: row["length"] for row in found["longest"]}
    assert lengths[longest.OURS] > lengths["stock"]
    assert all(0 < row["peak"] <= 2 * longest.MIB for row in found["longest"])
    limit = 2 * longest.MIB
    assert longest.trains("stock", lengths["stock"], limit) is not None
    assert longest.trains("stock", 2 * lengths["stock"], limit) is None
    assert {row["length"] for row in found["times"] if row["way"] == "stock"} >= {lengths["stock"]}
    assert all(row["ours"] == 1 for row in found["times"] if row["way"] == longest.OURS)
    assert "elastic-mbs" in capsys.readouterr().out


def test_by_hand_the_loss_is_chunked_without_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    monkeypatch.setattr(longest, "ROWS", 96)
    test_each_way_has_the_same_gradient("chunked loss")
