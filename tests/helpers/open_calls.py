"""A call that a test leaves open."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_mbs.engine.misuse import leave_call, running_call


def close_what_is_open() -> Iterator[None]:
    """A call that one test leaves open must not be met by the next."""
    yield
    call = running_call()
    if call is not None:
        call.abort(RuntimeError("left open by a test"))
        leave_call(call)
