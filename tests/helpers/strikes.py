"""Errors at each operation or before each line in turn, until a run is clean."""

import itertools
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Protocol, Self, TypeVar

import torch

from elastic_mbs.dispatch import run
from elastic_mbs.testing import InjectOOM

COPIES = ("aten::copy_", "aten::_foreach_copy_")


class Everywhere(InjectOOM):
    """An injector that fails at operations in place, too.

    The operation that fails has changed nothing; the operations before it have.
    """

    def __init__(
        self,
        at: Iterable[int] = (),
        always_from: int | None = None,
        errors: Iterable[type[BaseException]] = (),
    ) -> None:
        super().__init__(at, always_from)
        self._errors, self._for_good = iter(errors), always_from is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns, name = func._schema.returns, func._schema.name
        view = bool(returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in returns
        )
        # If copies failed for good, nothing could be rolled back.
        if not (view or (self._for_good and name in COPIES)):
            try:
                self.step(name)
            except torch.OutOfMemoryError as error:
                raise next(self._errors, torch.OutOfMemoryError)(str(error)) from None
        return run(func, args, kwargs)


class AtLine:
    """An error before the n-th line that runs in one of these files and is not `spared`."""

    def __init__(
        self,
        n: int,
        *files: str,
        error: type[BaseException] = KeyboardInterrupt,
        spared: Callable[[FrameType], bool] = lambda frame: False,
    ) -> None:
        self.left, self.files, self.error, self.spared = n, files, error, spared
        self.hits: list[str] = []

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        if event == "line" and not self.spared(frame):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.hits.append(f"line {frame.f_lineno}")
                raise self.error
        return self._trace


class _Strike(Protocol):
    hits: list[str]


Strike = TypeVar("Strike", bound=_Strike)


# Of the run, which pytest's first line names: `--hypothesis-seed` repeats it (tests/conftest.py).
seed: str | None = None


def drawn(stride: int) -> int:
    """Return the first place of a test's sweep: drawn in a run with a seed, else 1.

    Over many runs every place is struck.
    """
    if seed is None:
        return 1
    return random.Random(f"{seed} {os.environ['PYTEST_CURRENT_TEST']}").randint(1, stride)


def until_clean(
    make: Callable[[int], Strike], stride: int = 1, least: int = 20, first: int | None = None
) -> Iterator[Strike]:
    """Yield `make(n)`, `make(n + stride)`, … until a run under one has had no error.

    Args:
        make: returns what strikes at a place.
        stride: every so many places one is struck.
        least: the last one has to lie above it.
        first: the first place, where a test asserts what is met at single places; else it is drawn
            from the first `stride`.
    """
    for at in itertools.count(drawn(stride) if first is None else first, stride):
        strike = make(at)
        yield strike
        assert at < 20_000, "it strikes for ever"
        if not strike.hits:
            assert at > least, f"only {at - 1} points"
            return


def every_operation(
    stride: int = 1, least: int = 20, first: int | None = None
) -> Iterator[InjectOOM]:
    """Yield an injector for each operation that can allocate, or for each `stride`-th."""
    return until_clean(lambda at: InjectOOM(at=[at]), stride, least, first)
