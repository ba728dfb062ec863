"""Modules and random generators that a loss function brings along, and that nobody has named.

A trace runs the loss function for nothing. What it switches and draws is put back, so that training
begins as if there had been no plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from elastic_mbs.engine.shared.companions import reached
from elastic_mbs.rollback.random_streams import RandomStreams, check_generators


class Outside:
    """The modes of all modules and the states of all generators that a function leads to."""

    def __init__(self, function: Callable[..., Any]) -> None:
        found = reached([function])
        self._modes: list[tuple[nn.Module, bool]] = [
            (module, module.training) for module in found.modules
        ]
        readable = [each for each in found.generators if check_generators([each]) is None]
        self._streams = RandomStreams(readable, ())
        self._drawn = self._streams.read(hosts=True)

    def put_back(self) -> None:
        """Put modes and generators back."""
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
        self._streams.restore(self._drawn)
