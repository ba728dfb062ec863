"""The lines of a file that grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from elastic_mbs.errors import UsageError


class Follower:
    """Gives the lines that have been added since it was last asked.

    A line counts once it has its end. A file that was cut, or replaced by another of the same name, is read from its start.

    Args:
        path: of a file that exists.

    Attributes:
        restarts: how often the file was cut or replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        self.restarts = 0

    def lines(self) -> list[bytes]:
        """The new lines, without waiting for any.

        Raises:
            UsageError: the file cannot be read, or is gone; the message is one line.
        """
        try:
            file = self._opened()
            *lines, self._rest = (self._rest + file.read()).split(b"\n")
        except OSError as error:
            self.close()
            raise UsageError(f"{self._path}: {error.strerror or error}") from error
        return lines

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is not None:
            here, there = os.fstat(self._file.fileno()), self._path.stat()
            if (here.st_ino, here.st_dev) == (there.st_ino, there.st_dev) and there.st_size >= self._file.tell():
                return self._file
            self.close()
            self._rest = b""
            self.restarts += 1
        self._file = self._path.open("rb")
        return self._file
