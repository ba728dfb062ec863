"""Out-of-memory errors: recognising them, and releasing the memory of a failed attempt.

A verdict holds strings and numbers only: an exception that is kept keeps its frames, and those
every tensor of the failed attempt.
"""

from __future__ import annotations

import enum
import errno
import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import torch

from elastic_mbs.device import BUILT_IN, Accelerator, accelerator_of
from elastic_mbs.errors import (
    ElasticMBSError,
    MicroBatchFloorError,
    RecoveryError,
    UnsupportedError,
)
from elastic_mbs.events import logger
from elastic_mbs.memory import oom_patterns as patterns

T = TypeVar("T")

_MESSAGE_LENGTH = 300  # characters of an error's first line that are kept
# characters of an error's text that are looked at: C++ stacks make some of them very long
_TEXT_LENGTH = 8192
_CHAIN_LENGTH = 32  # links of a chain of exceptions that are followed
_OUT_OF_MEMORY_CODE = 2  # cudaErrorMemoryAllocation and hipErrorOutOfMemory
# not enough memory, out of memory, the paging file is too small
_WINDOWS_CODES = frozenset({8, 14, 1455})

_TOO_MUCH = 1 << 50  # bytes, more than any address space of 47 bits has

_recognised: set[str] = set()  # types of devices that have shown their error in this process

# A mistake inside a handler is a mistake, not a wrapper of the error that was being handled.
_MISTAKES: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    EOFError,
    ImportError,
    LookupError,
)
_MISTAKES += (
    NameError,
    NotImplementedError,
    RecursionError,
    ReferenceError,
    StopAsyncIteration,
    StopIteration,
    SyntaxError,
    TypeError,
)
_MISTAKES += (ValueError, Warning)


class Kind(enum.Enum):
    """The sort of an error, which decides what may be done about it.

    In order of the caution it asks for; docs/internals/errors.md has the tables.
    """

    # a device's caching allocator refused a request, synchronously: shrink and replay
    ALLOCATOR = "allocator"
    HOST = "host"  # the host's allocator did, or Python's or C++'s own heap
    # a library (cuBLAS, cuDNN, cuSOLVER, hipBLAS) could not allocate its workspace
    LIBRARY = "library"
    # the device's runtime or driver ran out, perhaps in an earlier call: `probe` the device first
    RUNTIME = "runtime"
    USER = "user"  # the user's `is_oom` said so
    # often an out-of-memory in disguise, sometimes a bug: worth one smaller try, with a warning;
    # then it is raised
    MASKED = "masked"
    # allocator, device or communicator cannot be trusted any more: never replay
    POISONED = "poisoned"


# in `oom_patterns` each has a pattern of its name
_BY_TEXT = (Kind.ALLOCATOR, Kind.HOST, Kind.LIBRARY, Kind.RUNTIME, Kind.MASKED)


@dataclass(frozen=True)
class Verdict:
    """The answer of `classify`; strings and numbers only."""

    kind: Kind
    message: str  # first line of its text, at most 300 characters
    requested: int | None = None  # bytes of the allocation that failed, where the text has them
    held: int | None = None  # bytes of this process when it failed, where the text has them

    @property
    def synchronous(self) -> bool:
        """True where the operation that raised is the one that failed.

        Everything noted before it holds then.
        """
        return self.kind in (Kind.ALLOCATOR, Kind.HOST, Kind.LIBRARY)


def classify(
    exc: BaseException, is_oom: Callable[[BaseException], bool] | None = None
) -> Verdict | None:
    """Return the verdict on an error that is, or wraps, out-of-memory; None for any other.

    The type decides first, then the error code, then the text. Texts count for RuntimeError,
    MemoryError and OSError only (a ValueError is the user's). Followed are `raise … from …`,
    torch.compile's `inner_exception`, and an error that a handler raised in place of the one it was
    handling. Not followed are `from None`, a mistake made inside a handler (TypeError, …), and an
    error that was being handled already when the caller's frame was entered: it did not fail now.
    Of this package's own errors only MicroBatchFloorError is out-of-memory.

    Args:
        exc: the exception, as caught by the frame whose code is to be retried.
        is_oom: the user's own predicate: it can add errors, not take away any. It is given `exc`
            itself, and its errors pass through.
    """
    if not isinstance(exc, Exception) or (
        isinstance(exc, ElasticMBSError) and not isinstance(exc, MicroBatchFloorError)
    ):
        return None
    verdict = _classify(exc, set())
    if is_oom is not None and (verdict is None or verdict.kind is Kind.MASKED) and is_oom(exc):
        return _verdict(Kind.USER, exc)
    return verdict


