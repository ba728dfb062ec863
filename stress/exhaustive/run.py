"""A call under injection.

Its outcome has to be that of a call without failures, or a typed error with everything as it was.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_mbs import ElasticMBS, ElasticMBSError, OutOfMemory, RecoveryError
from elastic_mbs.memory import NoSensor

from ..flat_options import grouped
from ..models.subject import Subject
from ..reference.state import State, WrongOutcomeError
from .calls import CALLS, Call
from .strike import INJECTED, Lines, Operations
from .target import Target

# a wrong result, an error that is not typed, a state that has changed
WRONG, RAW, DAMAGED = "wrong", "raw", "damaged"


@dataclass
class Outcome:
    """Outcome of one call under injection."""

    name: str  # name of the call
    modes: list[str]  # modes of the replays
    hits: list[str]  # operations that were made to fail
    operations: int  # number of operations that could have failed
    error: str | None = None  # type of the error that left the call
    worst: float = 0.0  # largest relative difference of a number from the reference
    # outcomes that are not allowed (WRONG, RAW or DAMAGED), with the reason
    found: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        what = "; ".join(f"{kind}: {why}" for kind, why in self.found.items())
        return f"{self.name}, faults {self.hits}, replays {self.modes}: {what}"


def run(
    target: Target,
    strikes: Operations | Lines,
    *,
    call: str = "backward",
    warm: bool,
    case: Subject | None = None,
) -> Outcome:
    """Run one call under injection, and judge its outcome.

    Args:
        target: the step or model that is trained.
        strikes: the failures to inject.
        call: the way to use a runtime.
        warm: make a clean call first.
        case: the subject to run on, where building one costs too much; None builds it.
    """
    case = case or target.build()
    fault = strikes.fault if isinstance(strikes, Lines) else strikes
    modes: list[str] = []
    options = {
        "micro_batch_size": target.size,
        "grow": False,
        **case.options,
        "sensor": NoSensor("no readings under injection"),
        "monitor_interval": 0,
        "wait_for_memory": 0,
        "verify": "off",  # every run of the step is counted
        "on_event": lambda event: (
            modes.append(event.mode) if isinstance(event, OutOfMemory) else None
        ),
    }
    mbs = ElasticMBS(case.model, **grouped(options))
    used = CALLS[call](target, case, mbs, fault.user_code)
    used.prepare()
    if warm:
        used.warm_up()
    start = State.of(case.leaves(), case.model)
    put_back = used.keeper()
    product, error = _performed(used, strikes, fault)
    outcome = Outcome(
        f"{target.name}, {'warm' if warm else 'cold'} {call}", modes, fault.hits, fault.count
    )
    end = State.of(case.leaves(), case.model)
    left = _left_in_process()
    if left:
        outcome.found[DAMAGED] = left
    if error is None:
        try:
            outcome.worst = used.judge(product, start, end)
        except WrongOutcomeError as wrong:
            outcome.found[WRONG] = str(wrong)
    elif _judge_error(used, error, start, end, outcome):
        error = None  # the error goes, with all that it keeps alive
        put_back()
        _judge_next(used, start, outcome)
    try:
        mbs.close()
    except ElasticMBSError as trouble:
        outcome.found[DAMAGED] = f"the runtime does not close: {type(trouble).__name__}: {trouble}"
        mbs.close()
    return outcome


def _performed(
    used: Call, strikes: Operations | Lines, fault: Operations
) -> tuple[Any, BaseException | None]:
    """Return the result of a call, or the error that ended it.

    An interrupt from outside passes through.
    """
    backend = used.case.backend
    if backend is not None:
        backend.inject = fault
    try:
        with nullcontext() if backend is not None else strikes:
            return used.perform(), None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and error.args != (INJECTED,):
            raise
        return None, error
    finally:
        if backend is not None:
            backend.inject = None


def _left_in_process() -> str:
    """Name the leftovers of the call in the process beside its state, and take them away."""
    found = []
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        found.append("gradients are disabled")
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        found.append("hooks for saved tensors are left")
    return ", ".join(found)


def _judge_error(
    used: Call, error: BaseException, start: State, end: State, outcome: Outcome
) -> bool:
    """Judge an error and the state after it.

    Returns whether the same call can be made again.
    """
    outcome.error = type(error).__name__
    text = f"{type(error).__name__}: {error}"
    injected = error.args == (INJECTED,)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) and not isinstance(
        error, ElasticMBSError
    ):
        outcome.found[RAW] = text
    elif not (isinstance(error, RecoveryError) or injected):
        outcome.found[WRONG] = f"not what running out of memory should end in: {text}"
    if injected and used.is_whole(start, end):
        return False
    try:
        used.judge_failed(start, end, "\n".join(getattr(error, "__notes__", [])))
    except WrongOutcomeError as damage:
        outcome.found[DAMAGED] = f"{damage} (after {text[:120]})"
        return False
    return True


def _judge_next(used: Call, start: State, outcome: Outcome) -> None:
    """Make the same call once more, without a failure, and judge it."""
    try:
        used.judge(used.perform(), start, State.of(used.case.leaves(), used.case.model))
    except WrongOutcomeError as wrong:
        outcome.found[DAMAGED] = f"the next call: {wrong} (after {outcome.error})"
    except Exception as error:
        outcome.found[DAMAGED] = (
            f"the next call: {type(error).__name__}: {error} (after {outcome.error})"
        )
