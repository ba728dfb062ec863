"""Jobs of several processes on gloo, under a watchdog that kills what hangs.

The processes are forked from a server that has imported torch's compiler (DDP's constructor does)
and has frozen what is there: each start then takes a tenth of a second.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from queue import Empty
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext  # Windows has none

OK = "ok"
ERROR = "error"
HUNG = "hang"
DIED = "died"


class Outcome(NamedTuple):
    """The end of one rank: how, and with which value.

    Attributes:
        status: OK, ERROR, HUNG or DIED.
        value: what its function returned, or the error in words.
    """

    status: str
    value: Any


def _rank(
    rank: int, world: int, port: int, queue: Any, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    faulthandler.enable()  # a crash of native code prints the stacks of Python
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, world, is_master=False)
        dist.init_process_group(
            "gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=60)
        )
        queue.put((rank, Outcome(OK, fn(rank, world, *args))))
    except BaseException as error:
        words = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"
        queue.put((rank, Outcome(ERROR, words)))
    queue.close()
    queue.join_thread()
    os._exit(0)  # no waiting for the groups of others


def server(*modules: str) -> ForkServerContext:
    """Return the context whose processes are forked from the server.

    It starts with the first of them, and imports `modules` besides what every rank needs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules, f"{__package__}.preload"])
    return context


def run_ranks(
    fn: Callable[..., Any], *args: Any, world: int = 2, wall: float = 60.0
) -> list[Outcome]:
    """Run `fn(rank, world, *args)` on every rank; return the end of each.

    A rank that has not ended within `wall` seconds is a hang, and is killed.
    """
    context = server()
    queue = context.Queue()
    store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=_rank, args=(rank, world, store.port, queue, fn, args), daemon=True)
        for rank in range(world)
    ]
    for each in ranks:
        each.start()
    found: dict[int, Outcome] = {}
    until = time.monotonic() + wall
    while len(found) < world and time.monotonic() < until:
        alive = any(each.is_alive() for each in ranks)
        try:
            rank, outcome = queue.get(timeout=0.2)
            found[rank] = outcome
        except Empty:
            if not alive:
                break
    for rank, each in enumerate(ranks):
        each.join(1.0)
        found.setdefault(rank, Outcome(HUNG if each.is_alive() else DIED, each.exitcode))
        if each.is_alive():
            each.kill()
            each.join()
    return [found[rank] for rank in range(world)]


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return what all ranks have returned, if none has failed."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.status == OK, f"rank {rank}: {outcome.status}: {outcome.value}"
    return [outcome.value for outcome in outcomes]
