"""Errors at the n-th operation, or before the n-th line of a module, n = 1, 2, … until a run has none."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_mbs.testing import InjectOOM

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 MiB."


class StrikeAt(TorchDispatchMode):
    """Raises an out-of-memory error in place of the n-th operation of any kind, and of `times - 1` after it."""

    def __init__(self, n: int, times: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.seen, self.due = 0, range(n, n + times)

    @property
    def struck(self) -> bool:
        return self.seen >= self.due.start

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation, or fails."""
        self.seen += 1
        if self.seen in self.due:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return func(*args, **(kwargs or {}))


@contextmanager
def interrupt_before_line(n: int, *files: str) -> Iterator[list[int]]:
    """Ctrl-C before the n-th line that runs in one of these files; the list that it gives holds that line's number once it has struck."""
    seen, struck = 0, list[int]()

    def tracer(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            seen += 1
            if seen == n:
                sys.settrace(None)
                struck.append(frame.f_lineno)
                raise KeyboardInterrupt
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield struck
    finally:
        sys.settrace(before)


def every_operation(first: int = 1, stride: int = 1, least: int = 20) -> Iterator[InjectOOM]:
    """Injections at operation `first`, `first + stride`, … that can allocate, until a run under one has none; that comes above `least`."""
    for at in itertools.count(first, stride):
        inject = InjectOOM(at=[at])
        yield inject
        if not inject.hits:
            assert at > least, f"only {at - 1} operations"
            return


def until_clean(run: Callable[[int], bool]) -> int:
    """Runs with n = 1, 2, … until nothing struck; returns how often something did."""
    n = 1
    while run(n):
        n += 1
        assert n < 5000, "it strikes for ever"
    return n - 1
