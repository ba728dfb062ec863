"""Runs a job in a process of its own, in the environment that a world needs, and hands on what it says.

```
   parent                                child: job.py
   which function, its arguments ─────►  imports it, calls it with `emit`
                ◄───── a line of JSON ─  emit({"step": 1, …})
   over time: stack asked for, killed    killed by a signal, ended by an error: told apart
```

What the job prints goes to its standard error, which is kept for the message of a crash.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from elastic_mbs.errors import UsageError

from . import fence as fences

__all__ = ["Child", "ChildError", "Crashed", "Emit", "Failed", "Hung", "run_child", "run_children"]

Emit = Callable[[dict[str, Any]], None]
"""What a job is given to say something: a dict that JSON can hold."""
Job = Callable[..., object]

_LAST_WORDS = 4000  # characters of a child's standard error that are kept
_GRACE = 5.0  # seconds for the stack of one that hangs, and for the exit of one that has closed its output
_PROGRAM = Path(__file__).with_name("job.py")
_TOP = __package__.rpartition(".")[0]  # `stress`, or `elastic_mbs.stress` where that is what this copy is called


class ChildError(RuntimeError):
    """A child did not end as it should.

    Attributes:
        last_words: the end of what it wrote to its standard error.
    """

    def __init__(self, message: str, last_words: str = "") -> None:
        super().__init__(message)
        self.last_words = last_words


class Crashed(ChildError):
    """A signal has ended it.

    Attributes:
        signal: the signal's name, such as "SIGSEGV".
    """

    def __init__(self, message: str, last_words: str, name: str) -> None:
        super().__init__(message, last_words)
        self.signal = name


class Hung(ChildError):
    """It had not ended at its deadline, and was killed; `last_words` ends with the stacks of its threads."""


class Failed(ChildError):
    """It has ended by an exception or an exit code of its own.

    Attributes:
        exit_code: its exit code.
        error: name of the exception's class, where there was one.
    """

    def __init__(self, message: str, last_words: str, exit_code: int, error: str | None) -> None:
        super().__init__(message, last_words)
        self.exit_code = exit_code
        self.error = error


def run_child(
    kind: str,
    job: Job | str,
    arguments: Mapping[str, Any] | None = None,
    *,
    deadline: float,
    fence: fences.Fence | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Runs a job in a world of this kind and yields what it emits, as it comes.

    Args:
        kind: the world that the job will open; decides on the environment.
        job: called as `job(emit, **arguments)` in the child. A function that can be imported there, or its name as "module:function"; a module whose
            name begins with a dot is looked up in the stress tool's package, as in ".scenarios.job:main".
        arguments: whatever JSON can hold.
        deadline: seconds until the job is taken for hung.
        fence: for "shim", the device that it shares with others; None for one of its own.
        environment: more variables.

    Raises:
        UsageError: the job has raised one, or cannot be started here.
        Crashed: it was ended by a signal.
        Hung: it had not ended at the deadline.
        Failed: it has ended by any other exception, or by an exit code.
    """
    with Child(kind, job, arguments, deadline=deadline, fence=fence, environment=environment) as child:
        yield from child


