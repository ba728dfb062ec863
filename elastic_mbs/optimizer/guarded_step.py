"""`mbs.optimizer_step(optimizer)`: a step that is made whole or not at all.

Copies are taken of what the step changes, and it is tried:

    as it is  ──OOM──►  rolled back; caches released, copies on the host  ──OOM──►  rolled back; one
    parameter at a time  ──OOM──►  error

The copies make it exact: a step that failed half-way has changed some values and not others, and
neither going on nor starting over from there is right
(docs/internals/autograd.md#the-optimizers-step). A fused step whose state exists allocates nothing, so it gets none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from elastic_mbs.engine import hooks as engine_hooks
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.errors import MisuseError, OptimizerStepError, PoisonedDeviceError, UsageError
from elastic_mbs.events import OptimizerOutOfMemory, format_bytes
from elastic_mbs.memory import oom
from elastic_mbs.optimizer.known import has_state, one_by_one, with_gradient
from elastic_mbs.optimizer.snapshot import OptimizerSnapshot

T = TypeVar("T")

# from the fastest to the one that needs least memory
WAYS = ("as it is", "with the caches let go of", "one parameter at a time")
ONE_BY_ONE = len(WAYS) - 1
LONGEST_PAUSE = 64  # most steps between two tries of the fastest way
_TRIES = 4  # to roll back, each after releasing what can be released
# what the scaler and we put on the optimizer for the length of a step
_HUNG = ("step", "grad_scale", "found_inf", "param_groups")


class GuardedStep:
    """Steps optimizers, exactly or not at all."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._order = AttemptOrder()

    def __call__(self, optimizer: Optimizer, closure: object = None) -> None:
        """See `ElasticMBS.optimizer_step`."""
        refuse_closure(closure)
        _check(optimizer)
        if not any(with_gradient(optimizer)):
            # it changes nothing: for its hooks, and for a scheduler that counts steps
            optimizer.step()
            return
        what = "keep the optimizer's state"
        step = _retry(self._resources, what, lambda: _Step(optimizer, self._resources, self._order))
        _retry(self._resources, what, step.make, passes=step.passes)


def refuse_closure(closure: object) -> None:
    """Refuse a closure: it would be run again with every try of the step."""
    if closure is not None:
        raise UsageError(
            "optimizer_step() takes no closure, which would run forward and backward with "
            "every try: call mbs.backward first"
        )


def _retry(
    context: Resources,
    what: str,
    operation: Callable[[], T],
    *,
    passes: Callable[[], bool] = lambda: False,
) -> T:
    is_oom = context.settings.recovery.is_oom
    return oom.retry(
        what, operation, context.devices, is_oom, error=OptimizerStepError, passes=passes
    )


