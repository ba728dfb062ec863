"""State that a loss reads and moves: each piece sees what the pieces before it have left."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from elastic_mbs.memory import oom
from elastic_mbs.rehearsal.comparison import Comparison, Ran


def moved(compared: Comparison, name: str | None) -> str | None:
    """Name the state of a loss that adds up only where it is put back before each piece."""
    pieces = [(ran.start, ran.stop) for ran in compared.ones]
    before = _buffers(compared)
    anew = compared.run(pieces, each_anew=True)
    if all(_same(compared, *each) for each in zip(compared.ones, anew, strict=True)):
        return None  # nothing that was left made a difference
    if not compared.near(compared.whole[name], compared.joined(anew, name, compared.reduction)):
        return None
    return f"reads {_what(compared, before)}, which it also changes, {_WAY_OUT}"


def moved_in_training(compared: Comparison) -> tuple[str, float] | None:
    """Name the state that a loss reads and moves in training alone.

    The second of two pieces runs after the first, and without it. It draws the same numbers, so
    nothing but state can make a difference.

    Returns:
        What is moved, and the difference that it makes to a loss of the piece.
    """
    pieces = [(ran.start, ran.stop) for ran in compared.halves[:2]]
    if not any(compared.snapshot.training) or len(pieces) < 2:
        return None
    with compared.in_training():
        try:
            after_another = compared.run(pieces)[1]
            left = _buffers(compared)
            alone = compared.run(pieces[1:])[0]
        except Exception as error:
            if oom.classify(error, compared.resources.settings.recovery.is_oom) is not None:
                raise
            return None  # a few samples may be too few for training, which says nothing of state
    if _same(compared, after_another, alone):
        return None
    pairs = [(loss, alone.losses[name]) for name, loss in after_another.losses.items()]
    off = [abs(one - other) for one, other in pairs if not (math.isnan(one) and math.isnan(other))]
    makes = max(math.inf if math.isnan(each) else each for each in off)
    return f"reads {_what(compared, left)}, which it also changes in training, {_WAY_OUT}", makes


_WAY_OUT = (
    "so each piece sees what the pieces before it have left: return what changes it as an output, "
    "and change it once, after the call"
)


def _same(compared: Comparison, one: Ran, other: Ran) -> bool:
    """Return whether two runs of the same samples gave the same losses."""
    return all(
        compared.near(loss, other.losses[name])
        or (math.isnan(loss) and math.isnan(other.losses[name]))
        for name, loss in one.losses.items()
    )


def _what(compared: Comparison, before: dict[str, Tensor]) -> str:
    """Return what has moved since the buffers were copied, in words."""
    found = [
        label
        for label, value in _buffers(compared).items()
        if label not in before or not torch.equal(before[label], value)
    ]
    if found:
        return f"the buffer {', '.join(found[:4])}"
    if compared.kept.edited:
        return f"a tensor {compared.kept.edited[0]}"
    return "a number that a module keeps"


def _buffers(compared: Comparison) -> dict[str, Tensor]:
    """Return copies of the buffers, by their names."""
    return {
        f"{type(module).__name__}.{name}": buffer.detach().clone()
        for module in compared.modules
        for name, buffer in module._buffers.items()
        if isinstance(buffer, Tensor) and buffer.layout is torch.strided
    }
