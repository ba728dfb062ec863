"""The benchmark works: all contenders train the same model, and its figures are there. Speed is not asserted here."""

import json
from pathlib import Path

import pytest

from tools.bench import __main__ as bench
from tools.bench import whole_run
from tools.bench.models import MODELS


def test_the_whole_run_has_its_figures_and_all_contenders_train_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_run, "MODELS", {name: MODELS[name] for name in ("conv", "mlp")})
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    bench.main(["run", "--quick", "--json", str(figures), "--png", str(picture)])
    runs = json.loads(figures.read_text())["run"]
    assert {(run["workload"], run["contender"]) for run in runs} >= {
        (model, who) for model in ("conv net", "deep MLP") for who in ("oracle", "elastic_mbs")
    }
    for run in runs:
        assert run["distance"] is None if run["workload"] == "conv net" else run["distance"] < 1e-3
        assert run["ooms"] == 0 if run["contender"] == "oracle" else run["ooms"] > 0
        assert run["made"] == len(run["sizes"]) >= 24
    assert picture.stat().st_size > 0
