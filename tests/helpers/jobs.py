"""Jobs for tests of processes: each is called with `emit` in a child. The small ones import nothing, so that they are there in a moment."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

Emit = Callable[[dict[str, Any]], None]


def say(emit: Emit, words: list[str]) -> None:
    """Says each word, and prints noise that must not come between."""
    for word in words:
        print("noise")
        os.write(1, b"more noise\n")
        emit({"word": word, "modules": "torch" in sys.modules})


def tell_environment(emit: Emit, names: list[str]) -> None:
    """Says what variables are."""
    emit({name: os.environ.get(name) for name in names})


def end_by_signal(emit: Emit, name: str) -> None:
    """Says one thing and is gone."""
    emit({"about": "to go"})
    print("on the edge", file=sys.stderr, flush=True)
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(60)


def die_in_the_middle_of_a_line(emit: Emit) -> None:
    """Leaves half a line, as a process does that is killed while it writes."""
    emit({"whole": 1})
    place = next(number for number in range(3, 64) if os.path.exists(f"/proc/self/fd/{number}") and stat.S_ISFIFO(os.fstat(number).st_mode))
    os.write(place, b'{"message": {"ha')
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with(emit: Emit, code: int) -> None:
    """Ends without an exception that anybody could catch."""
    print("my last words", file=sys.stderr, flush=True)
    os._exit(code)


def fail(emit: Emit) -> None:
    """Raises what is not ours."""
    raise KeyError("a mistake")


def refuse(emit: Emit) -> None:
    """Raises what is bad input."""
    from elastic_mbs.errors import BatchError

    raise BatchError("this batch will not do")


def wait_here_for_ever(emit: Emit) -> None:
    """Hangs."""
    emit({"still": "here"})
    time.sleep(3600)


def close_output_and_stay(emit: Emit) -> None:
    """Has nothing more to say, and does not go."""
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                os.close(number)
    time.sleep(3600)


def count_slowly(emit: Emit, until: int, pause: float) -> None:
    """Says numbers."""
    for number in range(until):
        emit({"number": number, "pid": os.getpid()})
        time.sleep(pause)


class Jobs:
    """A place for a job that is no plain function of a module."""

    @staticmethod
    def nested(emit: Emit) -> None:
        """Is found, too."""
        emit({"nested": True})
