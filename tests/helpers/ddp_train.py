"""A training script for torchrun that is hit by something once, and resumes when it starts again.

torchrun --nproc-per-node 2 --max-restarts 2 -m tests.helpers.ddp_train FOLDER killed [STEP]

killed: rank 1 kills itself. cut: ranks wait until the file FOLDER/hit is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import DistributedOptions, ElasticMBS
from stress.ranks.losses import data
from tests.helpers.ddp import FailingBackward, failing, joined, net

STEPS, HIT, EVERY = 12, 7, 3
TIMEOUT = {"killed": 30.0, "cut": 4.0}


def reference(ranks: int) -> list[float]:
    """Return the losses of one process over the joined batches."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = model(joined([data(rank, step) for rank in range(ranks)])).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def be_hit(rank: int, folder: Path, how: str) -> None:
    """Be killed, or wait until this job was cut off; once."""
    hit = folder / "hit"
    if hit.exists():
        return
    if how == "killed" and rank == 1:
        hit.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "cut":
        (folder / f"here{rank}").touch()
        while not hit.exists():
            time.sleep(0.05)


def save(state: dict[str, Any], path: Path) -> None:
    """Write a file that is whole whenever it is there."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    new.replace(path)


def main(folder: Path, how: str, at: int = HIT) -> None:
    """Train from the last checkpoint on."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saved = folder / "checkpoint"
    first, losses = 0, list[float]()
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, losses = state["step"], state["losses"]
    ddp = DDP(model)
    own = folder / f"runtime{rank}"
    with ElasticMBS(ddp, distributed=DistributedOptions(timeout=TIMEOUT[how])) as mbs:
        if own.exists():
            mbs.load_state_dict(torch.load(own))
        for step in range(first, STEPS):
            if step == at:
                be_hit(rank, folder, how)
            FailingBackward.left = int(step % 2 == rank)
            result = mbs.backward(lambda x: failing(ddp(x)).pow(2).mean(), data(rank, step))
            losses.append(float(result))
            mbs.optimizer_step(optimizer)
            optimizer.zero_grad()
            if (step + 1) % EVERY == 0:
                save(mbs.state_dict(), own)
            if rank == 0 and (step + 1) % EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(state | {"step": step + 1, "losses": losses}, saved)
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
