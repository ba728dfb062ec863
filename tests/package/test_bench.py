"""The benchmark works: all contenders train the same model, and its figures are there.

Speed is not asserted here.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.bench import __main__ as bench
from benchmarks.bench.compete import compete
from benchmarks.bench.contenders import Elastic, Planned
from benchmarks.bench.job import Task
from benchmarks.bench.models import MODELS
from benchmarks.bench.rows import fault, idle, settled, whole_run
from benchmarks.bench.sweep import Sweep


def test_all_contenders_of_the_whole_run_train_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_run, "MODELS", {"lstm": (MODELS["lstm"][0], 28)})
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    bench.main(["run", "--quick", "--json", str(figures), "--png", str(picture)])
    runs = json.loads(figures.read_text())["run"]
    assert {run["contender"] for run in runs} >= {"oracle", "elastic_mbs", "elastic_mbs with plan"}
    for run in runs:
        assert run["distance"] < 1e-3
        assert run["ooms"] == 0 if run["contender"] == "oracle" else run["ooms"] > 0
        assert run["made"] == len(run["sizes"]) >= 24
        assert (run["replayed"] > 0) == (run["ooms"] > 0)
    assert picture.stat().st_size > 0


@pytest.mark.parametrize(
    "row", ["settled", "recovery", "flapping", "fault", "idle", "scale", "step"]
)
def test_every_other_row_has_a_table(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (fault, idle, settled):
        monkeypatch.setattr(module, "MODELS", {"gpt": (MODELS["gpt"][0], 6)})
    more = tmp_path / "more.json"
    more.write_text('{"speed": 1}')
    bench.main(
        [row, "--quick", "--json", str(tmp_path / "figures.json"), "--include", f"more={more}"]
    )
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["more"] == {"speed": 1}
    assert found["environment"]["peers"].keys() == {"accelerate", "lightning"}
    assert len(capsys.readouterr().out.strip().splitlines()) == 4 + len(found[row]), (
        "a heading, an empty line, two lines of the table's head"
    )


def test_samples_of_a_plan_do_not_count_as_replayed() -> None:
    make = partial(MODELS["gpt"][0], 12)
    sweep = Sweep(make, 1, most=4)
    limits = [sweep.limit_for(pieces) for pieces in (2, 3, 2, 2)]
    for contender in Elastic(), Planned():
        job = compete(Task(make, limits, turn=0), [lambda it=contender: it])[contender.name]  # type: ignore[misc]
        assert job.replayed == contender.mbs.stats.replayed_samples > 0


def test_a_row_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit):
        bench.main(["nonsense"])


def test_without_a_device_there_is_nothing_to_run_on_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.main(["run", "--device", "cuda"])
    assert "--device simcuda" in capsys.readouterr().err
