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


class HostStream:
    """A global random stream of the host's.

    Attributes:
        set_state: puts the stream back to a state.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        set_state: Callable[[Any], object],
        memory: Callable[[], object],
    ) -> None:
        """Take over a stream.

        Args:
            read: returns the state.
            set_state: puts a state back.
            memory: returns the memory that holds the state; None where that is not known.
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
    return HostStream(random.getstate, random.setstate, _memory_of_pythons)


def numpys_stream() -> HostStream:
    """Return the stream of the functions of `numpy.random`, which is imported."""
    numpy: Any = importlib.import_module("numpy.random")
    read = partial(numpy.get_state, legacy=False)
    return HostStream(read, numpy.set_state, partial(_memory_of_numpys, numpy))


def _memory_of_pythons() -> object:
    return memory_of_python(random.getstate.__self__) if python_tells() else None  # type: ignore[attr-defined]  # it is a method


def _memory_of_numpys(numpy: Any) -> object:
    bits = numpy.get_bit_generator() if numpy_tells() else None  # `set_bit_generator` replaces it
    if type(bits) is not numpy.MT19937:
        return None
    return memory_of_numpy(numpy.get_state.__self__, bits)


def memory_of_python(stream: Any) -> object:
    """Return the memory of a `random.Random`, and its other normal number."""
    return _bytes_of(stream), stream.gauss_next


def memory_of_numpy(stream: Any, bits: Any) -> object:
    """Return the memory of a `numpy.random.RandomState` and of its `MT19937`."""
    return _bytes_of(stream), ctypes.string_at(bits.ctypes.state_address, _STATE)


def _bytes_of(value: object) -> bytes:
    """Return the memory of an object, without its header."""
    return ctypes.string_at(id(value) + _HEADER, type(value).__basicsize__ - _HEADER)


@cache
def python_tells() -> bool:
    """Return whether the memory of a stream of Python's tells of every draw."""
    stream = random.Random(0)
    own = type(getattr(random.getstate, "__self__", None)) is random.Random
    if not own or not hasattr(stream, "gauss_next"):
        return False
    draws = stream.random, partial(stream.gauss, 0.0, 1.0)
    return _tells(draws, lambda: memory_of_python(stream), stream.getstate, stream.setstate)


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
    return _tells(draws, lambda: memory_of_numpy(stream, bits), read, stream.set_state)


def _tells(
    draws: tuple[Callable[[], object], Callable[[], object]],
    memory: Callable[[], object],
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
