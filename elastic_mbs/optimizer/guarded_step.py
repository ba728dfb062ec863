"""`mbs.optimizer_step(optimizer)`: a step that is made whole or not at all.

Copies are taken of what the step changes, and it is tried:

    as it is  ──OOM──►  rolled back; caches released, copies on the host  ──OOM──►  rolled back; one parameter at a time  ──OOM──►  error

The copies make it exact: a step that failed half-way has changed some values and not others, and neither going on nor starting over from there is
right (shared/reference/autograd.md, "optimizer.step()"). A fused step whose state exists allocates nothing, so it gets none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from elastic_mbs.engine import misuse
from elastic_mbs.engine.context import Context
from elastic_mbs.errors import MisuseError, OptimizerStepError, PoisonedDeviceError, UsageError
from elastic_mbs.events import OptimizerOutOfMemory, format_bytes
from elastic_mbs.memory import oom
from elastic_mbs.optimizer.known import has_state, one_by_one, with_gradient
from elastic_mbs.optimizer.snapshot import OptimizerSnapshot
from elastic_mbs.rollback.random_streams import RandomStreams

T = TypeVar("T")

WAYS = ("as it is", "with the caches let go of", "one parameter at a time")
"""To make a step, from the fastest to the one that needs least memory."""
ONE_BY_ONE = len(WAYS) - 1

LONGEST_PAUSE = 64
"""Most steps between two tries of the fastest way."""

_TRIES = 4  # of our own bookkeeping, each after releasing what can be released


class GuardedStep:
    """Steps optimizers, exactly or not at all."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._order = AttemptOrder()

    def __call__(self, optimizer: Optimizer) -> None:
        """See `ElasticMBS.optimizer_step`."""
        _check(optimizer)
        self._unscale(optimizer)
        if next(with_gradient(optimizer), None) is None:
            optimizer.step()  # it changes nothing: for its hooks, and for a scheduler that counts steps
            return
        step = self._insist("keep the optimizer's state", lambda: _Step(optimizer, self._context.streams))
        try:
            step.hooks.defer()
            self._try_in_order(step)
        finally:
            if step.half_made:  # an interrupt between the lines of the roll-back itself
                self._roll_back(step)
            step.hooks.put_back()
        step.hooks.run_after()

    def _try_in_order(self, step: _Step) -> None:
        key, name = _key(step.optimizer), type(step.optimizer).__name__
        last = ONE_BY_ONE if one_by_one(step.optimizer) else ONE_BY_ONE - 1
        began = min(self._order.first(key), last)
        verdict: oom.Verdict | None = None
        # A way that worked before is tried twice: the last one leaves no other.
        for way in [*([began] if began else ()), *range(began, last + 1)]:
            if verdict is not None:
                self._context.monitor.request_reading()  # the next reading explains it
                self._context.log.emit(OptimizerOutOfMemory(self._context.settings.name, name, WAYS[way], verdict.kind.name.lower(), verdict.message))
                self._release()
            verdict = self._attempt(step, way)
            if verdict is None:
                self._order.worked(key, began, way)
                return
        assert verdict is not None
        how = ", not even one parameter at a time" if last == ONE_BY_ONE else ""
        raise OptimizerStepError(
            f"{name}.step() does not fit{how}. It asked for {format_bytes(verdict.requested)}; {self._context.monitor.latest().in_words()}. "
            f"Copies of what it changes take {format_bytes(step.snapshot.nbytes)}: without them a step that fails half-way could not be rolled back. "
            "Parameters and state are as they were before it and the gradients are there, so it may be called again. "
            "Ways out: free what others hold; fused=True (no copies, no temporaries) or foreach=False; an optimizer with a smaller state; "
            f"optimizer.step() without this guard. The error was: {verdict.message}"
        )

    def _attempt(self, step: _Step, way: int) -> oom.Verdict | None:
        """Tries to step; after an error everything is as it was before. Returns why there was no memory, or None after a success."""
        make: Callable[[], object] = step.optimizer.step
        if way == ONE_BY_ONE:
            make = partial(_step_one_by_one, step.optimizer, make)
        try:
            step.snapshot.take(host=way > 0)
            step.half_made = step.snapshot.complete
            _run(self._context.settings.scaler, step, make)
            step.half_made = False
            return None
        except BaseException as error:
            if step.hooks.fired and not step.hooks.failed and not step.snapshot.complete:
                error.add_note("elastic_mbs: a fused step, of which no copies are taken, ended half-way: load the last checkpoint.")
                raise
            self._roll_back(step)
            verdict = None if step.hooks.failed else self._classify(error)
            if verdict is None or verdict.kind is oom.Kind.MASKED:
                error.add_note("elastic_mbs: parameters and optimizer state are as they were before this step.")
                raise
            oom.clear_traceback(error)
        if verdict.kind is oom.Kind.POISONED:
            raise PoisonedDeviceError(f"the device cannot be trusted after this error; save what you need and restart the process: {verdict.message}")
        return verdict

    def _unscale(self, optimizer: Optimizer) -> None:
        """Unscales the gradients now, once, unless that has been done: inside the step it would be done again with every try."""
        scaler = self._context.settings.scaler
        gradients = [parameter.grad for _, parameter in with_gradient(optimizer) if parameter.grad is not None]
        if scaler is None or not scaler.is_enabled() or not gradients:
            return
        snapshot = OptimizerSnapshot.of_gradients(optimizer)
        if len({(grad.device, grad.dtype) for grad in gradients}) == 1 and not any(grad.is_sparse for grad in gradients):
            snapshot.tensors = []  # they are unscaled by one operation in place, which happens or does not

        def unscale() -> None:
            snapshot.take(host=True)
            try:
                scaler.unscale_(optimizer)
            except BaseException:
                self._roll_back(snapshot)
                raise

        try:
            self._insist("unscale the gradients", unscale)
        except RuntimeError as error:
            if "already been called on this optimizer since the last update" not in str(error):
                raise

    def _roll_back(self, half_made: _Step | OptimizerSnapshot) -> None:
        what = "roll back the step that failed, so parameters may be half changed: load the last checkpoint"
        self._insist(what, half_made.restore, through_all=True)

    def _insist(self, what: str, operation: Callable[[], T], *, through_all: bool = False) -> T:
        """Runs what may be called again after an error, until it has ended well.

        Args:
            what: for the error, if there is no room for it.
            operation: to be run.
            through_all: other errors do not end it either: half restored is worse than an interrupt that is raised a little later.
        """
        interrupt, message = None, ""
        for tried in range(_TRIES):
            try:
                if tried:
                    self._release()
                found = operation()
            except BaseException as error:
                if not through_all and self._classify(error) is None:
                    raise
                interrupt = interrupt if isinstance(error, Exception) else error
                message = f"{type(error).__name__}: {error}"
                oom.clear_traceback(error)
            else:
                if interrupt is not None:
                    raise interrupt
                return found
        raise OptimizerStepError(f"there is no room to {what}: {message}")

    def _classify(self, error: BaseException) -> oom.Verdict | None:
        return oom.classify(error, self._context.settings.recovery.is_oom)

    def _release(self) -> None:
        oom.release(devices=self._context.model.devices(), thorough=True)


