"""Jobs in processes of their own, each in the environment that its memory limit needs.

The messages of a job are handed on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from elastic_mbs.errors import UsageError

from . import fence as fences

Emit = Callable[[dict[str, Any]], None]
_SPAWN = multiprocessing.get_context("spawn")
_LAST_WORDS = 4000  # characters of a child's output that are kept
# seconds for the stack dump of a hanging child, and for the exit of one that has closed its
# connection
_GRACE = 5.0
# MKL keeps the buffers that it frees, some 27 MB on one processor and next to none on another, and
# the process limit counts all mapped memory
_LIBRARIES = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MKL_DISABLE_FAST_MM": "1"}


class ChildError(RuntimeError):
    def __init__(self, message: str, how: str, last_words: str = "") -> None:
        super().__init__(message)
        # "hang", "crash by SIGSEGV" or of another signal, the class of an exception, "unexpected
        # exit"
        self.how = how
        # the end of its output; after a hang the stacks of its threads
        self.last_words = last_words


class Line:
    """A job's connection to its parent.

    `line(message)` sends to the parent, `line.receive()` waits for the next `Child.send`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, message: Any) -> None:
        self._connection.send(("message", message))

    def receive(self) -> Any:
        return self._connection.recv()


def run_child(
    kind: str,
    job: Callable[..., object],
    arguments: Mapping[str, Any] | None = None,
    *,
    deadline: float,
) -> Iterator[Any]:
    """Run one `Child` and yield its messages.

    Raises:
        UsageError: the job has raised one, or cannot start.
        ChildError: the job has not returned.
    """
    with Child(kind, job, arguments, deadline=deadline) as child:
        yield from child


def run_children(children: Sequence[Child]) -> Iterator[tuple[int, Any]]:
    """Run several at the same time, and yield their messages with the index of the child.

    An error in one ends all.
    """
    with contextlib.ExitStack() as running:
        for child in children:
            running.enter_context(child)
        yield from _messages(children)


class Child:
    """A process that runs inside the `with` block and is gone after it.

    Iteration yields its messages.
    """

    def __init__(
        self,
        kind: str,  # the limit that the job will open
        # a function at the top of a module, called as `job(line, **arguments)` in the child
        job: Callable[..., object],
        arguments: Mapping[str, Any] | None = None,  # pickled
        *,
        deadline: float,  # seconds after which the job counts as hung
        # for "shim", the device that it shares with others; None for one of its own
        fence: fences.Fence | None = None,
    ) -> None:
        self._kind, self._job, self._arguments, self._deadline, self._fence = (
            kind,
            job,
            dict(arguments or {}),
            deadline,
            fence,
        )
        self._name = f"the job {job.__module__}:{job.__qualname__}"
        self._error: tuple[str, str, bool] | None = None  # class, text, whether it is bad input

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self._output = Path(
                undo.enter_context(tempfile.TemporaryDirectory(prefix="elastic-mbs-child-")),
                "output",
            )
            self._output.touch()
            environment = _LIBRARIES
            if self._kind == "shim":
                fence = (
                    self._fence
                    if self._fence is not None
                    else undo.enter_context(fences.Fence.create())
                )
                environment = _LIBRARIES | fences.environment(fence)
            self.connection, theirs = _SPAWN.Pipe()
            undo.callback(self.connection.close)
            self._process = _SPAWN.Process(
                target=_serve,
                args=(theirs, self._job, self._arguments, self._output, list(sys.path)),
            )
            # or it would start with the first child, and in its environment
            resource_tracker.ensure_running()
            with theirs, _surroundings(environment):
                self._process.start()
            undo.callback(self._process.join)
            undo.callback(self._process.kill)
            self.pid = self._process.pid or 0
            self._began = time.monotonic()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def __iter__(self) -> Iterator[Any]:
        return (message for _, message in _messages([self]))

    def send(self, message: Any) -> None:
        """End one `Line.receive` of the job."""
        self.connection.send(message)

    def kill(self) -> None:
        self._process.kill()

    def left(self) -> float:
        return self._began + self._deadline - time.monotonic()

    def receive(self) -> list[Any]:
        """Return the message that has come, if it was one.

        Raises:
            EOFError: the child has ended. OSError likewise.
        """
        # the messages of a process that has ended may be read later
        if self.left() < 0 and self._process.is_alive():
            raise self.give_up()
        kind, content = self.connection.recv()
        if kind == "error":
            self._error = content
        return [content] if kind == "message" else []

    def give_up(self) -> ChildError:
        """Ask for the stacks of its threads and kill it; return the error to raise."""
        if sys.platform != "win32":
            os.kill(self.pid, signal.SIGABRT)  # faulthandler answers it
            self._process.join(_GRACE)
        self._process.kill()
        self._process.join()
        return ChildError(
            f"{self._name} had not ended after {self._deadline:.0f} s and was killed",
            "hang",
            self._last_words(),
        )

    def check(self) -> None:
        """Wait for the end of a child that has closed its connection."""
        self._process.join(max(_GRACE, self.left()))
        code = self._process.exitcode
        if code is None:
            raise self.give_up()
        words = self._last_words()
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            raise ChildError(
                f"{self._name} was ended by {name}; its last line: {_last_line(words)}",
                f"crash by {name}",
                words,
            )
        if self._error is not None:
            error, text, bad_input = self._error
            raise (
                UsageError(text)
                if bad_input
                else ChildError(f"{self._name} ended by {error}: {text}", error, words)
            )
        if code:
            raise ChildError(
                f"{self._name} ended with exit code {code}; its last line: {_last_line(words)}",
                "unexpected exit",
                words,
            )

    def _last_words(self) -> str:
        return self._output.read_text(errors="replace")[-_LAST_WORDS:]