def release(*, devices: Iterable[torch.device], thorough: bool) -> None:
    """Release the memory of a failed attempt. Never raises.

    Call it outside of any `except` block, after the attempt's references were dropped.

    After a first failure (not `thorough`) only young reference cycles can still hold the attempt's
    memory, and the allocator has emptied its own cache before it raised. Later, or at the floor,
    everything goes: all cycles (0.1 s and more), an error that an interactive shell has pinned, and
    the caches.
    """
    if not thorough:
        gc.collect(1)
        return
    pinned = getattr(sys, "last_value", None)  # by an interactive shell
    # other errors are there to be looked at
    if isinstance(pinned, BaseException) and classify(pinned) is not None:
        clear_traceback(pinned)
    gc.collect()
    empty_caches(devices)


def retry(
    what: str,
    operation: Callable[[], T],
    devices: Iterable[torch.device],
    is_oom: Callable[[BaseException], bool] | None = None,
    *,
    error: type[RecoveryError] = MicroBatchFloorError,
    passes: Callable[[], bool] = lambda: False,
) -> T:
    """Run bookkeeping that can run out of memory itself, releasing more before each of two retries.

    `operation` is done once it returns; after an error in the middle a second call goes on where
    the first one stopped.

    Args:
        what: the operation in words, for the error.
        operation: the bookkeeping.
        devices: devices whose memory is released.
        is_oom: as for `classify`.
        error: the class of the error.
        passes: returns whether the error that is being handled is the user's own, and passes.

    Raises:
        RecoveryError: there is no room, as an `error`.
    """
    for attempt in range(3):
        try:
            return operation()
        except Exception as caught:
            verdict = classify(caught, is_oom)
            # a masked one says nothing of room by itself
            if verdict is None or verdict.kind is Kind.MASKED or passes():
                raise
            message = verdict.message
        if not verdict.synchronous:  # it may be an earlier operation that failed, and has no result
            break
        release(devices=devices, thorough=attempt > 0)
    raise error(f"there is no room to {what}: {message}")


def empty_caches(devices: Iterable[torch.device]) -> None:
    """Give unused memory of the allocators back to their devices. Never raises."""
    found = {device.type: accelerator_of(device) for device in devices}  # one cache for each type
    for backend, accelerator in sorted(found.items()):
        try:
            if accelerator is not None:
                accelerator.empty_cache()
        except Exception as error:
            # it can itself run out of memory, or find its device lost; the replay will show it
            logger.debug("empty_cache on %s: %s", backend, _first_line(error))


def refuse_unrecognised(
    devices: Iterable[torch.device], is_oom: Callable[[BaseException], bool] | None = None
) -> None:
    """Refuse a device whose out-of-memory error would not be recognised as one.

    torch's own devices are known. Any other one is asked, once in a process, for more memory than
    a device has.

    Raises:
        UnsupportedError: it raises something else, or nothing.
    """
    for device in devices:
        if device.type in BUILT_IN or device.type in _recognised:
            continue
        said = _out_of_memory_of(device, is_oom)
        if said is not None:
            raise UnsupportedError(
                f"device {str(device)!r}: running out of memory cannot be recognised there: asked "
                f"for {_TOO_MUCH} bytes, it {said}. If this is how it says so, pass "
                "recovery=RecoveryOptions(is_oom=...), a function that recognises the error; else "
                "train on another device, or without recovery: ElasticMBS(..., enabled=False)"
            )
        if is_oom is None:
            _recognised.add(device.type)


def _out_of_memory_of(
    device: torch.device, is_oom: Callable[[BaseException], bool] | None
) -> str | None:
    """Return a device's answer to too large a request, in words; None where it is recognised."""
    try:
        torch.empty(_TOO_MUCH, dtype=torch.uint8, device=device)
    except Exception as error:
        verdict = classify(error, is_oom)
        if verdict is not None and verdict.kind not in (Kind.MASKED, Kind.POISONED):
            return None
        return f"raised {type(error).__name__}: {_first_line(error)}"
    return "raised nothing"


def clear_traceback(exc: BaseException) -> None:
    """Drop the local variables that an exception holds through its traceback.

    Those of its members, and of every exception that it is chained to, go as well.
    """
    pending, seen = [exc], {id(exc)}
    while pending:
        current = pending.pop()
        traceback.clear_frames(current.__traceback__)
        members = current.exceptions if isinstance(current, BaseExceptionGroup) else ()
        for link in (current.__cause__, current.__context__, *members):
            if link is not None and id(link) not in seen:
                seen.add(id(link))
                pending.append(link)


