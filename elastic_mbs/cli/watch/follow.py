"""The runs of a log that grows."""

from __future__ import annotations

from pathlib import Path

from elastic_mbs.cli.watch.state import State
from elastic_mbs.errors import UsageError
from elastic_mbs.sinks.run_log_reader import Reader


class Follower:
    """Reads the lines that have been added to a log; one that was cut or replaced is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self.current: State | None = None  # the run that has had the last line
        self._states: dict[str, State] = {}
        self._reader = Reader()
        self._inode, self._offset = inode, 0
        self._rest = b""  # a line without its end

    def read(self) -> None:
        """Takes the new lines that are whole, without waiting for any.

        Raises:
            UsageError: the file cannot be read, is gone, or is not a run log; the message is one line.
        """
        try:
            now = self._path.stat()
            if now.st_ino != self._inode or now.st_size < self._offset:
                self._begin(now.st_ino)
            with self._path.open("rb") as file:
                file.seek(self._offset)
                *lines, self._rest = (self._rest + file.read()).split(b"\n")
                self._offset = file.tell()
            for line in lines:
                self._take(line)
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror or error}") from error
        except UsageError as error:
            raise UsageError(f"{self._path}: {error}") from error

    def _take(self, line: bytes) -> None:
        run = self._reader.feed(line)
        if run is None:
            return
        state = self.current = self._states.setdefault(run.id, State())
        state.header = run.header
        for entry in run.entries:
            state.add(entry)
        run.entries.clear()