class _Step:
    """One step of one optimizer.

    Whatever ends `make`, the step is whole, or everything is as it was, or the error has a note.
    """

    def __init__(self, optimizer: Optimizer, context: Resources, order: AttemptOrder) -> None:
        self._optimizer, self._resources, self._order = optimizer, context, order
        self._step = optimizer.step
        self._hooks = _DeferredHooks(optimizer)
        self._hung = {name: value for name, value in vars(optimizer).items() if name in _HUNG}
        states = getattr(context.settings.scaler, "_per_optimizer_states", None)
        # whether it has unscaled, and has stepped
        self._scaler_state: dict[str, Any] = {} if states is None else states[id(optimizer)]
        self._made = False
        self._lost = False  # it ended half-way, and there are no copies
        self._half_made = False  # until all that belongs to it has been done, or been rolled back

    def passes(self) -> bool:
        """Whether the error on its way is not one of our own bookkeeping, to be retried: a hook of the user's, or a step that has been lost."""
        return self._hooks.running or self._lost

    def make(self) -> None:
        """Makes the step.

        After an out-of-memory error it can be called again, and goes on from what has been done.
        """
        try:
            if not self._made:
                _retry(self._resources, "unscale the gradients", self._unscale)
                self._remember(OptimizerSnapshot.of(self._optimizer))
                self._try_in_order()
            self._hooks.run_after()
        except BaseException as error:
            if self._half_made or self._made:
                error.add_note(f"elastic_mbs: {self._settle()}.")
            raise
        finally:
            if self._half_made:  # an interrupt between the lines above
                self._settle()

    def _remember(self, snapshot: OptimizerSnapshot) -> None:
        self._snapshot = snapshot
        self._streams = self._resources.streams.read(hosts=True)  # some optimizers round at random
        self._scaler_before = dict(self._scaler_state)

    def _unscale(self) -> None:
        """Unscales the gradients now, once, unless that has been done: inside the step it would be done again with every try."""
        scaler = self._resources.settings.scaler
        if scaler is None or not scaler.is_enabled():
            return
        if self._half_made:
            self._roll_back()
        gradients = [
            parameter.grad
            for _, parameter in with_gradient(self._optimizer)
            if parameter.grad is not None
        ]
        self._remember(OptimizerSnapshot.of_gradients(self._optimizer))
        # Those of one type are unscaled by one operation in place, which happens or does not.
        if len({(grad.device, grad.dtype) for grad in gradients}) > 1 or any(
            grad.is_sparse for grad in gradients
        ):
            self._snapshot.take(host=True)
            self._half_made = True
        try:
            scaler.unscale_(self._optimizer)
        except RuntimeError as error:
            if "already been called on this optimizer since the last update" not in str(error):
                raise
        self._half_made = False

    def _try_in_order(self) -> None:
        key, name = _key(self._optimizer), type(self._optimizer).__name__
        # a step without copies allocates nothing, one parameter at a time or all of them
        last = (
            ONE_BY_ONE
            if self._snapshot.complete and one_by_one(self._optimizer)
            else ONE_BY_ONE - 1
        )
        began = min(self._order.first(key), last)
        verdict: oom.Verdict | None = None
        # A way that worked before is tried twice: the last one leaves no other.
        for way in [*([began] if began else ()), *range(began, last + 1)]:
            if verdict is not None:
                self._resources.monitor.request_reading()  # the next reading explains it
                self._resources.log.emit(
                    OptimizerOutOfMemory(
                        self._resources.settings.name,
                        name,
                        WAYS[way],
                        verdict.kind.name.lower(),
                        verdict.message,
                    )
                )
                oom.release(devices=self._resources.devices, thorough=True)
            verdict = self._attempt(way)
            if verdict is None:
                self._order.worked(key, began, way)
                self._take_off()
                self._made, self._half_made = True, False
                return
        assert verdict is not None
        how = ", not even one parameter at a time" if last == ONE_BY_ONE else ""
        raise OptimizerStepError(
            f"{name}.step() does not fit{how}. It asked for {format_bytes(verdict.requested)}; "
            f"{self._resources.monitor.latest().in_words()}. "
            f"Copies of what it changes take {format_bytes(self._snapshot.nbytes)}: without them "
            "a step that fails half-way could not go back. "
            "Parameters and state are as they were before it and the gradients are there, so it "
            "may be called again. "
            "Ways out: free what others hold; fused=True (no copies, no temporaries) or "
            "foreach=False; an optimizer with a smaller state; "
            f"optimizer.step() without this guard. The error was: {verdict.message}"
        )

    def _attempt(self, way: int) -> oom.Verdict | None:
        """Tries to step.

        Returns why there was no memory, with everything as it was before, or None after a success.
        """
        self._half_made = True
        try:
            self._hooks.defer()
            self._snapshot.take(host=way > 0)
            self._run(self._one_by_one if way == ONE_BY_ONE else self._step)
            return None
        except Exception as error:
            verdict = oom.classify(error, self._resources.settings.recovery.is_oom)
            if (
                verdict is None
                or verdict.kind is oom.Kind.MASKED
                or self._hooks.running
                or self._runs_without_copies()
            ):
                raise
            oom.clear_traceback(error)
        if verdict.kind is oom.Kind.POISONED:
            raise PoisonedDeviceError(
                "the device cannot be trusted after this error; save what you need and restart "
                f"the process: {verdict.message}"
            )
        self._roll_back()
        return verdict

    def _run(self, make: Callable[[], object]) -> None:
        """Runs one try, through the scaler where there is one: it skips the step where a gradient is not finite."""
        injector, hooks = engine_hooks.fault_injector, self._hooks
        scaler = self._resources.settings.scaler
        if injector is not None:
            injector.begin(
                self,
                (),
                ready=self._snapshot.complete and not hooks.begun,
                protected=lambda: hooks.running,
            )
        try:
            if scaler is None:
                make()
            else:
                vars(self._optimizer)["step"] = make
                scaler.step(self._optimizer)
        finally:
            if injector is not None:
                injector.end()

    def _one_by_one(self) -> None:
        optimizer = self._optimizer
        self._hooks.begin(optimizer, (optimizer,), {})  # now, while they can see all groups
        for group, parameter in list(with_gradient(optimizer)):
            optimizer.param_groups = [{**group, "params": [parameter]}]
            self._step()

    def _runs_without_copies(self) -> bool:
        return self._hooks.begun and not self._snapshot.complete

    def _settle(self) -> str:
        """Leaves a whole step or none, if there is a way; returns what it leaves."""
        if not self._made and not self._runs_without_copies():
            self._roll_back()
            return "parameters and optimizer state are as they were before this step"
        self._take_off()
        self._made = self._made or self._hooks.ended
        self._lost, self._half_made = not self._made, False
        return (
            "this step has been made"
            if self._made
            else "a fused step, of which no copies are taken, ended half-way: load the last "
            "checkpoint"
        )

    def _roll_back(self) -> None:
        """Puts everything back, through all errors: half restored is worse than an interrupt that is raised a little later."""
        interrupt, message = None, ""
        for tried in range(_TRIES):
            try:
                if tried:
                    oom.release(devices=self._resources.devices, thorough=True)
                self._restore()
            except BaseException as error:
                interrupt = interrupt if isinstance(error, Exception) else error
                message = f"{type(error).__name__}: {error}"
                oom.clear_traceback(error)
            else:
                if interrupt is not None:
                    raise interrupt
                return
        self._half_made = False
        what = "roll back the step that failed, so parameters may be half changed: load the last checkpoint"
        raise OptimizerStepError(f"there is no room to {what}: {message}")

    def _restore(self) -> None:
        self._take_off()
        self._snapshot.restore()
        self._resources.streams.restore(self._streams)
        self._scaler_state.update(self._scaler_before)
        self._half_made = False

    def _take_off(self) -> None:
        """Takes off the optimizer what was put on it for the step."""
        self._hooks.put_back()
        attributes = vars(self._optimizer)
        for name in _HUNG:
            if name not in self._hung:
                attributes.pop(name, None)
        attributes.update(self._hung)


