#!/usr/bin/env python3
"""The host guard against the kernel's out-of-memory killer, in a control group (Linux, root).

    python tools/host_guard_check.py

A group with a limit is made inside this process's own group. Two times a process in it trains on
the CPU, with a batch whose activations exceed the limit, while a neighbour in the same group takes
memory and gives it back: first without the guard, which the kernel ends by SIGKILL, then with it.
Gradients of the guarded run are compared with those of pieces that always fit. Exit code 0: killed
without, exact with; 1: anything else; 2: no group can be made here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# so that it runs from anywhere, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastic_mbs import ElasticMBS, MemoryOptions, OutOfMemory, Policy
from elastic_mbs.memory.cgroup import groups_of

MEBI = 1 << 20
LIMIT = 560 * MEBI
NEIGHBOUR = 96 * MEBI
MARGIN = "128MiB"  # for the neighbour while one piece runs, and for the kernel
SAMPLES, WIDTH = 8192, 512
FITS = 64
NEIGHBOUR_SCRIPT = f"""
import time
while True:
    memory = bytearray({NEIGHBOUR})
    memory[::4096] = b"x" * len(memory[::4096])
    time.sleep(0.5)
    del memory
    time.sleep(0.5)
"""


def main() -> int:
    """Run both, and print one line of figures for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--train", choices=("raw", "guarded"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        return _train(options.steps, guard=options.train == "guarded")
    try:
        with _group() as folder:
            raw, guarded = (_run(folder, options.steps, guard=guard) for guard in (False, True))
    except OSError as error:
        print(f"no control group can be made here: {error}")
        return 2
    killed = raw["exit"] == -signal.SIGKILL
    exact = guarded["exit"] == 0 and guarded["worst"] <= 1e-12
    print(
        f"limit {LIMIT // MEBI} MiB, a neighbour of {NEIGHBOUR // MEBI} MiB that comes and goes, "
        f"{options.steps} steps"
    )
    print(f"without the guard: {'SIGKILL' if killed else raw}")
    print(f"with the guard:    {guarded}")
    return 0 if killed and exact else 1


@contextlib.contextmanager
def _group() -> Iterator[Path]:
    """Make a group of our own with a limit.

    It is removed at the end, when its last process has gone.
    """
    groups = groups_of(Path("/"), Path("/proc/self/cgroup").read_bytes())
    own = next(
        (group for group in groups if os.path.exists(group.folder + group.names.usage)), None
    )
    if own is None:
        raise OSError("this process is in no group that counts memory")
    if own.names.version == 2:
        Path(own.folder, "cgroup.subtree_control").write_text("+memory")
    folder = Path(own.folder, f"host-guard-check-{os.getpid()}")
    folder.mkdir()
    try:
        (folder / own.names.limits[0]).write_text(str(LIMIT))
        yield folder
    finally:
        for _ in range(50):  # the kernel takes a moment to forget the last process
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def _run(folder: Path, steps: int, *, guard: bool) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    train = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--steps",
        str(steps),
        "--train",
        "guarded" if guard else "raw",
    ]
    neighbour = subprocess.Popen(_inside(folder, [sys.executable, "-c", NEIGHBOUR_SCRIPT]))
    try:
        done = subprocess.run(
            _inside(folder, train),
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=600,
        )
    finally:
        neighbour.kill()
        neighbour.wait()
    figures: dict[str, Any] = (
        json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    )
    return {"exit": done.returncode, **figures}


def _inside(folder: Path, command: list[str]) -> list[str]:
    """Return a command that begins in the group.

    Memory used before that would be charged to another group.
    """
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder / "cgroup.procs"), *command]


def _train(steps: int, *, guard: bool) -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 8)).double()
    batch = torch.randn(SAMPLES, WIDTH, dtype=torch.float64), torch.randint(0, 8, (SAMPLES,))

    def loss_fn(piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(piece[0]), piece[1])

    with ElasticMBS(model, micro_batch_size=FITS, policy=Policy(grow=False)) as mbs:
        mbs.backward(loss_fn, batch)
    wanted = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    ooms = 0
    worst = 0.0
    sizes = set()
    began = time.perf_counter()

    def count(event: object) -> None:
        nonlocal ooms
        ooms += isinstance(event, OutOfMemory)

    for _ in range(steps):
        model.zero_grad()
        # A new runtime each time asks for the whole batch again: every step meets the limit.
        with ElasticMBS(
            model,
            micro_batch_size=SAMPLES,
            on_event=count,
            memory=MemoryOptions(host_guard=MARGIN if guard else False, wait_for_memory=0),
        ) as mbs:
            sizes.add(mbs.backward(loss_fn, batch).micro_batch_size)
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        worst = max(
            worst,
            *(
                ((grad - right).abs().max() / right.abs().max()).item()
                for grad, right in zip(grads, wanted, strict=True)
            ),
        )
    figures = {
        "ooms": ooms,
        "worst": worst,
        "sizes": sorted(sizes),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
