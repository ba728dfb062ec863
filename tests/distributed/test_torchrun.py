"""A job under torchrun whose rank is killed starts again, and its curve is the undisturbed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ddp_train import reference
from tests.helpers.room import ROOT


@pytest.mark.no_oom_injection
def test_a_job_resumes_after_a_rank_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as docs/distributed.md says
    }
    done = subprocess.run(
        [*command, "-m", "tests.helpers.ddp_train", str(tmp_path), "killed"],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "hit").exists()
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(
        reference(2), rel=1e-12
    )
