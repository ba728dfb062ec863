"""Random streams that an attempt draws from, and their rollback.

They are torch's generators (the CPU's, and the default one of each device), Python's, numpy's
global one, and the user's own. docs/internals/autograd.md tells what a failed attempt leaves
behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_, methodcaller
from typing import Any, NamedTuple

import torch

from elastic_mbs.device import RandomStream, accelerator_of
from elastic_mbs.rollback.host_streams import numpys_stream, pythons_stream

_GET_STATE = methodcaller("get_state")
_Accessors = tuple[Callable[[], Any], Callable[[Any], Any]]  # reads a state, puts one back


class StreamState(NamedTuple):
    """The states of all random streams at one moment."""

    generators: tuple[torch.Tensor, ...]  # torch's, in the host's memory
    hosts: tuple[Any, ...] | None  # Python's and numpy's; None where they were not read


class RandomStreams:
    """Every random stream that a step can draw from.

    torch's generators take 1 to 8 µs each to read. Python's and numpy's take 45 µs together where
    they have moved: they are read at the call's start, and before each piece once they have moved
    in a call.

    Args:
        generators: the user's own, besides those that belong to the process.
        devices: devices whose default generators are read.

    Raises:
        UnsupportedError: the default generator of a device cannot be read and put back.
    """

    def __init__(self, generators: Sequence[Any], devices: Iterable[torch.device]) -> None:
        self._defaults: list[RandomStream] = [torch.default_generator]
        for accelerator in map(accelerator_of, devices):
            if accelerator is not None:
                self._defaults.append(accelerator.random_stream)
        self._torch = self._defaults
        python = pythons_stream()
        self._hosts: list[_Accessors] = [(python.get_state, python.set_state)]
        self._numpy: list[_Accessors] = []  # its global stream, once it is known
        self._given: list[Any] = []  # the user's own, as they were given
        self.draws_on_host = False
        self.follow(generators)

    def follow(self, generators: Iterable[Any]) -> None:
        """Read these generators of the user's from now on, and no others, between two calls."""
        given = list(generators)
        if len(given) == len(self._given) and all(map(is_, given, self._given)):
            return
        self._given = given
        every = {id(generator): generator for generator in given}
        for generator in self._defaults:
            every.pop(id(generator), None)
        own = list(every.values())
        of_torch = [each for each in own if isinstance(each, torch.Generator)]
        others = [each for each in own if not isinstance(each, torch.Generator)]
        self._torch = [*self._defaults, *of_torch]
        self._hosts = [self._hosts[0], *map(_accessors, others), *self._numpy]

    def read(self, *, hosts: bool = False) -> StreamState:
        """Return the present states.

        Those of Python and numpy are among them where they are known to be drawn from, or asked for
        with `hosts`.
        """
        generators = tuple(map(_GET_STATE, self._torch))
        if not hosts and not self.draws_on_host:
            return StreamState(generators, None)
        if not self._numpy and "numpy" in sys.modules:
            # Here, because numpy itself loads it when a step first draws, and its stream would then
            # not have been read.
            numpy = numpys_stream()
            self._numpy.append((numpy.get_state, numpy.set_state))
            self._hosts = [*self._hosts, *self._numpy]
        return StreamState(generators, tuple([get() for get, _ in self._hosts]))

    def restore(self, state: StreamState) -> None:
        """Put every stream that was read back to a state.

        After an error it can be called again.
        """
        for generator, value in zip(self._torch, state.generators, strict=True):
            generator.set_state(value)
        # numpy can have been imported since: its stream is then left alone, nothing was drawn from
        # it before.
        for (_, put), value in zip(self._hosts, state.hosts or (), strict=False):
            put(value)

    def moved(self, since: StreamState) -> bool:
        """Return whether any stream that was read has moved, compared in the host's memory."""
        return self.hosts_moved(since) or not all(
            torch.equal(g.get_state(), state)
            for g, state in zip(self._torch, since.generators, strict=True)
        )

    def hosts_moved(self, since: StreamState) -> bool:
        """Return whether Python's, numpy's or the user's own host stream has moved.

        A numpy imported since counts: its stream was not read.
        """
        if since.hosts is None:
            return False
        new = len(self._hosts) > len(since.hosts) or (
            not self._numpy and "numpy.random" in sys.modules
        )
        return new or any(
            not _equal(get(), value)
            for (get, _), value in zip(self._hosts, since.hosts, strict=True)
        )

    def learn(self, since: StreamState) -> bool:
        """Return `moved`; a host's stream that has is read before each piece from now on."""
        self.draws_on_host = self.draws_on_host or self.hosts_moved(since)
        return self.moved(since)


def _accessors(generator: Any) -> _Accessors:
    if hasattr(generator, "getstate"):
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):
        return generator.get_state, generator.set_state
    bits = generator.bit_generator
    return partial(getattr, bits, "state"), partial(setattr, bits, "state")


def check_generators(generators: Sequence[Any]) -> str | None:
    """Return why one of these cannot be rolled back, or None."""
    if not isinstance(generators, Sequence):
        return f"generators={generators!r} is no sequence of random generators"
    for generator in generators:
        try:
            _accessors(generator)[0]()
        except (AttributeError, NotImplementedError):
            return (
                f"generators= has a {type(generator).__name__}, whose state cannot be read; give "
                "torch, random or numpy generators"
            )
    return None


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except ValueError:  # there are arrays of numpy's in it
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
        return all(map(_equal, a, b)) if isinstance(a, tuple) else bool(a.tobytes() == b.tobytes())
