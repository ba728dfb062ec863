"""The lines of a file that grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from elastic_mbs.errors import UsageError


class Follower:
    """Reads the lines that have been added to a file; one that was cut, or replaced by another of the same name, is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None  # kept open, or a new file could get the inode of one that was deleted
        self._rest = b""  # a line without its end
        self.restarts = 0  # how often the file was cut or replaced

    def lines(self) -> list[bytes]:
        """The new lines that are whole, without waiting for any.

        Raises:
            UsageError: the file cannot be read, or is gone; the message is one line.
        """
        try:
            if self._file is not None and self._is_another(self._file):
                self.close()
                self._rest = b""
                self.restarts += 1
            self._file = self._file or self._path.open("rb")
            *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        except OSError as error:
            self.close()
            raise UsageError(f"{self._path}: {error.strerror or error}") from error
        return lines

    def _is_another(self, file: BinaryIO) -> bool:
        ours, now = os.fstat(file.fileno()), self._path.stat()
        return (ours.st_ino, ours.st_dev) != (now.st_ino, now.st_dev) or now.st_size < file.tell()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
