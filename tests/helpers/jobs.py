"""Jobs for tests of processes: a child runs each, with a function that tells its parent."""

import os
import signal
import sys
import time

from elastic_mbs.errors import BatchError
from stress.limits import Line


def say(line: Line, words: list[str]) -> None:
    for word in words:
        print("noise")
        os.write(1, b"more noise\n")
        line({"word": word})


def environment(line: Line, names: list[str]) -> None:
    line({name: os.environ.get(name) for name in names})


def answer(line: Line) -> None:
    line(2 * line.receive())


def end_by_signal(line: Line, name: str) -> None:
    line("about to go")
    print("on the edge", file=sys.stderr, flush=True)
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(60)


def die_in_the_middle_of_a_message(line: Line) -> None:
    line("whole")
    os.write(line._connection.fileno(), b"\0\0\1\0half")
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with(line: Line, code: int) -> None:
    print("my last words", file=sys.stderr, flush=True)
    os._exit(code)


def fail(line: Line) -> None:
    raise KeyError("a mistake")


def refuse(line: Line) -> None:
    raise BatchError("this batch will not do")


def wait_here_for_ever(line: Line) -> None:
    line("still here")
    time.sleep(3600)


def close_the_line_and_stay(line: Line) -> None:
    line._connection.close()
    time.sleep(3600)


def count(line: Line, until: int, pause: float) -> None:
    for number in range(until):
        line(number)
        time.sleep(pause)
