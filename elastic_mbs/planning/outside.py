"""Modules and random generators that a loss function brings along, and that nobody has named.

A trace runs the loss function for nothing. The modules have fakes meanwhile, as the model has, and
generators are put back, so that training begins as if there had been no plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_mbs.engine.shared.companions import reached
from elastic_mbs.rollback.random_streams import RandomStreams, check_generators


class Outside:
    """The modules that a function leads to, and the states of all generators.

    Attributes:
        modules: the modules.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        found = reached([function])
        self.modules = found.modules
        readable = [each for each in found.generators if check_generators([each]) is None]
        self._streams = RandomStreams(readable, ())
        self._drawn = self._streams.read(hosts=True)

    def put_back(self) -> None:
        """Put generators back."""
        self._streams.restore(self._drawn)