def probe(device: torch.device) -> str | None:
    """Return the first line of the error that a poisoned device raises; None if it is healthy.

    For use after an error that may have been asynchronous: it synchronises the device and runs one
    tiny addition, twice at most, because the first synchronisation may report an older error. A
    device that is merely full is healthy.
    """
    accelerator = accelerator_of(device)
    if accelerator is None:
        return None
    message = None
    for _ in range(2):
        try:
            _exercise(accelerator)
            return None
        except Exception as error:  # whatever it is, it is the answer
            verdict = classify(error)
            if verdict is not None and verdict.synchronous:
                return None
            message = _first_line(error)
            if verdict is None or verdict.kind is not Kind.RUNTIME:
                break
    return message


def _exercise(accelerator: Accelerator) -> None:
    accelerator.synchronize()
    ones = torch.ones(8, device=accelerator.device)
    if (ones + ones).sum().item() != 16:
        raise RuntimeError(f"{accelerator.device} adds 1 and 1 to something else than 2")


def _classify(exc: Exception, seen: set[int]) -> Verdict | None:
    """Judge an exception with all that it wraps; `seen` holds the ids of those that lead to it."""
    judged = [
        _members(link, seen) if isinstance(link, ExceptionGroup) else _verdict(_kind(link), link)
        for link in _links(exc, seen)
    ]
    found = [verdict for verdict in judged if verdict is not None]
    # a poisoned one decides, and one that is certain comes before one that is masked
    return min(
        found,
        key=lambda verdict: (verdict.kind is not Kind.POISONED, verdict.kind is Kind.MASKED),
        default=None,
    )


def _members(group: ExceptionGroup[Exception], seen: set[int]) -> Verdict | None:
    """Return the verdict on the member that asks for the most caution; None unless all have one."""
    found = []
    for member in group.exceptions:
        verdict = _classify(member, set(seen))  # members may share a cause
        if verdict is None:
            return None
        found.append(verdict)
    return max(found, key=lambda verdict: list(Kind).index(verdict.kind))


def _links(exc: Exception, seen: set[int]) -> Iterator[Exception]:
    """Yield the exception, and those that it wraps, from the outermost inwards."""
    current: BaseException | None = exc
    own = exc.__traceback__.tb_frame if exc.__traceback__ is not None else None
    while isinstance(current, Exception) and id(current) not in seen and len(seen) < _CHAIN_LENGTH:
        seen.add(id(current))
        yield current
        if isinstance(current, AssertionError | ExceptionGroup) or patterns.OTHER.search(
            _text(current)
        ):
            return
        # torch.compile raises `from None`, with the original as an attribute
        inner = (
            getattr(current, "inner_exception", None)
            if type(current).__module__.startswith("torch.")
            else None
        )
        current = current.__cause__ or inner or _replaced(current, own)


def _replaced(exc: Exception, own: FrameType | None) -> BaseException | None:
    """Return the exception in whose handler `exc` was raised, if the guarded code has that handler.

    A traceback starts at the frame that caught the exception. If that frame is one of those that
    `exc` has come through, below the one that has caught `exc` (`own`), the handler was inside.
    Otherwise it was further out, and was running before the guarded code began.
    """
    context = exc.__context__
    if (
        context is None
        or exc.__suppress_context__
        or isinstance(exc, _MISTAKES)
        or context.__traceback__ is None
    ):
        return None
    handler = context.__traceback__.tb_frame
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    return context if handler is not own and handler in frames else None


def _verdict(kind: Kind | None, exc: Exception) -> Verdict | None:
    return (
        None
        if kind is None
        else Verdict(
            kind,
            _first_line(exc),
            patterns.requested_bytes(_text(exc)),
            patterns.held_bytes(_text(exc)),
        )
    )


def _kind(exc: Exception) -> Kind | None:
    if not isinstance(exc, RuntimeError | MemoryError | OSError):
        return None
    text = _text(exc)
    if patterns.POISONED.search(text):
        return Kind.POISONED
    if isinstance(exc, torch.OutOfMemoryError):
        return Kind.ALLOCATOR
    refused = isinstance(exc, OSError) and (
        exc.errno == errno.ENOMEM or getattr(exc, "winerror", None) in _WINDOWS_CODES
    )
    if refused or isinstance(exc, MemoryError):
        return Kind.HOST
    if (
        isinstance(exc, torch.AcceleratorError)
        and (code := getattr(exc, "error_code", None)) is not None
    ):
        return Kind.RUNTIME if code == _OUT_OF_MEMORY_CODE else None
    return next((kind for kind in _BY_TEXT if getattr(patterns, kind.name).search(text)), None)


def _text(exc: BaseException) -> str:
    try:
        return str(exc)[:_TEXT_LENGTH]
    except Exception:  # a user's class whose __str__ fails must not hide the error itself
        return ""


def _first_line(exc: BaseException) -> str:
    return next(
        (line.strip() for line in _text(exc).splitlines() if line.strip()), type(exc).__name__
    )[:_MESSAGE_LENGTH]
