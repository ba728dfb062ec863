"""Random streams of a process: torch's, Python's, and numpy's where numpy is there."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from dataclasses import dataclass
from pickle import dumps
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Streams:
    """Positions of the random streams.

    A context manager: the streams stand there again at its end.
    """

    torch: Tensor
    cuda: tuple[Tensor, ...]  # one for each device
    python: Any
    numpy: Any  # numpy's legacy stream

    @classmethod
    def now(cls) -> Streams:
        numpy = sys.modules.get("numpy.random")
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()
        return cls(
            torch.get_rng_state(),
            tuple(cuda),
            random.getstate(),
            None if numpy is None else numpy.get_state(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)

    def same(self, other: Streams) -> bool:
        same = len(self.cuda) == len(other.cuda) and all(
            map(torch.equal, (self.torch, *self.cuda), (other.torch, *other.cuda))
        )
        return same and self.python == other.python and dumps(self.numpy) == dumps(other.numpy)


def start_streams(seed: int) -> None:
    """Start the streams from a seed, of which numpy's takes 32 bits."""
    torch.manual_seed(seed % 2**32)
    random.seed(seed % 2**32)
    with suppress(ImportError):
        # We import it ourselves: a module that imported it between two builds would leave the first
        # of them with another stream.
        import numpy.random

        numpy.random.seed(seed % 2**32)
