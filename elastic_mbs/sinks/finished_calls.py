"""Lines of finished calls, which make up most of a run log, read many at a time.

One search finds all of a block of lines, in exactly the form in which this version writes them, and
its parts are read as JSON, each column at once. Parsing each line would take ten times longer. A
line of any other form is left to who reads JSON: nothing is guessed.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, NoReturn

# The whole line; facts, seconds, seconds lost, and three figures of memory, each as it is written.
# Without facts it is another line.
Line = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]

_SIZE = 18  # digits of a whole number; with more it may be none
_WHOLE = rb"(?:[1-9]\d{0,%d}+|0|null)" % (_SIZE - 1)
_TIME = rb"[1-9]\d{0,10}+\.\d++"
_LOSS = rb'(?:-?+(?:0|[1-9]\d{0,%d}+)(?:\.\d++)?+(?:e[-+]\d++)?+|null|"(?:NaN|-?Infinity)")' % (
    _SIZE - 1
)
# Facts, seconds and figures are matched up to the next quote or comma alone, and read as JSON.
_PATTERN = (
    rb'^(\{"event":"CallDone","run":%%b,"time":%(time)b,"t":%(time)b,"level":"DEBUG",'
    rb'("name":"[^"]*+","key":"[^"]*+","mode":"[^"]*+","samples":[^,]*+,"pieces":[^,]*+,'
    rb'"size_before":[^,]*+,"micro_batch_size":[^,]*+,"ooms":[^,]*+,"replayed_samples":[^,]*+),'
    rb'"seconds":([^,]*+),"seconds_lost":([^,]*+),"loss":%(loss)b,"allocated":%(whole)b,'
    rb'"reserved":([^,]*+),"peak_allocated":([^,]*+),"peak_reserved":([^,]*+),"free":%(whole)b,'
    rb'"held_by_others":%(whole)b,"total":%(whole)b,"ended":%(time)b,"graphs":\d\}|.*+)$'
) % {b"time": _TIME, b"loss": _LOSS, b"whole": _WHOLE}


class CallFacts(NamedTuple):
    """The facts of a call, but for its time and memory."""

    key: str
    mode: str
    samples: int
    size: int  # micro-batch size at its end
    ooms: int
    replayed: int  # samples


class CallSums(NamedTuple):
    """The sums over some calls."""

    facts: dict[CallFacts, int]  # with the number of calls, in the order of the last call of each
    seconds: list[float]  # of each call that tells them
    lost: list[tuple[float, int]]  # seconds in failed attempts, with a number of calls
    peak: int | None  # most bytes of ours

    @classmethod
    def of(cls, lines: Sequence[Line]) -> CallSums:
        """Return the sums over these lines of calls, of which there is one at least.

        Raises:
            ValueError: not all of them are for certain as this version writes them.
        """
        _, facts, seconds, lost, *memory = zip(*lines, strict=True)
        numbers, losses = Counter(reversed(facts)), Counter(lost)  # few differ
        sums: dict[CallFacts, int] = {}
        for each, number in reversed(numbers.items()):
            known = _facts_of(each)  # the same for other names of the runtime
            sums[known] = sums.pop(known, 0) + number
        return cls(
            sums,
            _known(_values(seconds, float, type(None))),
            list(zip(_values(losses, float), losses.values(), strict=True)),
            max(_known(_values(set().union(*memory), int, type(None))), default=None),
        )


def search(run: str, text: bytes) -> list[Line]:
    """Return the parts of each line of a text: those of the calls of this run, and other lines.

    Args:
        run: the id of the run.
        text: lines of a log, the last one with or without its end.
    """
    found: list[Line] = _pattern(run).findall(text)
    if text.endswith(b"\n"):
        found.pop()  # nothing is behind it
    return found


def other(line: bytes) -> Line:
    """Return a line that is not known to be a call's."""
    return line, b"", b"", b"", b"", b"", b""


def may_be_call(line: bytes) -> bool:
    """Return whether JSON can read the line of another form as that of a finished call.

    The name of the event is in it as it is, with escapes, or in an encoding with null bytes.
    """
    return b"CallDone" in line or b"\\" in line or b"\0" in line


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _refuse_two_lines(text: bytes) -> None:
    """Raise a ValueError where an end of line would pass for white space in JSON."""
    if b"\n" in text:
        raise ValueError("two lines were taken for one")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _values(tokens: Collection[bytes], *kinds: type) -> list[Any]:
    """Return the JSON value of each token, without a comma in it.

    Raises:
        ValueError: one is none of these kinds, or a whole number out of range.
    """
    text = b",".join(tokens)
    _refuse_two_lines(text)
    values: list[Any] = _DECODER.decode((b"[%b]" % text).decode())
    if len(values) != len(tokens) or not set(map(type, values)) <= set(kinds):
        raise ValueError("not one value of the wanted kind for each token")
    if int in kinds and max(map(abs, _known(values)), default=0) >= 10**_SIZE:
        raise ValueError("a number is out of range")
    return values


def _known(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None]


@functools.lru_cache(256)
def _facts_of(text: bytes) -> CallFacts:
    """Return the facts in this part of a line; a ValueError where it has others."""
    _refuse_two_lines(text)
    _, key, mode, *numbers = values = list(_DECODER.decode((b"{%b}" % text).decode()).values())
    if [type(value) for value in values] != 3 * [str] + 6 * [int]:
        raise ValueError("these are not the facts of a call")
    if max(map(abs, numbers)) >= 10**_SIZE:
        raise ValueError("a number is out of range")
    samples, _, _, size, ooms, replayed = numbers
    return CallFacts(key, mode, samples, size, ooms, replayed)


@functools.lru_cache(64)
def _pattern(run: str) -> re.Pattern[bytes]:
    """Return the pattern of a line, as this version writes it."""
    return re.compile(_PATTERN % re.escape(json.dumps(run).encode()), re.MULTILINE)