def run_children(children: Sequence[Child]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Runs several at the same time, and yields what they emit with the index of the one that does.

    Raises:
        ChildError: one has not ended as it should; the others are ended then.
        UsageError: as `run_child`.
    """
    lines = queue.SimpleQueue[tuple[Child, str | None]]()
    with contextlib.ExitStack() as running:
        for child in children:
            running.enter_context(child).send_to(lines)
        yield from _messages(lines, {child: index for index, child in enumerate(children)})


class Child:
    """One process. A context manager: it runs inside the block and is gone after it. Iterate over it to get what it emits.

    Args:
        kind, job, arguments, deadline, fence, environment: as for `run_child`.
    """

    def __init__(
        self,
        kind: str,
        job: Job | str,
        arguments: Mapping[str, Any] | None = None,
        *,
        deadline: float,
        fence: fences.Fence | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._kind = kind
        self._order = json.dumps({"job": name_of(job), "package": _where(), "arguments": dict(arguments or {})})
        self._deadline = deadline
        self._fence = fence
        self._more = dict(environment or {})
        self._undo = contextlib.ExitStack()
        self._began = 0.0
        self._process: subprocess.Popen[str] | None = None
        self._error: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        """Starts it.

        Raises:
            UsageError: the kind's environment cannot be had here.
        """
        with contextlib.ExitStack() as undo:
            self._stderr: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", os.fspath(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                env=self._environment(undo),
            )
            undo.callback(self._end)
            self._began = time.monotonic()
            self._undo = undo.pop_all()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as order:  # one that dies at once is told of below
            order.write(self._order)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Kills it if it is still there."""
        self._undo.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """What it emits, as it comes; raises as `run_child` does."""
        lines = queue.SimpleQueue[tuple[Child, str | None]]()
        self.send_to(lines)
        return (message for _, message in _messages(lines, {self: 0}))

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Ends it, as `kill -9` does."""
        assert self._process is not None
        self._process.kill()

    def send_to(self, lines: queue.SimpleQueue[tuple[Child, str | None]]) -> None:
        """Has a thread put each line of its output there, and None at the end."""
        threading.Thread(target=self._read, args=(lines,), name="child-output", daemon=True).start()

    def left(self) -> float:
        """Seconds until the deadline."""
        return self._began + self._deadline - time.monotonic()

    def overdue(self) -> bool:
        """Whether it is still running after its deadline. One that has ended may be listened to at leisure."""
        assert self._process is not None
        return self.left() < 0 and self._process.poll() is None

    def message_in(self, line: str) -> dict[str, Any] | None:
        """What a line of its output holds; None for one that only says by which error it ends."""
        try:
            said = json.loads(line)
        except json.JSONDecodeError:  # it died in the middle of a line
            return None
        self._error = said.get("error")
        message: dict[str, Any] | None = said.get("message")
        return message

    def give_up(self) -> Hung:
        """Asks for the stacks of its threads and kills it; returns the error to raise."""
        assert self._process is not None
        if sys.platform != "win32":
            self._process.send_signal(signal.SIGABRT)  # faulthandler answers it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
        self._process.kill()
        self._process.wait()
        return Hung(f"the job {self._name} had not ended after {self._deadline:.0f} s and was killed", self._last_words())

    def check(self) -> None:
        """Waits for the end of one that has closed its output.

        Raises:
            ChildError: it did not end as it should.
            UsageError: the job has raised one.
        """
        assert self._process is not None
        try:
            code = self._process.wait(max(_GRACE, self.left()))
        except subprocess.TimeoutExpired:
            raise self.give_up() from None
        words = self._last_words()
        last_line = _last_line(words)
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            raise Crashed(f"the job {self._name} was ended by {name}; its last line: {last_line}", words, name)
        if self._error is not None and self._error["bad_input"]:
            raise UsageError(self._error["text"])
        if self._error is not None:
            raise Failed(f"the job {self._name} ended by {self._error['type']}: {self._error['text']}", words, code, self._error["type"])
        if code:
            raise Failed(f"the job {self._name} ended with exit code {code}; its last line: {last_line}", words, code, None)

    @property
    def _name(self) -> str:
        name: str = json.loads(self._order)["job"]
        return name

    def _environment(self, undo: contextlib.ExitStack) -> dict[str, str]:
        # what can be imported here can be imported there, and is the same copy
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path if not folder or Path(folder).exists())
        # MKL keeps the buffers that it frees, some 27 MB on one processor and next to none on another, and the process limit counts what is mapped
        libraries = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MKL_DISABLE_FAST_MM": "1"}
        environment = {**os.environ, **libraries, "PYTHONPATH": path}
        environment.pop(fences.VARIABLE, None)
        if self._kind == "shim":
            fence = self._fence if self._fence is not None else undo.enter_context(fences.Fence.create())
            environment.update(fences.environment(fence))
        return environment | self._more

    def _read(self, lines: queue.SimpleQueue[tuple[Child, str | None]]) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed, since nobody is interested any more
            for line in self._process.stdout:
                lines.put((self, line))
        lines.put((self, None))

    def _last_words(self) -> str:
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _LAST_WORDS))
        return self._stderr.read().decode(errors="replace")

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _where() -> tuple[str, str]:
    """Name and folder of the package that the tool is in: another one of that name may come first on the path, beside the user's model for one."""
    top = _TOP.partition(".")[0]
    return top, os.path.abspath(sys.modules[top].__path__[0])


def name_of(job: Job | str) -> str:
    """A job's name as "module:function", by which the child finds it.

    Raises:
        UsageError: it has no name that can be imported there.
    """
    if isinstance(job, str):
        module, colon, function = job.partition(":")
        if not (module and colon and function):
            raise UsageError(f"the job {job!r} is not written as module:function")
        return (_TOP + job) if job.startswith(".") else job
    module, name = getattr(job, "__module__", "__main__"), getattr(job, "__qualname__", "<lambda>")
    if module == "__main__" or "<" in name:
        raise UsageError(f"the job {module}.{name} cannot be imported in another process: make it a function at the top of a module")
    return f"{module}:{name}"


def _last_line(words: str) -> str:
    """The last line that the job itself has written, or the one in which faulthandler names what ended it."""
    own, fatal, stacks = words.partition("Fatal Python error:")
    lines = [line for line in own.splitlines() if line.strip()] or (fatal + stacks).splitlines()[:1]
    return lines[-1].strip() if lines else "nothing"


def _messages(lines: queue.SimpleQueue[tuple[Child, str | None]], running: dict[Child, int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """What comes from the children in `running` until the last has ended."""
    running = dict(running)
    while running:
        first = min(running, key=Child.left)
        try:
            child, line = lines.get(timeout=max(0.0, first.left()))
        except queue.Empty:
            raise first.give_up() from None
        if child.overdue():
            raise child.give_up()
        if line is None:
            running.pop(child)
            child.check()
            continue
        message = child.message_in(line)
        if message is not None:
            yield running[child], message
