"""What is held at once after a failed attempt and after a call, when no other backward has run: of what failed it must be nothing."""

from __future__ import annotations

from torch import nn

from elastic_mbs import Event, OutOfMemory

from ..limits import MemoryLimit, ShimLimit
from ..limits.fence import MINIMUM
from ..reference.state import WrongOutcomeError

BOOKKEEPING = 16384
"""Bytes of losses, states of random generators and the like that a call may hold."""


def held_beside_gradients(limit: MemoryLimit, model: nn.Module) -> int:
    """Bytes that this process holds, as the limit counts them, without the gradients of a model."""
    least = MINIMUM if isinstance(limit, ShimLimit) else 1
    storages = {}
    for leaf in model.parameters():
        if leaf.grad is not None:
            grad = leaf.grad._values() if leaf.grad.is_sparse else leaf.grad
            storages[grad.untyped_storage().data_ptr()] = grad.untyped_storage().nbytes()
    return limit.live() - sum(size for size in storages.values() if size >= least)


class Holding:
    """Looks at each failure that is told of, which is when all of it should be gone. A sink for events.

    Args:
        limit: that counts.
        model: in training.

    Attributes:
        most: bytes that were held at most of what the call had made, beside gradients.
        phase: of the attempt that had failed then.
    """

    def __init__(self, limit: MemoryLimit, model: nn.Module) -> None:
        self._limit = limit
        self._model = model
        self.begin()

    def begin(self) -> None:
        """A call begins."""
        self._before = held_beside_gradients(self._limit, self._model)
        self.most = 0
        self.phase = ""

    def look(self, when: str) -> None:
        """Looks now."""
        more = held_beside_gradients(self._limit, self._model) - self._before
        if more > self.most:
            self.most, self.phase = more, when

    def check(self, kept: int, where: str) -> None:
        """Judges what was seen since `begin`.

        Args:
            kept: bytes that the model keeps of a piece by itself.
            where: for the error.

        Raises:
            WrongOutcomeError: more than that and the runtime's own bookkeeping was held.
        """
        if self.most > kept + BOOKKEEPING and self._limit.kind != "rlimit":  # which counts what the interpreter has, too
            raise WrongOutcomeError(f"{where}: {self.most} bytes of it were still held after the {self.phase}, beside gradients")

    def __call__(self, event: Event) -> None:
        """Looks after a failure; not where gradients are set aside by design."""
        if isinstance(event, OutOfMemory) and event.mode != "isolate":
            self.look(f"failed {event.phase}")
