"""Injectors: operations that can allocate, the library's own among them, and lines of recovery."""

from __future__ import annotations

import dis
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

import torch

import elastic_mbs
from elastic_mbs.testing import InjectOOM

PACKAGE = str(Path(elastic_mbs.__file__).parent) + "/"
OUTSIDE = re.compile("/(testing|cli)/")

# Distances from the first fault to the others; with None every operation from the first on fails.
PATTERNS: dict[str, tuple[int, ...] | None] = {
    "once": (),
    "twice": (3,),
    "three times": (7, 12),
    "in a row": (1, 2),
    "persistent": None,
}
# A pattern whose second fault strikes an operation between the first fault and the next run of the
# user's code.
PAIR = "in recovery"
# Files whose lines are struck.
RECOVERY = (
    "engine/recovery/",
    "engine/snapshot.py",
    "engine/gradients.py",
    "rollback/",
    "optimizer/",
)
EXCEPTIONS: tuple[type[BaseException], ...] = (KeyboardInterrupt, MemoryError, RuntimeError)
INJECTED = "injected between two lines"

# a file in the package, a line of it, and the number of its run, from 1
Line = tuple[str, int, int]


class Operations(InjectOOM):
    """Failures of chosen operations, among all that can allocate on some device.

    `torch.equal` and `.item()` need memory on CUDA, so they count.
    """

    def __init__(
        self, first: int = 0, distances: tuple[int, ...] | None = (), *, after: int = 0
    ) -> None:
        """Choose the operations to strike.

        Args:
            first: number of the first one.
            distances: from the first to the others; None strikes all from the first on.
            after: number of an operation of recovery to strike as well.
        """
        at = {
            first,
            *(first + distance for distance in distances or ()),
            *((first + after,) if after else ()),
        }
        super().__init__(
            at=at if first else (), always_from=first if first and distances is None else None
        )
        self.recovery = 0  # operations between the first fault and the next run of the user's code
        self._recovering = False

    def user_code(self) -> None:
        self._recovering = False

    def step(self, name: str) -> None:
        self.recovery += self._recovering
        try:
            super().step(name)
        except torch.OutOfMemoryError:
            self._recovering = self._recovering or len(self.hits) == 1
            self.hits[-1] = f"{name} in {where()}"
            raise

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Anything but a view of an argument is new, a number included.
        makes = any(returned.alias_info is None for returned in func._schema.returns)
        if makes or any(isinstance(arg, torch.Tensor) and arg.is_sparse for arg in args):
            self.step(func._schema.name)
        return func(*args, **(kwargs or {}))


def where() -> str:
    """Return the library's function that is running, or that called the running one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        not frame.f_code.co_filename.startswith(PACKAGE) or OUTSIDE.search(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return (
        "the user's code"
        if frame is None
        else f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} "
        f"{frame.f_code.co_name}"
    )


class Lines:
    """An exception in front of a line of recovery, after an operation has failed."""

    def __init__(
        self,
        fault: Operations,
        line: Line | None = None,
        exception: type[BaseException] = KeyboardInterrupt,
    ) -> None:
        self.fault = fault
        # How often each line has been run since the first fault.
        self.seen: Counter[tuple[str, int]] = Counter()
        self._line = line
        self._exception = exception

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        self.fault.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        sys.settrace(self._frame)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.settrace(self._before)
        self.fault.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._at if is_recovery(frame.f_code.co_filename) else None

    def _at(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and self.fault.hits and frame.f_lasti not in between(frame.f_code):
            place = frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_lineno
            self.seen[place] += 1
            if self._line == (*place, self.seen[place]):
                self.fault.hits.append(
                    f"{self._exception.__name__} at {place[0]}:{place[1]} {frame.f_code.co_name}"
                )
                raise self._exception(INJECTED)
        return self._at


@lru_cache(maxsize=512)
def is_recovery(path: str) -> bool:
    return path.startswith(PACKAGE) and path.removeprefix(PACKAGE).startswith(RECOVERY)


@lru_cache(maxsize=512)
def between(code: CodeType) -> frozenset[int]:
    """Return the offsets at which no exception can come.

    Where a `with` block ends, the interpreter calls `__exit__` without looking for signals. The
    line of a `try:` does nothing at all.
    """
    instructions = list(dis.get_instructions(code))
    found = set()
    for i, instruction in enumerate(instructions):
        names = [(each.opname, each.argval) for each in islice(instructions, i, i + 8)]
        while names and names[0][0] in ("NOP", "SWAP", "COPY", "PUSH_EXC_INFO"):
            names.pop(0)
        leaves = (
            names[:3] == [("LOAD_CONST", None)] * 3
            and len(names) > 3
            and names[3][0] in ("PRECALL", "CALL")
        )
        nothing = instruction.opname == "NOP"
        if nothing or leaves or (names and names[0][0] == "WITH_EXCEPT_START"):
            found.add(instruction.offset)
    return frozenset(found)
