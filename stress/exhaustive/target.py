"""Targets of injection: a built-in step or the user's model, and the reference of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

from elastic_mbs.batch.pieces import partition
from elastic_mbs.errors import UsageError

from ..models.factory import make
from ..models.steps import STEPS, build
from ..models.subject import Subject, naming
from ..reference.by_hand import accumulate, view_of
from ..reference.state import State, error_of, tolerance_of
from ..scenarios.model_check import check

Partition = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Target:
    """A step that is made to fail, rebuilt from its seed each time."""

    name: str  # name in tables
    build: Callable[[], Subject]  # makes the subject from its seed
    # Makes the reference's subject: the same, but not compiled.
    plain: Callable[[], Subject]
    # Micro-batch at the start, in samples: a built-in step has two pieces, so that a failure can
    # strike a batch that is partly accumulated.
    size: int = 4


@cache
def builtin(name: str, device: str = "cpu") -> Target:
    if name not in STEPS:
        raise UsageError(
            f"unknown case {name!r}; one of {', '.join(STEPS)}, or your own with --model "
            "path.py:factory"
        )
    plain = "mlp" if name == "compiled" else name
    return Target(name, partial(build, name, device), partial(build, plain, device))


def of_subject(name: str, *, samples: int, seed: int = 0, device: str = "cpu") -> Target:
    """Return the user's own model, or one of `models.builtin`, as a target.

    It trains on the first samples of its first batch. A trial finds out whether it is separable.
    """

    def built(separable: bool = True, tolerance: float = 0.0) -> Subject:
        subject = make(name, seed, there=device)
        view = view_of(subject, subject.batch(0))
        return replace(
            subject,
            batches=[view.piece(0, min(samples, view.length))],
            separable=separable,
            tolerance=tolerance,
        )

    check(name, seed, "cpu")
    case = built()
    length = view_of(case, case.batch(0)).length
    tolerance = tolerance_of(case.model)
    size = -(-length // 2)
    probe = Target(name, built, built, size)
    with naming(name, f"its step does not run on {samples} samples"):
        whole, again, split = (
            reference.__wrapped__(probe, pieces)
            for pieces in (((0, length),), ((0, length),), partition(0, length, size))
        )
    if error_of(again.grads, whole.grads) > 0:
        raise UsageError(
            f"--model {name}: two runs from the same seed differ, so nothing can be compared: "
            "draw from torch's, Python's or numpy's stream"
        )
    made = partial(built, error_of(split.grads, whole.grads) <= tolerance, tolerance)
    return replace(probe, build=made, plain=made)


@lru_cache(maxsize=256)
def whole_batch(target: Target) -> Partition:
    """Return the partition of a batch that is not split."""
    case = target.plain()
    return ((0, view_of(case, case.batch(0)).length),)


@lru_cache(maxsize=4096)
def reference(target: Target, pieces: Partition) -> State:
    """Return the state after accumulation by hand over these pieces, without failures."""
    case = target.plain()
    accumulate(case, view_of(case, case.batch(0)), pieces, scaler=case.options.get("scaler"))
    return State.of(case.leaves(), case.model)
