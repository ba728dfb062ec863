"""A line that tells how far a run is."""

from __future__ import annotations

import shutil
import sys
import time


class Progress:
    """A line that is rewritten on a terminal; where the output is piped, one that stays, every so many seconds."""

    def __init__(self, piped: float = 10.0, live: float = 0.0) -> None:
        self._live = sys.stdout.isatty()
        self._every = live if self._live else piped
        self._told = time.monotonic()

    def tell(self, line: str) -> None:
        """Prints it, unless the one before is too fresh."""
        if time.monotonic() - self._told >= self._every:
            self._told = time.monotonic()
            width = shutil.get_terminal_size().columns - 1  # a longer line would stay on the row above
            print(f"\r\x1b[K{line[:width]}" if self._live else line, end="" if self._live else "\n", flush=True)

    def clear(self) -> None:
        """Makes room for a line that stays."""
        if self._live:
            print("\r\x1b[K", end="")
