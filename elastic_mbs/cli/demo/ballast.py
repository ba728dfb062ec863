"""The co-tenant on CUDA: a second process that holds as much of a device's memory as it is asked to, until `cudaMalloc` fails in ours."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch

GRAIN = 20 * 2**20  # bytes: the allocator takes at least this much from the device at once
RETRY = 0.01  # seconds between two attempts to get what is missing


class Ballast:
    """The process, there inside the block; it ends with its parent, too. The device has an index."""

    def __init__(self, device: torch.device) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(self._theirs, device), daemon=True)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def __enter__(self) -> Self:
        """Starts the process and waits until it has a CUDA context."""
        self._process.start()
        self._theirs.close()
        self._answer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pipe.close()  # which ends the process
        self._process.join()

    def hold(self, size: int) -> int:
        """Has it hold `size` bytes; returns what it got at once. It goes on trying to get the rest."""
        with suppress(OSError):  # where it has ended, `_answer` says so
            self._pipe.send(size)
        return self._answer()

    def _answer(self) -> int:
        try:
            return int(self._pipe.recv())
        except (EOFError, OSError):
            self._process.join()
            raise RuntimeError(f"the ballast process has ended (exit code {self._process.exitcode})") from None


def serve(pipe: Connection, device: torch.device) -> None:
    """Runs in the process: holds what the parent asks for, until the parent closes the pipe."""
    blocks: list[torch.Tensor] = []
    torch.empty(1, device=device)  # the context's own memory is taken before anything is counted
    held = wanted = 0
    pipe.send(held)
    with suppress(EOFError, OSError):
        while True:
            asked = pipe.poll(RETRY if wanted - held >= GRAIN else None)
            wanted = pipe.recv() if asked else wanted
            held = adjust(blocks, wanted, device)
            if asked:
                pipe.send(held)


def adjust(blocks: list[torch.Tensor], wanted: int, device: torch.device) -> int:
    """Brings the bytes of `blocks` as close to `wanted` as the device allows, in the largest blocks that it gives; returns how many they are."""
    missing = wanted - sum(block.numel() for block in blocks)
    if missing < 0:
        blocks.clear()
        torch.cuda.empty_cache()
        missing = wanted
    size = min(missing, torch.cuda.mem_get_info(device)[0]) // GRAIN * GRAIN
    while size >= GRAIN:
        try:
            blocks.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size = size // 2 // GRAIN * GRAIN
        else:
            missing -= size
            size = min(missing // GRAIN * GRAIN, size)
    return wanted - missing
