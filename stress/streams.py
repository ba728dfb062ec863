"""The random streams of a process: torch's, Python's, and numpy's where numpy is there."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Streams:
    """Where the random streams stand: torch's, Python's, and numpy's legacy one where numpy is there."""

    torch: Tensor
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Streams:
        numpy = sys.modules.get("numpy.random")
        return cls(torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.get_state())

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)

    def same(self, other: Streams) -> bool:
        return torch.equal(self.torch, other.torch) and self.python == other.python and repr(self.numpy) == repr(other.numpy)


def start_streams(seed: int) -> None:
    """Starts them from a seed, of which numpy's takes 32 bits; numpy's only where numpy is there."""
    torch.manual_seed(seed % 2**32)
    random.seed(seed % 2**32)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % 2**32)
