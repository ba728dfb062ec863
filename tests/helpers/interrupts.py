"""Ctrl-C at a chosen line of this package."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupt_at(start: str, file: str = "", times: int = 1) -> Iterator[None]:
    """Ctrl-C in this package, before the line that starts so; where it is run several times, before the last of them."""
    seen = 0

    def tracer(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        if "elastic_mbs" not in frame.f_code.co_filename or not frame.f_code.co_filename.endswith(file):
            return None
        if event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith(start):
            seen += 1
            if seen == times:
                sys.settrace(None)
                raise KeyboardInterrupt
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)
