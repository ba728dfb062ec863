"""Ends a process whose case hangs, with the stack of what it hangs in."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Self

from .exit_codes import HANG

GRACE = 0.25  # seconds that the thread waits for faulthandler, which needs no Python to write the stacks


def end_process(report: str) -> None:
    """Prints what hung, and ends this process at once: a thread that is stuck cannot be stopped."""
    sys.stdout.flush()
    print(report, flush=True)
    os._exit(HANG)


class Watchdog:
    """Limits the seconds that a block of code can take; `on_hang` gets `text()` and the stacks when it takes longer."""

    def __init__(self, seconds: float, text: Callable[[], str], on_hang: Callable[[str], None] = end_process) -> None:
        self._seconds, self._text, self._on_hang = seconds, text, on_hang
        self._stacks = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  # it is closed when the block ends
        self._timer = threading.Timer(seconds + GRACE, self._bark)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        faulthandler.dump_traceback_later(self._seconds, file=self._stacks)
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        self._timer.join()
        self._stacks.close()

    def _bark(self) -> None:
        self._stacks.seek(0)
        self._on_hang(f"{self._text()}\n{self._stacks.read().rstrip()}")
