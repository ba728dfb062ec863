"""Python's and numpy's global random streams, read in full only where they can have moved.

Both make an object of each of 624 words when they are asked for their state, as every call does:
45 µs for the two. A copy of the memory that the words lie in takes 2. As long as it is the same as
at the latest read in full, so is the state.

A stream keeps one number of a pair of normal ones beside the words: Python's in an attribute, and
numpy's in the memory of the stream. That the memory tells of every draw is tried out, on streams
made for it. Where it does not, every read is one in full.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

_HEADER = object.__basicsize__  # the count of references and the class
_STATE = 624 * 4 + 4  # bytes of numpy's words and of the position among them

Look = Callable[[], object]
"""Returns an object to compare, with the bytes of a stream now; None where they are not known."""


class HostStream:
    """A global random stream of the host's.

    Attributes:
        set_state: puts the stream back to a state.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        set_state: Callable[[Any], object],
        memory: Look,
    ) -> None:
        """Take over a stream.

        Args:
            read: returns the state.
            set_state: puts a state back.
            memory: looks at the bytes that hold the state.
        """
        self.set_state = set_state
        self._read = read
        self._memory = memory
        self._latest: tuple[object, Any] | None = None  # memory and state at the latest read

    def get_state(self) -> Any:
        """Return the state, the same object as the last time where nothing was drawn since."""
        memory = self._memory()
        if memory is None:
            return self._read()
        if self._latest is None or self._latest[0] != memory:
            self._latest = memory, self._read()
        return self._latest[1]


def pythons_stream() -> HostStream:
    """Return the stream of the functions of `random`."""
    memory = memory_of_python(random.getstate.__self__) if python_tells() else _unknown  # type: ignore[attr-defined]  # it is a method
    return HostStream(random.getstate, random.setstate, memory)


def numpys_stream() -> HostStream:
    """Return the stream of the functions of `numpy.random`, which is imported."""
    numpy: Any = importlib.import_module("numpy.random")
    read = partial(numpy.get_state, legacy=False)
    memory = _memory_of_numpys(numpy) if numpy_tells() else _unknown
    return HostStream(read, numpy.set_state, memory)


def _unknown() -> None:
    """Return None: the memory of a stream is not known, or does not show every draw."""


def _memory_of_numpys(numpy: Any) -> Look:
    bits: Any = None
    memory: Look = _unknown

    def look() -> object:
        nonlocal bits, memory
        now = numpy.get_bit_generator()
        if now is not bits:  # `set_bit_generator` replaces it
            known = type(now) is numpy.MT19937
            memory = memory_of_numpy(numpy.get_state.__self__, now) if known else _unknown
            bits = now
        return memory()

    return look


def memory_of_python(stream: Any) -> Look:
    """Return a look at the memory of a `random.Random`, and at its other normal number."""
    own = _bytes_of(stream)
    return lambda: (own.raw, stream.gauss_next)


def memory_of_numpy(stream: Any, bits: Any) -> Look:
    """Return a look at the memory of a `numpy.random.RandomState` and of its `MT19937`."""
    own, words = _bytes_of(stream), _bytes_at(bits.ctypes.state_address, _STATE)
    # The objects are among the values, so that they stay alive: the arrays do not keep them.
    return lambda: (own.raw, words.raw, stream, bits)


def _bytes_of(value: object) -> Any:
    """Return the memory of an object, without its header."""
    return _bytes_at(id(value) + _HEADER, type(value).__basicsize__ - _HEADER)


def _bytes_at(address: int, size: int) -> Any:
    """Return an array over memory; its `raw` is a copy of the bytes."""
    return (ctypes.c_char * size).from_address(address)


@cache
def python_tells() -> bool:
    """Return whether the memory of a stream of Python's tells of every draw."""
    stream = random.Random(0)
    own = type(getattr(random.getstate, "__self__", None)) is random.Random
    if not own or not hasattr(stream, "gauss_next"):
        return False
    draws = stream.random, partial(stream.gauss, 0.0, 1.0)
    return _tells(draws, memory_of_python(stream), stream.getstate, stream.setstate)


@cache
def numpy_tells() -> bool:
    """Return whether the memory of a stream of numpy's tells of every draw."""
    numpy: Any = importlib.import_module("numpy.random")
    own = type(getattr(numpy.get_state, "__self__", None)) is numpy.RandomState
    if not own or not hasattr(numpy, "get_bit_generator"):
        return False
    bits = numpy.MT19937(0)
    stream = numpy.RandomState(bits)
    read = partial(stream.get_state, legacy=False)
    draws = stream.random_sample, stream.standard_normal
    return _tells(draws, memory_of_numpy(stream, bits), read, stream.set_state)


def _tells(
    draws: tuple[Callable[[], object], Callable[[], object]],
    memory: Look,
    read: Callable[[], Any],
    put: Callable[[Any], object],
) -> bool:
    """Return whether each draw of a stream shows in its memory, and putting back its state."""
    if sys.implementation.name != "cpython":  # `id` is no address
        return False
    uniform, normal = draws
    seen = [memory()]
    # The second normal number is the other one of the first one's pair: no word moves.
    for draw in (uniform, normal, normal):
        draw()
        seen.append(memory())
    state = read()
    different = len(set(seen)) == len(seen)
    uniform()
    put(state)
    return different and memory() == seen[-1]
