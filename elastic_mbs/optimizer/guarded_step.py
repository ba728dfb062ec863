"""`mbs.optimizer_step(optimizer)`: a step that is made whole or not at all.

The tensors that the step changes are copied first. Then it is tried in three ways:

    as it is
       │ OOM, rolled back
       ▼
    with the caches released and the copies on the host
       │ OOM, rolled back
       ▼
    one parameter at a time ──OOM──► error

The copies make it exact. A step that failed half-way has changed some values and not others, so
neither going on nor starting over from there is right
(docs/internals/autograd.md#the-optimizers-step). A fused step whose state exists allocates nothing
and needs no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer

from elastic_mbs.engine import hooks as engine_hooks
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.errors import OptimizerStepError, PeerError, PoisonedDeviceError, UsageError
from elastic_mbs.events import OptimizerOutOfMemory, format_bytes
from elastic_mbs.memory import oom
from elastic_mbs.optimizer.hooks import DeferredHooks
from elastic_mbs.optimizer.known import has_state, one_by_one, with_gradient
from elastic_mbs.optimizer.reach import HUNG
from elastic_mbs.optimizer.snapshot import OptimizerSnapshot

T = TypeVar("T")
Gradients = list[tuple[ref[torch.Tensor], int]]  # each with its version

# from the fastest to the one that needs the least memory
WAYS = ("as it is", "with the caches let go of", "one parameter at a time")
ONE_BY_ONE = len(WAYS) - 1
LONGEST_PAUSE = 64  # steps between two tries of the fastest way, at most
_TRIES = 4  # attempts to roll back, each after releasing the caches


class GuardedStep:
    """Stepper of optimizers: a step is made exactly, or not at all."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._order = AttemptOrder()
        # of steps that were taken back after their hooks: the gradients that these have left
        self._hooked: WeakKeyDictionary[Optimizer, Gradients] = WeakKeyDictionary()

    def __call__(self, optimizer: Optimizer, closure: object = None) -> None:
        """Make one step; see `ElasticMBS.optimizer_step`."""
        refuse_closure(closure)
        check_optimizer(optimizer)
        if not any(with_gradient(optimizer)):
            # it changes no parameter; its hooks run, and a scheduler counts it
            optimizer.step()
            return
        # an interrupt between a `torch.no_grad()` block and its exit leaves gradients disabled
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            self._make(optimizer)

    def _make(self, optimizer: Optimizer) -> None:
        what = "keep the optimizer's state"
        step = None
        try:
            try:
                step = _retry(
                    self._resources, what, lambda: _Step(optimizer, self._resources, self._order)
                )
                hooked = self._hooked.pop(optimizer, None)
                if hooked is not None and _retry(
                    self._resources, what, lambda: _are_same(hooked, _gradients(optimizer))
                ):
                    step.skip_hooks_before()
                _retry(self._resources, what, step.make, passes=step.passes)
            except BaseException as error:
                if step is None or not step.voted:
                    self._resources.peers.agree(error)
                raise
        except (OptimizerStepError, PeerError):
            if step is not None and step.hooked:
                with suppress(MemoryError):  # its hooks then run again
                    self._hooked[optimizer] = _gradients(optimizer)
            raise


def refuse_closure(closure: object) -> None:
    """Refuse a closure: it would run again with every try of the step."""
    if closure is not None:
        raise UsageError(
            "optimizer_step() takes no closure, which would run forward and backward with every "
            "try: call mbs.backward first"
        )


def _retry(
    resources: Resources,
    what: str,
    operation: Callable[[], T],
    *,
    passes: Callable[[], bool] = lambda: False,
) -> T:
    is_oom = resources.settings.recovery.is_oom
    return oom.retry(
        what, operation, resources.devices, is_oom, error=OptimizerStepError, passes=passes
    )


