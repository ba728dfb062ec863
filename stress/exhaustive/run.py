"""One call with something failing, and its judgement.

The only outcomes allowed are what a call without failures gives, or a typed error with everything as it was at the call's start.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from elastic_mbs import ElasticMBS, ElasticMBSError, OutOfMemory, RecoveryError
from elastic_mbs.memory import NoSensor

from ..flat_options import grouped
from ..models.subject import Subject
from ..reference.state import State, WrongOutcomeError
from .calls import CALLS, Call
from .strike import INJECTED, Lines, Operations
from .target import Target

WRONG, RAW, DAMAGED = "wrong", "raw", "damaged"
"""A result that is not right, an error that is not typed, a state that is not as it was."""


@dataclass
class Outcome:
    """What one call under injection came to."""

    name: str  # of the call
    hits: list[str]  # what was made to fail
    operations: int  # that could have failed
    modes: list[str]  # how failures were replayed
    error: str | None = None  # the type of the error that left the call
    worst: float = 0.0  # largest relative difference of a number from the reference
    found: dict[str, str] = field(default_factory=dict)  # what is not allowed: WRONG, RAW or DAMAGED, with the reason

    def __str__(self) -> str:
        what = "; ".join(f"{kind}: {why}" for kind, why in self.found.items())
        return f"{self.name}, faults {self.hits}, replays {self.modes}: {what}"


def run(target: Target, strikes: Operations | Lines, *, call: str = "backward", warm: bool, case: Subject | None = None) -> Outcome:
    """Runs one call of a case under injection and judges its outcome.

    Args:
        target: whose call.
        strikes: what fails.
        call: a key of `CALLS`.
        warm: whether the runtime has seen a clean call of it before.
        case: a case to run again, where building it costs too much.
    """
    case = case or target.build()
    modes: list[str] = []
    options = {
        "micro_batch_size": target.size,
        "grow": False,
        **case.options,
        "sensor": NoSensor("no readings under injection"),
        "monitor_interval": 0,
        "wait_for_memory": 0,
        "on_event": lambda event: modes.append(event.mode) if isinstance(event, OutOfMemory) else None,
    }
    mbs = ElasticMBS(case.model, **grouped(options))
    used = CALLS[call](target, case, mbs, strikes)
    used.prepare()
    if warm:
        used.warm_up()
    outcome = Outcome(f"{target.name}, {'warm' if warm else 'cold'} {call}", strikes.hits, 0, modes)
    _judged(used, strikes, outcome)
    outcome.hits, outcome.operations = strikes.hits, strikes.count
    try:
        mbs.close()
    except ElasticMBSError as error:
        outcome.found[DAMAGED] = f"the runtime does not close: {type(error).__name__}: {error}"
        mbs.close()
    return outcome


def _judged(used: Call, strikes: Operations | Lines, outcome: Outcome) -> None:
    """Performs the call, and writes down what came of it."""
    case, backend = used.case, used.case.backend
    start, put_back = State.of(case.leaves(), case.model), used.keeper()
    error: BaseException | None = None
    product = None
    if backend is not None:
        backend.inject = strikes.fault if isinstance(strikes, Lines) else strikes
    try:
        with nullcontext() if backend is not None else strikes:
            product = used.perform()
    except BaseException as caught:
        if isinstance(caught, KeyboardInterrupt) and caught.args != (INJECTED,):
            raise
        error = caught
    finally:
        if backend is not None:
            backend.inject = None
        left = _left_in_process()
    end = State.of(case.leaves(), case.model)
    try:
        if left:
            outcome.found[DAMAGED] = left
        if error is None:
            outcome.worst = used.judge(product, start, end)
            used.judge_extra(failed=False)
            return
    except WrongOutcomeError as wrong:
        outcome.found[WRONG] = str(wrong)
        return
    outcome.error = type(error).__name__
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) and not isinstance(error, ElasticMBSError):
        outcome.found[RAW] = text
    elif not (isinstance(error, RecoveryError) or error.args == (INJECTED,)):
        outcome.found[WRONG] = f"not what running out of memory should end in: {text}"
    if error.args == (INJECTED,) and used.is_whole(start, end):
        return
    notes = "\n".join(getattr(error, "__notes__", []))
    del error
    try:
        _check_state(used, start, end, notes)
        put_back()
        _check_again(used, start)
    except WrongOutcomeError as damage:
        outcome.found[DAMAGED] = f"{damage} (after {text[:120]})"


def _left_in_process() -> str:
    """What of the call is left in the process beside its state; taken away."""
    found = []
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        found.append("gradients are disabled")
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        found.append("hooks for saved tensors are left")
    return ", ".join(found)


def _check_state(used: Call, start: State, end: State, notes: str) -> None:
    trouble = start.trouble(end, notes if used.gradients else "")
    if trouble and not used.may_differ(start, end):
        raise WrongOutcomeError(", ".join(trouble))
    used.judge_extra(failed=True)


def _check_again(used: Call, start: State) -> None:
    """The same call once more, without a failure."""
    try:
        product = used.perform()
        used.judge(product, start, State.of(used.case.leaves(), used.case.model))
    except WrongOutcomeError as wrong:
        raise WrongOutcomeError(f"the next call: {wrong}") from wrong
    except Exception as error:
        raise WrongOutcomeError(f"the next call: {type(error).__name__}: {error}") from error
