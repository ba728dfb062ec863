"""The overhead benchmark works: what it compares is the same training, and its figures are there.

Speed is not asserted here.
"""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import bench_overhead
from benchmarks.bench_overhead import Estimate, judge, median_of
from benchmarks.breakdown import make_runtime
from benchmarks.workloads import MAKERS, calibrated, with_pieces
from tests.helpers.steps import grads, there

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
        assert torch.allclose(there(mine), there(other), rtol=1e-5, atol=1e-7)


def test_a_workload_is_made_as_large_as_a_step_must_be_long() -> None:
    workload = calibrated("tiny", CPU, seconds=0.02)
    assert workload.size > 4
    assert with_pieces(workload, 2).samples == 2 * workload.size


def test_the_table_and_the_breakdown_have_their_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sub" / "overhead.json"
    assert (
        bench_overhead.main(
            [
                "tiny",
                "mlp",
                "--pairs",
                "3",
                "--seconds",
                "1",
                "--step-ms",
                "0.1",
                "--json",
                str(out),
            ]
        )
        == 0
    )
    rows = json.loads(out.read_text())["overhead"]
    assert [row["name"] for row in rows] == ["tiny", "mlp"]
    assert all(
        row["pieces"] == 6
        and row["overhead"]["low"] <= row["overhead"]["median"] <= row["overhead"]["high"]
        for row in rows
    )
    assert "open" in capsys.readouterr().out  # three pairs are not enough for a verdict
    assert (
        bench_overhead.main(
            ["tiny", "--breakdown", "--pairs", "5", "--seconds", "1", "--json", str(out)]
        )
        == 0
    )
    found = json.loads(out.read_text())["breakdown"]["tiny"]
    parts = {row["part"]: row["times"] for row in found["parts"]}
    assert parts["runtime.py:ElasticMBS.backward"] == 1
    assert found["parts"][-1]["part"] == "user"


def test_the_verdict_needs_the_whole_interval_on_one_side() -> None:
    assert judge(Estimate(0.004, -0.002, 0.009), 100) == "holds"
    assert judge(Estimate(0.02, 0.012, 0.03), 100) == "broken"
    assert judge(Estimate(0.009, 0.004, 0.014), 100) == "open"
    assert judge(Estimate(0.02, 0.012, 0.03), 5) == "open"
    values = [0.01 + 0.0001 * i for i in range(50)]
    estimate = median_of(values)
    assert estimate.low < estimate.median < estimate.high
    assert abs(median_of([*values, 1000.0]).median - estimate.median) < 0.0002


@pytest.mark.parametrize("arguments", [["nonsense"], ["--device", "cuda"]])
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench_overhead.main(arguments)
    assert set(bench_overhead.FOR_THE_TABLE) | set(bench_overhead.FOR_THE_BREAKDOWN) <= set(MAKERS)
