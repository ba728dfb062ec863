"""Random streams, which a failed attempt has drawn from, and putting them back.

torch's CPU generator, the generator of every device in use, Python's `random`, numpy's global one, and generators the user names. A piece's start and
the call's start are both kept, because a recovery goes back to either. Source: shared/reference/autograd.md, "State a failed attempt leaves behind".
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch


class StreamState(NamedTuple):
    """States of all random streams at one moment; `slow` is None where the host's streams were not read."""

    generators: tuple[torch.Tensor, ...]
    slow: tuple[Any, ...] | None


class RandomStreams:
    """Reads and restores every random stream that a step may draw from.

    torch's generators take 1.5 µs each; Python's and numpy's together 45 µs, so those are read at the call's start and, once they are known to be
    drawn from, before each piece as well.

    Args:
        generators: the user's own `torch.Generator`, `random.Random` or `numpy.random.Generator`/`RandomState` objects.
        devices: devices whose default generator may be drawn from.
    """

    def __init__(self, generators: Sequence[Any], devices: Iterable[torch.device]) -> None:
        self._torch: list[torch.Generator] = [torch.default_generator]
        for device in devices:
            if device.type == "cuda":  # cuda-only
                torch.cuda.init()
                self._torch.append(torch.cuda.default_generators[device.index or 0])
        self._hosts: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [(random.getstate, random.setstate)]
        for generator in generators:
            if isinstance(generator, torch.Generator):
                self._torch.append(generator)
            else:
                self._hosts.append(_accessors(generator))
        self._knows_numpy = False
        self.draws_on_host = False

    def _slow(self) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
        if not self._knows_numpy and (numpy := sys.modules.get("numpy.random")) is not None:
            self._hosts.append((partial(numpy.get_state, legacy=False), numpy.set_state))
            self._knows_numpy = True
        return self._hosts

    def read(self, *, slow: bool) -> StreamState:
        """The present states; `slow` asks for those of Python and numpy too."""
        generators = tuple([generator.get_state() for generator in self._torch])
        return StreamState(generators, tuple([get() for get, _ in self._slow()]) if slow else None)

    def restore(self, state: StreamState) -> None:
        """Puts every stream that was read back to where it was."""
        for generator, value in zip(self._torch, state.generators, strict=True):
            generator.set_state(value)
        if state.slow is not None:
            # numpy may have been imported since: its stream is then left alone, nothing was drawn from it before.
            for (_, put), value in zip(self._slow(), state.slow, strict=False):
                put(value)

    def moved(self, since: StreamState) -> bool:
        """Whether any stream that was read moved since then."""
        return self.moved_on_devices(since) or self.moved_on_host(since)

    def moved_on_devices(self, since: StreamState) -> bool:
        """Whether one of torch's generators moved since then."""
        return any(not torch.equal(generator.get_state(), value) for generator, value in zip(self._torch, since.generators, strict=True))

    def moved_on_host(self, since: StreamState) -> bool:
        """Whether Python's, numpy's or the user's own host stream moved since then."""
        if since.slow is None:
            return False
        now = [get() for get, _ in self._slow()]
        return len(now) > len(since.slow) or any(not _equal(a, b) for a, b in zip(now, since.slow, strict=False))


def _accessors(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    if hasattr(generator, "getstate"):
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):
        return generator.get_state, generator.set_state
    bits = generator.bit_generator

    def put(state: Any) -> None:
        bits.state = state

    return lambda: bits.state, put


def check_generators(generators: Sequence[Any]) -> str | None:
    """Why one of these cannot be rolled back, or None."""
    if not isinstance(generators, Sequence):
        return f"generators={generators!r} is no sequence of random generators"
    for generator in generators:
        try:
            (generator.get_state if isinstance(generator, torch.Generator) else _accessors(generator)[0])()
        except (AttributeError, NotImplementedError):
            return f"generators= has a {type(generator).__name__}, whose state cannot be read; give torch, random or numpy generators"
    return None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "tobytes"):  # a numpy array
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b)
