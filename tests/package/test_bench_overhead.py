"""The overhead benchmark works: what it compares is the same training, and its figures are there. Speed is not asserted here."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.steps import grads
from tools import bench_overhead
from tools.bench_overhead import Estimate, judge, median_of
from tools.breakdown import PARTS, make_runtime
from tools.workloads import MAKERS, calibrated, seconds_by_hand, with_pieces

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "tiny"])
def test_both_loops_compute_the_same_gradient(name: str) -> None:
    workload = MAKERS[name](2, CPU)
    workload.by_hand()
    by_hand = grads(workload.model)
    workload.model.zero_grad()
    with make_runtime(workload) as mbs:
        result = mbs.backward(workload.loss_fn, workload.batch)
    assert len(result.partition) == 6
    for mine, other in zip(grads(workload.model), by_hand, strict=True):
        assert mine is not None
        assert other is not None
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-7)


def test_a_workload_is_made_as_large_as_a_step_must_be_long() -> None:
    workload = calibrated("tiny", CPU, seconds=0.002)
    assert workload.size > 4
    assert seconds_by_hand(workload, steps=5) > 0.0005
    assert with_pieces(workload, 2).samples == 2 * workload.size


def test_the_table_and_the_json_have_every_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sub" / "overhead.json"
    assert bench_overhead.main(["tiny", "mlp", "--pairs", "3", "--seconds", "1", "--step-ms", "0.1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [row["name"] for row in report["overhead"]] == ["tiny", "mlp"]
    assert all(row["pieces"] == 6 and row["overhead"]["low"] <= row["overhead"]["median"] <= row["overhead"]["high"] for row in report["overhead"])
    assert report["environment"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "tiny" in printed
    assert "open" in printed  # three pairs are not enough for a verdict


def test_the_breakdown_times_every_part_and_leaves_none_of_its_timers(tmp_path: Path) -> None:
    before = [vars(owner)[name] for _, owner, name in PARTS]  # every part that is timed exists
    out = tmp_path / "breakdown.json"
    assert bench_overhead.main(["tiny", "--breakdown", "--pairs", "5", "--seconds", "1", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["breakdown"]["tiny"]
    assert {"per_call", "per_piece", "parts"} == set(found)
    parts = {row["part"]: row["times"] for row in found["parts"]}
    assert (parts["user: loss_fn"], parts["user: backward"], parts["the loop itself"]) == (6, 6, 1)
    assert {"streams: read", "schedule: next piece", "inventory: refresh"} <= set(parts)
    assert [vars(owner)[name] for _, owner, name in PARTS] == before


def test_the_verdict_needs_the_whole_interval_on_one_side() -> None:
    assert judge(Estimate(0.004, -0.002, 0.009), 100) == "holds"
    assert judge(Estimate(0.02, 0.012, 0.03), 100) == "broken"
    assert judge(Estimate(0.009, 0.004, 0.014), 100) == "open"
    assert judge(Estimate(0.02, 0.012, 0.03), 5) == "open"


def test_the_interval_holds_the_median_and_an_outlier_does_not_move_it() -> None:
    values = [0.01 + 0.0001 * i for i in range(50)]
    estimate = median_of(values)
    assert estimate.low < estimate.median < estimate.high
    assert abs(median_of([*values, 1000.0]).median - estimate.median) < 0.0002


@pytest.mark.parametrize("arguments", [["nonsense"], ["--device", "cuda"]])
def test_what_cannot_be_measured_is_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench_overhead.main(arguments)


def test_every_workload_of_the_table_exists() -> None:
    assert set(bench_overhead.FOR_THE_TABLE) | set(bench_overhead.FOR_THE_BREAKDOWN) <= set(MAKERS)
