"""Promise 3 for numbers of every kind that a module counts in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.steps import elastic, grads, mlp, off_by, pairs
from tests.helpers.strikes import every_operation

pytestmark = pytest.mark.no_oom_injection


class Mood(Enum):
    """A state that goes to and fro."""

    UP = 1.0
    DOWN = 0.5


class Counts(nn.Module):
    """A layer that counts its calls, and scales by the count."""

    def __init__(self, start: Any, follow: Callable[[Any], Any]) -> None:
        super().__init__()
        self.count, self.follow = start, follow

    def forward(self, z: Tensor) -> Tensor:
        factor = self.count.value if isinstance(self.count, Enum) else abs(self.count)
        self.count = self.follow(self.count)
        return z * (1.0 + 0.1 * float(factor))


KINDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "int": (0, lambda count: count + 1),
    "complex": (0j, lambda count: count + 1j),
    "Decimal": (Decimal(0), lambda count: count + 1),
    "Fraction": (Fraction(0), lambda count: count + 1),
    "numpy's int64": (np.int64(0), lambda count: count + np.int64(1)),
    "numpy's float32": (np.float32(0), lambda count: count + np.float32(1)),
    "an enumeration": (Mood.UP, lambda mood: Mood.DOWN if mood is Mood.UP else Mood.UP),
}


def loss_of(model: nn.Module, piece: Any) -> Tensor:
    return functional.cross_entropy(model(piece[0]), piece[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_goes_back_with_a_failed_piece(kind: str) -> None:
    batch = pairs(8)

    def made() -> tuple[nn.Sequential, Counts]:
        model, counts = mlp(), Counts(*KINDS[kind])
        model.append(counts)
        return model, counts

    for inject in every_operation(stride=3, least=4):
        (model, counts), (twin, its) = made(), made()
        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
        for call in range(2):
            with inject if call else nullcontext():
                result = mbs.backward(partial(loss_of, model), batch)
            for start, stop in result.partition:
                loss = loss_of(twin, (batch[0][start:stop], batch[1][start:stop]))
                (loss * ((stop - start) / 8)).backward()
            assert off_by(model, grads(twin)) <= 1e-12, (inject.hits, result.partition)
            assert counts.count == its.count
            model.zero_grad()
            twin.zero_grad()
