"""The benchmark's whole run on a CUDA device, where each contender finds it as the first did."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.bench import __main__ as bench
from benchmarks.bench.device import MemoryFraction, mlp, settle
from benchmarks.bench.rows import whole_run
from stress.limits.simcuda import Simulation

pytestmark = pytest.mark.gpu
MIB = 2**20


def test_the_whole_run_has_counts_and_no_times_and_leaves_the_device_as_it_was(
    simulation: Simulation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(whole_run, "DEVICE_MODELS", {"mlp": (mlp, 49_152)})
    device = torch.device("cuda", 0)
    settle(device)
    before = torch.cuda.memory_allocated(device)
    bench.main(["run", "--quick", "--device", "cuda", "--json", str(tmp_path / "counts.json")])
    assert torch.cuda.memory_allocated(device) == before
    assert torch.cuda.get_per_process_memory_fraction(device) == 1.0
    runs = {
        run["contender"]: run for run in json.loads((tmp_path / "counts.json").read_text())["run"]
    }
    assert set(runs) == {
        "oracle",
        "elastic_mbs",
        "elastic_mbs with plan",
        "halving (Composer's rule)",
    }
    assert not {"seconds", "ratio", "milliseconds"} & set(runs["oracle"])
    assert " ms" not in capsys.readouterr().out
    for name, run in runs.items():
        assert run["distance"] < 1e-3
        assert (run["ooms"] == 0) == (run["replayed"] == 0) == (name == "oracle")
        assert run["made"] == len(run["sizes"]) >= 24


def test_the_limit_is_the_allocators_can_be_moved_and_counts_its_own_errors_only() -> None:
    device = torch.device("cuda", 0)
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    for errors in 1, 2:
        limit = MemoryFraction(torch.cuda.memory_reserved(device) + 32 * MIB, device)
        with limit:
            for _ in range(errors):
                with pytest.raises(torch.OutOfMemoryError):
                    torch.empty(64 * MIB, dtype=torch.uint8, device=device)
            assert limit.ooms == errors
            limit.limit += 32 * MIB
            limit.reset_peak()
            live = limit.live
            torch.empty(64 * MIB, dtype=torch.uint8, device=device)
            assert limit.peak >= live + 64 * MIB
        limit.lift()
    del kept


def test_a_device_has_the_whole_run_alone_and_no_drawing_if_simulated(
    simulation: Simulation, tmp_path: Path
) -> None:
    for arguments in ["idle"], ["run", "--png", str(tmp_path / "times.png")]:
        with pytest.raises(SystemExit):
            bench.main([*arguments, "--device", "cuda"])