def _messages(children: Sequence[Child]) -> Iterator[tuple[int, Any]]:
    """Yield the messages of running children until the last has ended."""
    running: dict[Any, int] = {child.connection: index for index, child in enumerate(children)}
    while running:
        first = min((children[index] for index in running.values()), key=Child.left)
        ready = wait(list(running), timeout=max(0.0, first.left()))
        if not ready:
            raise first.give_up()
        for connection in ready:
            index = running[connection]
            try:
                messages = children[index].receive()
            except (EOFError, OSError):  # the latter where it was killed in the middle of a message
                del running[connection]
                children[index].check()
            else:
                yield from ((index, message) for message in messages)


@contextlib.contextmanager
def _surroundings(environment: Mapping[str, str]) -> Iterator[None]:
    """Give a new process its environment, and this copy of the tool first on its path.

    Another package may have the tool's name.
    """
    top = sys.modules[__package__.partition(".")[0]]
    path = [os.fspath(Path(top.__path__[0]).resolve().parent), *sys.path]
    with patch.dict(os.environ), patch.object(sys, "path", path):
        os.environ.pop(fences.VARIABLE, None)
        os.environ.update(environment)
        yield


def _serve(
    connection: Connection,
    job: Callable[..., object],
    arguments: dict[str, Any],
    output: Path,
    path: list[str],
) -> None:
    """Run the job, on the child's side.

    The job's output goes to a file, whose end is kept for the message of a crash.
    """
    sys.path[:] = path
    with output.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable()
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # POSIX only

        # a crash is reported, not written to the disk
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        job(Line(connection), **arguments)
    except Exception as error:
        traceback.print_exc()
        connection.send(
            ("error", (type(error).__name__, str(error), isinstance(error, UsageError)))
        )
        sys.exit(1)


def _last_line(words: str) -> str:
    """Return the job's own last line, or the one in which faulthandler names the fatal error."""
    own, fatal, stacks = words.partition("Fatal Python error:")
    lines = [line for line in own.splitlines() if line.strip()] or (fatal + stacks).splitlines()[:1]
    return lines[-1].strip() if lines else "nothing"
