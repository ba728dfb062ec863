"""Where processes wait for each other, in words that are files: it needs no memory of the device and no world in common."""

from __future__ import annotations

import time
from pathlib import Path

PATIENCE = 0.02


class Meeting:
    """A folder that some processes know of.

    Args:
        folder: exists as long as they run.
        timeout: seconds after which a word is not waited for any more: whoever was to give it is gone.
    """

    def __init__(self, folder: Path, timeout: float = 890.0) -> None:
        self._folder = folder
        self._timeout = timeout

    def say(self, word: str) -> None:
        """Lets all who wait for it go on, now and later."""
        (self._folder / word).touch()

    def wait(self, word: str) -> None:
        """Waits until it is said.

        Raises:
            TimeoutError: it was not.
        """
        until = time.monotonic() + self._timeout
        while not (self._folder / word).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"nobody said {word!r} in {self._timeout:.0f} s")
            time.sleep(PATIENCE)