class _Step:
    """One step of one optimizer, and what is needed to roll it back."""

    def __init__(self, optimizer: Optimizer, streams: RandomStreams) -> None:
        self.optimizer = optimizer
        self.half_made = False
        self.hooks = _DeferredHooks(optimizer)
        self.snapshot = OptimizerSnapshot.of(optimizer)
        self._streams, self._stream_state = streams, streams.read(hosts=True)  # some optimizers round at random

    def restore(self) -> None:
        self.snapshot.restore()
        self._streams.restore(self._stream_state)
        self.half_made = False


class AttemptOrder:
    """Remembers which way of stepping has worked, by kind of step: to fail first every time takes seconds for what takes milliseconds.

    The fastest way is tried again at longer and longer intervals, because memory may have come back.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[int, int, int]] = {}  # the way, steps until the fastest is tried again, and how many they were at first

    def first(self, key: Hashable) -> int:
        """The way to begin with."""
        way, left, pause = self._known.get(key, (0, 0, 0))
        if left:
            self._known[key] = way, left - 1, pause
        return way if left else 0

    def worked(self, key: Hashable, began: int, way: int) -> None:
        """Notes that a step that began with `began` was made by `way`."""
        _, left, pause = self._known.pop(key, (0, 0, 0))
        if not began:  # the fastest has been tried in vain
            left = pause = min(max(1, 2 * pause), LONGEST_PAUSE)
        if way:
            self._known[key] = way, left, pause


def _key(optimizer: Optimizer) -> Hashable:
    """What a step needs depends on: the class, the parameters' sizes, and whether some of them have no state yet."""
    own = [parameter for _, parameter in with_gradient(optimizer)]
    return type(optimizer), sum(p.numel() * p.element_size() for p in own), all(has_state(optimizer, p) for p in own)


