"""How a case that failed is named, so that one command repeats it."""

from __future__ import annotations

import random

TOOL = __package__
"""What `python -m` takes: `stress` in a checkout, `elastic_mbs.stress` where the package is installed."""


def case_seed(seed: int, number: int) -> int:
    """The seed of a case by the seed of all and its number: one integer, and another for each pair."""
    return random.Random(f"{seed}:{number}").getrandbits(48)