class AttemptOrder:
    """Remembers which way of stepping has worked, by kind of step: to fail first every time takes seconds for what takes milliseconds.

    The fastest way is tried again at longer and longer intervals, because memory may have come
    back.
    """

    def __init__(self) -> None:
        # the way, steps until the fastest is tried again, and how many they were at first
        self._known: dict[Hashable, tuple[int, int, int]] = {}

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
    return (
        type(optimizer),
        sum(p.numel() * p.element_size() for p in own),
        all(has_state(optimizer, p) for p in own),
    )


class _DeferredHooks:
    """Runs the user's step hooks once for the whole step, however often it is tried: one may clip gradients, another average weights."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.begun = False  # the hooks before the step have been run
        self.ended = False  # the latest call of `step` has ended
        self.running = False  # a hook of the user's runs, or has failed
        self._optimizer = optimizer
        self._before, self._after = (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
        )
        self._left = list(self._before.values())  # to be run

    def defer(self) -> None:
        self._optimizer._optimizer_step_pre_hooks = OrderedDict({0: self.begin})
        self._optimizer._optimizer_step_post_hooks = OrderedDict({0: self._end})

    def put_back(self) -> None:
        self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks = (
            self._before,
            self._after,
        )

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.begun:
            return
        self.put_back()  # a hook may take itself off, or add another one
        while self._left:
            self.running = True
            if self._left.pop(0)(optimizer, args, kwargs) is not None:
                raise MisuseError(
                    "a step hook that changes the arguments of step() does not go with "
                    "optimizer_step(), which passes none"
                )
            self.running = False
        self.defer()
        self._left, self.begun = list(self._after.values()), True

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.ended = True

    def run_after(self) -> None:
        """Runs the hooks that wait for a step to be made; none where the scaler has skipped it."""
        while self.begun and self._left:
            self.running = True
            self._left.pop(0)(self._optimizer, (self._optimizer,), {})
            self.running = False


def _check(optimizer: object) -> None:
    # accelerate's wrapper is a torch.optim.Optimizer by its class, and has nothing of one: neither
    # hooks nor a step that can be made again.
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        hint = (
            f": pass the {type(inner).__name__} inside it, its .optimizer, if that loses nothing"
            if isinstance(inner, Optimizer)
            else ""
        )
        kind = (
            "is no torch.optim.Optimizer"
            if not isinstance(optimizer, Optimizer)
            else "never called Optimizer.__init__"
        )
        raise UsageError(f"optimizer_step() got a {type(optimizer).__name__}, which {kind}{hint}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS runs its closure, and with it forward and backward, several times in one step, "
            "so a step cannot be rolled back and made again: "
            "call optimizer.step(closure) yourself, with mbs.backward inside the closure"
        )