class _DeferredHooks:
    """Runs the user's step hooks once for the whole step, however often it is tried: one may clip gradients, another average weights."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.fired = False  # whether the step has begun
        self.failed = False  # whether the error on its way comes from a hook
        self._optimizer = optimizer
        self._before, self._after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks

    def defer(self) -> None:
        self._optimizer._optimizer_step_pre_hooks = OrderedDict({0: self._begin})
        self._optimizer._optimizer_step_post_hooks = OrderedDict()

    def put_back(self) -> None:
        self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks = self._before, self._after

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.fired:
            return
        self.fired = self.failed = True
        self.put_back()  # a hook may take itself off, or add another one
        for hook in tuple(self._before.values()):
            if hook(optimizer, args, kwargs) is not None:
                raise MisuseError("a step hook that changes the arguments of step() does not go with optimizer_step(), which passes none")
        self.defer()
        self.failed = False

    def run_after(self) -> None:
        """Runs the hooks that wait for a step to be made; none where the scaler has skipped it."""
        if self.fired:
            for hook in tuple(self._after.values()):
                hook(self._optimizer, (self._optimizer,), {})


def _run(scaler: torch.amp.GradScaler | None, step: _Step, make: Callable[[], object]) -> None:
    """Runs one try, through the scaler where there is one."""
    injector = misuse.fault_injector
    if injector is not None:
        injector.begin(step, (), ready=step.snapshot.complete and not step.hooks.fired, protected=lambda: step.hooks.failed)
    try:
        if scaler is None:
            make()
        else:
            _through(scaler, step.optimizer, make)
    finally:
        if injector is not None:
            injector.end()


def _through(scaler: torch.amp.GradScaler, optimizer: Optimizer, make: Callable[[], object]) -> None:
    """Steps through the scaler, which skips the step where a gradient is not finite."""
    attributes = vars(optimizer)
    names = ("step", "grad_scale", "found_inf")  # what the scaler and we hang on the optimizer, and an error would leave there
    before = {name: attributes[name] for name in names if name in attributes}
    attributes["step"] = make
    try:
        scaler.step(optimizer)
    finally:
        for name in names:
            attributes.pop(name, None)
        attributes.update(before)


def _step_one_by_one(optimizer: Optimizer, step: Callable[[], object]) -> None:
    groups = optimizer.param_groups
    try:
        for group, parameter in list(with_gradient(optimizer)):
            optimizer.param_groups = [{**group, "params": [parameter]}]
            step()
    finally:
        optimizer.param_groups = groups


def _check(optimizer: object) -> None:
    # accelerate's wrapper is a torch.optim.Optimizer by its class, and has nothing of one: neither hooks nor a step that can be made again.
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        hint = f": pass the {type(inner).__name__} inside it, its .optimizer, if that loses nothing" if isinstance(inner, Optimizer) else ""
        kind = "is no torch.optim.Optimizer" if not isinstance(optimizer, Optimizer) else "never called Optimizer.__init__"
        raise UsageError(f"optimizer_step() got a {type(optimizer).__name__}, which {kind}{hint}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS runs its closure, and with it forward and backward, several times in one step, so a step cannot be rolled back and made again: "
            "call optimizer.step(closure) yourself, with mbs.backward inside the closure"
        )
