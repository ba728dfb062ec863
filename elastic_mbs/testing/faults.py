"""Out-of-memory errors at random places inside guarded attempts, for `--oom-injection`.

The places follow from the seed, the test's name and, for a property test, the example's
arguments; not from time, memory or threads.
"""

from __future__ import annotations

import math
import random
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Self
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from elastic_mbs.engine import hooks
from elastic_mbs.testing.injection import InjectOOM

CHOSEN = 0.5  # fraction of the tests that `random` chooses
# errors in one call, at most: smaller pieces end a real shortage, but random errors would go on and
# use up the retries
PER_CALL = 2
# assumed operations of an attempt, before one has been seen to its end
_FIRST_LENGTH = 48


def is_chosen(seed: int, test: str) -> bool:
    """Return whether `random` chooses a test."""
    return random.Random(f"{seed}:{test}:chosen").random() < CHOSEN


def noting_compile() -> Any:
    """Return a patch of `torch.compile` that tells the running test's injector of its calls."""
    compile_ = torch.compile

    @wraps(compile_)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if hooks.fault_injector is not None:
            hooks.fault_injector.compiles = True
        return compile_(*args, **kwargs)

    return mock.patch.object(torch, "compile", noted)


class RandomFaults:
    """A context manager that injects `torch.OutOfMemoryError` into guarded attempts of its thread.

    A piece is not struck again before another one has committed, so that errors alone never lead to
    the floor. A try of the optimizer's step is struck only if another try can follow. `always`:
    each call is struck at its first attempt, if that is long enough, and not by chance.
    """

    def __init__(self, seed: int, test: str, *, always: bool = False) -> None:
        # the injected errors: operation, its number in its attempt, and the attempt's number
        self.hits: list[str] = []
        self.attempts = 0  # guarded attempts seen
        self._seed, self._test, self._always = seed, test, always
        self._thread = 0
        self._open: list[_Attempt] = []
        # torch.compile was called in the block: its results do not run under a dispatch mode
        self.compiles = False
        self.restart()

    def restart(self, example: str = "") -> None:
        """Go back to the first draw.

        An example of a property test (its arguments in words) has to behave the same in each run.
        """
        self._random = random.Random(
            f"{self._seed}:{self._test}:{re.sub(r'0x[0-9a-fA-F]+', '', example)}"
        )
        self._length = _FIRST_LENGTH
        self._left: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._injector_before, hooks.fault_injector = hooks.fault_injector, self
        return self

    def __exit__(self, *error: object) -> None:
        hooks.fault_injector = self._injector_before
        while self._open:  # attempts that were left open
            self._open.pop().leave()

    def begin(
        self,
        owner: object,
        modules: Iterable[nn.Module],
        *,
        ready: bool,
        protected: Callable[[], bool] | None = None,
    ) -> None:
        """Begin an attempt of a call or of an optimizer's step, as `hooks.fault_injector`.

        `ready`: an attempt has succeeded since the last failure, so another one is recoverable.
        `protected`: tells that code of the user's runs that is not tried again and must not fail.
        """
        if threading.get_ident() != self._thread:
            return
        self.attempts += 1
        ready = (
            ready
            and not self.compiles
            and not any(map(_is_compiled, modules))
            and not _is_injected()
        )
        attempt = _Attempt(
            self, owner, self._draw(owner) if ready else 0, protected or (lambda: False)
        )
        self._open.append(attempt)
        if attempt.at:
            attempt.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def end(self) -> None:
        """End the latest attempt."""
        if threading.get_ident() == self._thread and self._open:
            attempt = self._open.pop()
            attempt.leave()
            if attempt.at and not attempt.struck:
                self._length = max(1, attempt.count)

    def _draw(self, owner: object) -> int:
        """Return the number of the operation that is to fail, from 1, or 0 for none."""
        left = self._left.get(owner)
        if left is None:
            left = self._left[owner] = self._random.randint(1 if self._always else 0, PER_CALL)
        if not left or (not self._always and self._random.random() < 0.5):
            return 0
        # as often among the first few as among the many that follow
        return (
            round(math.exp(self._random.random() * math.log(self._length)))
            if self._length > 1
            else 1
        )

    def strike(self, attempt: _Attempt, name: str) -> None:
        """Fail an operation of an attempt, if it is its turn.

        Operations of an attempt inside it, and of protected code, are spared.
        """
        if self._open[-1:] != [attempt] or attempt.struck:
            return
        attempt.count += 1
        if attempt.count >= attempt.at and not attempt.protected():
            attempt.struck = True
            self._left[attempt.owner] -= 1
            self.hits.append(f"{name}, operation {attempt.count} of attempt {self.attempts}")
            raise torch.OutOfMemoryError(f"out of memory, injected by --oom-injection in {name}")


class _Attempt(InjectOOM):
    """The operations of one attempt, one of which is to fail."""

    def __init__(
        self, faults: RandomFaults, owner: object, at: int, protected: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.faults, self.owner, self.at, self.protected = faults, owner, at, protected
        self.struck = False

    def step(self, name: str) -> None:
        self.faults.strike(self, name)

    def leave(self) -> None:
        if self.at:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _is_injected() -> bool:
    """Return whether the test injects by itself here and so chooses the errors."""
    return any(
        isinstance(mode, InjectOOM) and not isinstance(mode, _Attempt)
        for mode in _get_current_dispatch_mode_stack()
    )


def _is_compiled(module: nn.Module) -> bool:
    # not imported here: it is large, and without it nothing is compiled
    dynamo = sys.modules.get("torch._dynamo")
    return getattr(module, "_compiled_call_impl", None) is not None or (
        dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    )