class _Step:
    """A step of an optimizer.

    However `make` ends, the step is whole, or nothing has changed, or the error carries a note.
    """

    def __init__(self, optimizer: Optimizer, resources: Resources, order: AttemptOrder) -> None:
        self._optimizer = optimizer
        self._resources = resources
        self._order = order
        self._step = optimizer.step
        self._hooks = DeferredHooks(optimizer)
        self._to_host = False  # the copies of the running try are on the host
        self._hung = {name: value for name, value in vars(optimizer).items() if name in HUNG}
        states = getattr(resources.settings.scaler, "_per_optimizer_states", None)
        # the scaler's notes: unscaled or not, stepped or not
        self._scaler_state: dict[str, Any] = {} if states is None else states[id(optimizer)]
        self.voted = resources.peers.alone  # this rank has told the others that it has made it
        self._agreed = self.voted  # all have made it
        self._made = False
        self._lost = False  # it ended half-way, and there are no copies
        self._half_made = False  # from its first change until it is whole or rolled back

    @property
    def hooked(self) -> bool:
        """True once the hooks before the step have run."""
        return self._hooks.begun

    def skip_hooks_before(self) -> None:
        """Make the step without the hooks before it, which have run already."""
        self._hooks.skip_before()

    def passes(self) -> bool:
        """Return whether an error must pass: a user's hook raised it, or the step is lost."""
        return self._hooks.running or self._lost

    def make(self) -> None:
        """Make the step.

        After an out-of-memory error it can be called again and continues where it stopped.
        """
        try:
            if not self._made:
                _retry(self._resources, "unscale the gradients", self._unscale)
                self._remember(OptimizerSnapshot.of(self._optimizer))
                self._scaler_before = dict(self._scaler_state)
                self._try_in_order()
            if not self.voted:
                self._vote()
            self._hooks.run_after()
        except BaseException as error:
            if self._half_made or self._made:
                error.add_note(f"elastic_mbs: {self._settle()}.")
            raise
        finally:
            if self._half_made:  # an interrupt has struck inside the lines above
                self._settle()

    def _vote(self) -> None:
        """Take the step back where another rank could not make it."""
        self.voted = True
        why = self._resources.peers.agree(None)
        if not why:
            self._agreed = True
            return
        if self._runs_without_copies():
            raise OptimizerStepError(
                "a fused step, of which no copies are taken, was made here and not on another "
                f"rank: load the last checkpoint on all ranks. The other rank: {why}"
            )
        self._made = False
        self._roll_back()
        raise PeerError(
            "another rank could not make this optimizer step, so no rank has made it, and it may "
            f"be made again: {why}"
        )

    def _remember(self, snapshot: OptimizerSnapshot) -> None:
        self._snapshot = snapshot
        self._streams = self._resources.streams.read(hosts=True)  # some optimizers round at random

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Run the user's hooks before the step, once. What they change is not rolled back."""
        if self._hooks.begun:
            return
        # An error of ours among the hooks does not end the step, whose copies are from before them.
        changed = _retry(
            self._resources,
            "run the hooks before the step",
            lambda: self._run_hooks(optimizer, args, kwargs),
            passes=lambda: self._hooks.running,
        )
        if changed:
            self._snapshot.take(host=self._to_host)

    def _run_hooks(self, optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
        changed = self._hooks.begin(optimizer, args, kwargs)
        self._hooks.defer(self._begin)
        if changed:
            self._remember(OptimizerSnapshot.of(self._optimizer))
        return changed

    def _unscale(self) -> None:
        """Unscale the gradients once, now: inside the step every try would do it again."""
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
        self._scaler_before = dict(self._scaler_state)
        # One operation in place unscales all gradients of a type: it happens, or it does not.
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
        key = _key(self._optimizer)
        # a step without copies allocates nothing, whether it takes one parameter or all of them
        singly = self._snapshot.complete and one_by_one(self._optimizer)
        last = ONE_BY_ONE if singly else ONE_BY_ONE - 1
        began = min(self._order.first(key), last)
        verdict: oom.Verdict | None = None
        # A way that worked before is tried twice, because after the last one there is no other.
        for way in [*([began] if began else ()), *range(began, last + 1)]:
            if verdict is not None:
                self._report(verdict, way)
                oom.release(devices=self._resources.devices, thorough=True)
            verdict = self._attempt(way)
            if verdict is None:
                self._order.worked(key, began, way)
                self._take_off()
                self._made, self._half_made = True, False
                return
        assert verdict is not None
        raise self._no_room(verdict, singly=singly)

    def _report(self, verdict: oom.Verdict, following: int) -> None:
        """Emit the event of a failure, with the way that is tried next."""
        self._resources.monitor.request_reading()  # the next reading explains it
        self._resources.log.emit(
            OptimizerOutOfMemory(
                self._resources.settings.name,
                type(self._optimizer).__name__,
                WAYS[following],
                verdict.kind.name.lower(),
                verdict.message,
            )
        )

    def _no_room(self, verdict: oom.Verdict, *, singly: bool) -> OptimizerStepError:
        """Return the error for a step that fits in none of the ways."""
        how = ", at last one parameter at a time" if singly else ""
        fused = any(group.get("fused") for group in self._optimizer.param_groups)
        other = "" if fused else "fused=True (no copies once its state exists) or foreach=False; "
        return OptimizerStepError(
            f"{type(self._optimizer).__name__}.step() ran out of memory each time it was "
            f"tried{how}. "
            f"It asked for {format_bytes(verdict.requested)}; "
            f"{self._resources.monitor.latest().in_words()}. "
            f"Copies of what it changes take {format_bytes(self._snapshot.nbytes)}: without them "
            "a step that fails half-way could not go back. "
            "Parameters and state are as they were before it and the gradients are there, so it "
            "may be called again. "
            f"Ways out: free what others hold; {other}an optimizer with a smaller state; "
            f"optimizer.step() without this guard. The error was: {verdict.message}"
        )

    def _attempt(self, way: int) -> oom.Verdict | None:
        """Try to step in one way.

        Return None after a success; otherwise roll back and return why there was no memory.
        """
        self._half_made = True
        try:
            self._hooks.defer(self._begin)
            self._to_host = way > 0
            self._snapshot.take(host=self._to_host)
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
        """Run one try, through the scaler if there is one.

        The scaler skips the step where a gradient is not finite.
        """
        injector = engine_hooks.fault_injector
        scaler = self._resources.settings.scaler
        hooks = self._hooks
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
        self._begin(optimizer, (optimizer,), {})  # while they can see all groups
        for group, parameter in list(with_gradient(optimizer)):
            optimizer.param_groups = [{**group, "params": [parameter]}]
            self._step()

    def _runs_without_copies(self) -> bool:
        return self._hooks.begun and not self._snapshot.complete

    def _settle(self) -> str:
        """Complete or undo the step where possible, and return the result in words."""
        if not self._runs_without_copies() and not (self._made and self._agreed):
            self._made = False
            self._roll_back()
            return "parameters and optimizer state are as they were before this step"
        self._take_off()
        self._made = self._made or self._hooks.ended
        self._lost = not self._made
        self._half_made = False
        return (
            "this step has been made"
            if self._made
            else "a fused step, of which no copies are taken, ended half-way: load the last "
            "checkpoint"
        )

    def _roll_back(self) -> None:
        """Put everything back, in spite of errors.

        An interrupt is raised a little later: half restored would be worse.
        """
        interrupt = None
        message = ""
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
        raise OptimizerStepError(
            "there is no room to roll back the step that failed, so parameters may be half "
            f"changed: load the last checkpoint: {message}"
        )

    def _restore(self) -> None:
        self._take_off()
        self._snapshot.restore()
        self._resources.streams.restore(self._streams)
        self._scaler_state.update(self._scaler_before)
        self._half_made = False

    def _take_off(self) -> None:
        """Remove from the optimizer the attributes that were set for the step."""
        self._hooks.put_back()
        attributes = vars(self._optimizer)
        for name in HUNG:
            if name not in self._hung:
                attributes.pop(name, None)
        attributes.update(self._hung)


def _gradients(optimizer: Optimizer) -> Gradients:
    """Return which gradients there are, and how often each was changed."""
    found = (parameter.grad for _, parameter in with_gradient(optimizer))
    return [(ref(grad), grad._version) for grad in found if grad is not None]


def _are_same(before: Gradients, now: Gradients) -> bool:
    return len(before) == len(now) and all(
        old() is new() and was == version
        for (old, was), (new, version) in zip(before, now, strict=True)
    )


class AttemptOrder:
    """Memory of the way that has worked for each kind of step.

    Without it every step would fail first, which takes seconds where a step takes milliseconds. The
    fastest way is tried again at growing intervals, because memory may have come back.
    """

    def __init__(self) -> None:
        # the way, the steps left until the fastest is tried again, and that interval
        self._known: dict[Hashable, tuple[int, int, int]] = {}

    def first(self, key: Hashable) -> int:
        """Return the way to begin with."""
        way, left, pause = self._known.get(key, (0, 0, 0))
        if left:
            self._known[key] = way, left - 1, pause
        return way if left else 0

    def worked(self, key: Hashable, began: int, way: int) -> None:
        """Note that a step that began with `began` was made by `way`."""
        _, left, pause = self._known.pop(key, (0, 0, 0))
        if not began:  # the fastest has been tried and has failed
            left = pause = min(max(1, 2 * pause), LONGEST_PAUSE)
        if way:
            self._known[key] = way, left, pause


def _key(optimizer: Optimizer) -> Hashable:
    """Return the facts that a step's need depends on: class, sizes, and if all states exist."""
    own = [parameter for _, parameter in with_gradient(optimizer)]
    return (
        type(optimizer),
        sum(p.numel() * p.element_size() for p in own),
        all(has_state(optimizer, p) for p in own),
    )


def check_optimizer(optimizer: object) -> None:
    """Refuse an object that is no optimizer, and one whose step cannot be made again."""
    # accelerate's wrapper is a torch.optim.Optimizer by class only: it has neither hooks nor a step
    # that can be repeated
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
        if type(optimizer).__module__.partition(".")[0] == "opacus":
            kind = "clips the gradient of each sample and adds noise"
            hint = ", so its step cannot be made again: call its own step()"
        raise UsageError(f"optimizer_step() got a {type(optimizer).__name__}, which {kind}{hint}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS runs its closure, and with it forward and backward, several times in one step, "
            "so a step cannot be rolled back and made again: "
            "call optimizer.step(closure) yourself, with mbs.backward inside the closure"
        )
