"""Lines of calls without failures, which make up most of a run log, read many at a time.

One search finds all of a block of lines, and one sum in C takes a column of them. Parsing each line
would take ten times longer.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Facts, seconds, and three figures of memory; or the whole of another line. Empty is unknown.
Line = tuple[bytes, bytes, bytes, bytes, bytes, bytes]

_TEXT = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_FACTS = re.compile(
    rb',"key":(%b),"mode":"(\w+)","samples":(\d+),.*"micro_batch_size":(\d+),.*' % _TEXT
)
_SIZE = 18  # digits of a whole number; with more it is none


class CallFacts(NamedTuple):
    """The facts of a call, but for its time and memory."""

    key: str
    mode: str
    samples: int
    size: int  # micro-batch size at its end


class CallSums(NamedTuple):
    """The sums over some calls without failures."""

    number: int
    facts: dict[CallFacts, int]  # with the number of calls, in the order of the last call of each
    seconds: list[float]  # of each call that tells them
    peak: int | None  # most bytes of ours

    @classmethod
    def of(cls, lines: Sequence[Line]) -> CallSums:
        """Return the sums over these lines, of which there is one at least."""
        facts, seconds, *memory, _ = zip(*lines, strict=True)
        numbers = Counter(facts)
        latest = list(dict.fromkeys(reversed(facts)))
        return cls(
            len(lines),
            {_facts_of(each): numbers[each] for each in reversed(latest)},
            list(map(float, filter(None, seconds))),
            max(map(int, set().union(*memory) - {b""}), default=None),
        )


def search(run: str, lines: Sequence[bytes]) -> list[Line]:
    """Return the parts of each line that is one of a call without failures in this run.

    Args:
        run: the id of the run.
        lines: lines of a log, all of them with or all of them without their end.

    Returns:
        As many as there are lines.
    """
    text = (b"" if lines[0].endswith(b"\n") else b"\n").join(lines)
    found: list[Line] = _pattern(run).findall(text)
    if text.endswith(b"\n"):
        found.pop()  # the empty line after it
    if len(found) == len(lines):
        return found
    return [(b"", b"", b"", b"", b"", line) for line in lines]


def others(found: Sequence[Line]) -> Iterator[int]:
    """Yield the places of the lines that are others."""
    return (i for i, line in enumerate(found) if not line[0])


@functools.lru_cache(64)
def _facts_of(text: bytes) -> CallFacts:
    found = _FACTS.fullmatch(text)
    assert found is not None  # it is a part of `_pattern`
    key, mode, samples, size = found.groups()
    return CallFacts(json.loads(key), mode.decode(), int(samples), int(size))


@functools.lru_cache(64)
def _pattern(run: str) -> re.Pattern[bytes]:
    """Return the pattern of a line, as this version writes it."""
    count = rb"\d{1,%d}" % _SIZE
    figure = rb"(?:(%b)|null)" % count
    return re.compile(
        rb'^(?:\{"event":"CallDone","run":%b,"time":[\d.]{1,24},"t":[\d.]{1,24},"level":"\w+",'
        rb'"name":%b(,"key":%b,"mode":"\w+","samples":%b,"pieces":\d+,"size_before":\d+,'
        rb'"micro_batch_size":%b,"ooms":0,"replayed_samples":0),"seconds":(?:([\d.]+(?:e-\d+)?)|null),'
        rb'"seconds_lost":0\.0,"loss":[^,]*,"allocated":[^,]*,"reserved":%b,"peak_allocated":%b,'
        rb'"peak_reserved":%b,"free":[^}]*\}|(.*))$'
        % (re.escape(json.dumps(run).encode()), _TEXT, _TEXT, count, count, figure, figure, figure),
        re.MULTILINE,
    )
