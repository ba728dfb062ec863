"""`mbs.optimizer_step(optimizer)`: a step that is made whole or not at all.

Room is made before the step where its need is known to exceed what is free. Then copies are taken of what it will change, and it is tried:

    as it is  ──OOM──►  put back; caches let go of, copies moved to the host; again  ──OOM──►  put back; one parameter at a time  ──OOM──►  error

The copies are what makes it exact: a step that failed half-way has moved some values and not others, and neither going on nor starting over from
there is right (shared/reference/autograd.md, "optimizer.step()"). A fused step whose state is there allocates nothing, so it gets none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from elastic_mbs.engine import misuse
from elastic_mbs.engine.context import Parts
from elastic_mbs.engine.floor import facts_of, last_headroom
from elastic_mbs.errors import MisuseError, OptimizerStepError, PoisonedDeviceError, UsageError
from elastic_mbs.events import OptimizerOutOfMemory, format_bytes
from elastic_mbs.memory import oom
from elastic_mbs.optimizer.known import has_state, is_torchs, need_of, one_by_one, only_in_place, with_gradient
from elastic_mbs.optimizer.snapshot import Undo
from elastic_mbs.rollback.random_streams import StreamState

MARGIN = 0.02
"""Fraction of the device that stays free beside the copies."""

Way = Callable[[], object]


def optimizer_step(parts: Parts, optimizer: Optimizer) -> None:
    """Steps, exactly or not at all.

    Raises:
        UsageError: not an optimizer, or one whose step cannot be made again.
        OptimizerStepError: it does not fit.
        PoisonedDeviceError: the device cannot be trusted any more.
    """
    _refuse(optimizer)
    _unscale(parts, optimizer)
    step = optimizer.step
    if next(with_gradient(optimizer), None) is None:
        step()  # it changes nothing: for its hooks, and for a scheduler that counts steps
        return
    undo = Undo(optimizer, foreign=not is_torchs(optimizer), values=not only_in_place(optimizer))
    streams = parts.streams.read(slow=True)
    key = _signature(optimizer)
    began = parts.step_ways.first(key)
    copies = _make_room_and_copy(parts, optimizer, undo, began[0])
    ways: list[tuple[str, Way]] = [("", step), ("with the caches let go of", step)]
    if one_by_one(optimizer):
        ways.append(("one parameter at a time", partial(_each, parts, optimizer, step, undo)))
    learning = _Learning(parts, optimizer)
    verdict: oom.Verdict | None = None
    first = True
    with _HooksOnce(optimizer) as hooks:
        for number, (action, way) in enumerate(ways[began[1] :], began[1]):
            if verdict is not None:
                parts.log.emit(
                    OptimizerOutOfMemory(parts.settings.name, type(optimizer).__name__, action, verdict.kind.name.lower(), verdict.message)
                )
                _let_go(parts, undo)
                first = False
            verdict = _attempt(parts, optimizer, way, undo, hooks, streams)
            if verdict is None:
                parts.step_ways.worked(key, began, (max(copies, int(number > 0 and _has_host(parts))), number))
                break
    if verdict is not None:
        how = ", not even one parameter at a time" if one_by_one(optimizer) else ""
        raise OptimizerStepError(
            f"{type(optimizer).__name__}.step() does not fit{how}. It asked for {format_bytes(verdict.requested)}; {facts_of(last_headroom(parts))}. "
            "Parameters and state are as they were before it and the gradients are there, so it may be called again. "
            "Ways out: free what others hold; fused=True (no temporaries) or foreach=False; an optimizer with a smaller state. "
            f"The error was: {verdict.message}"
        )
    if first:  # else the copies have moved, and with them what a peak would be compared with
        learning.end()
    hooks.fire_after()


def _refuse(optimizer: object) -> None:
    # accelerate's wrapper is a torch.optim.Optimizer by its class, and has nothing of one: neither hooks nor a step that can be made again.
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        hint = f": pass the {type(inner).__name__} inside it, its .optimizer, if that loses nothing" if isinstance(inner, Optimizer) else ""
        kind = "is no torch.optim.Optimizer" if not isinstance(optimizer, Optimizer) else "never called Optimizer.__init__"
        raise UsageError(f"optimizer_step() got a {type(optimizer).__name__}, which {kind}{hint}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS runs its closure, and with it forward and backward, several times in one step, so a step cannot be taken back and made again: "
            "call optimizer.step(closure) yourself, with mbs.backward inside the closure"
        )


# ---------------------------------------------------------------------- before the step


def _unscale(parts: Parts, optimizer: Optimizer) -> None:
    """Unscales the gradients now, once, unless that has been done: inside the step it would be done again with every try."""
    scaler = parts.settings.scaler
    gradients = [parameter.grad for _, parameter in with_gradient(optimizer) if parameter.grad is not None]
    if scaler is None or not scaler.is_enabled() or not gradients:
        return
    # One group of gradients is unscaled by one operation in place, which happens or does not. Of several, some may be done when another fails.
    several = len({(grad.device, grad.dtype, grad.layout) for grad in gradients}) > 1 or any(grad.is_sparse for grad in gradients)
    undo = Undo.of_gradients(optimizer) if several else None
    verdict = None
    for host in (False, True):
        try:
            if undo is not None:
                undo.take(host=host)
            scaler.unscale_(optimizer)
            return
        except Exception as error:
            if "already been called on this optimizer since the last update" in str(error):
                return
            verdict = oom.classify(error, parts.settings.recovery.is_oom)
            if undo is not None:
                undo.restore()
            if verdict is None:
                raise
            oom.forget(error)
        oom.release(devices=parts.inventory.devices(), thorough=True)
    assert verdict is not None
    raise OptimizerStepError(f"there is no room to unscale the gradients; nothing was changed, so it may be called again: {verdict.message}")


def _make_room_and_copy(parts: Parts, optimizer: Optimizer, undo: Undo, begin: int) -> int:
    """Takes the copies, in the first way from `begin` on that works; returns its number."""
    need = need_of(optimizer, parts.optimizer_needs.get(_signature(optimizer)))
    seen, usage = last_headroom(parts), parts.meter.usage()
    host = False
    if seen is not None:
        cached = usage.reserved - usage.allocated if usage is not None else 0
        if need.total > seen.free and not begin:
            oom.release(devices=parts.inventory.devices(), thorough=True)
        host = _has_host(parts) and seen.free + cached < need.total + undo.nbytes + MARGIN * seen.total
    verdict = None
    places = ((host, False), (True, False), (True, True))  # at last one by one, where there is memory but no large block of it
    for number, (place, apart) in enumerate(places[begin:], begin):
        try:
            undo.take(host=place, apart=apart)
            return number
        except Exception as error:
            verdict = oom.classify(error, parts.settings.recovery.is_oom)
            if verdict is None:
                raise
            oom.forget(error)
        oom.release(devices=parts.inventory.devices(), thorough=True)
    assert verdict is not None
    raise OptimizerStepError(
        f"there is no room for copies of what {type(optimizer).__name__}.step() changes ({format_bytes(undo.nbytes)}), without which a step that "
        f"fails half-way could not be taken back; {facts_of(last_headroom(parts))}. Nothing was changed. Ways out: fused=True, which needs none; "
        f"free memory; or optimizer.step() without this guard. The error was: {verdict.message}"
    )


def _has_host(parts: Parts) -> bool:
    """Whether the host's memory is another than the device's. A budget stands for a device."""
    seen = last_headroom(parts)
    return parts.devices[0].type != "cpu" or (seen is not None and seen.source == "budget")


def _let_go(parts: Parts, undo: Undo) -> None:
    """Between two tries: frees what can be freed, and moves the copies out of the way."""
    oom.release(devices=parts.inventory.devices(), thorough=True)
    if _has_host(parts):
        try:
            undo.to_host()
        except Exception as error:
            if oom.classify(error, parts.settings.recovery.is_oom) is None:
                raise
            oom.forget(error)  # then they stay where they are


# ---------------------------------------------------------------------- the step


def _attempt(parts: Parts, optimizer: Optimizer, way: Way, undo: Undo, hooks: _HooksOnce, streams: StreamState) -> oom.Verdict | None:
    """Tries to step; after an error everything is put back. Returns what sort of out-of-memory it was, or None after a success."""
    watch = misuse.attempt_watch
    try:
        if watch is None:
            _run(parts.settings.scaler, optimizer, way)
        else:
            watch.begin(hooks, (), ready=undo.complete and not hooks.fired, protected=lambda: hooks.failed)
            try:
                _run(parts.settings.scaler, optimizer, way)
            finally:
                watch.end()
        return None
    except BaseException as error:
        if hooks.fired and not hooks.failed and not undo.complete:
            error.add_note("elastic_mbs: a fused step, of which no copies are taken, ended half-way: load the last checkpoint.")
            raise
        undo.restore()
        parts.streams.restore(streams)  # one may round at random
        ours = isinstance(error, Exception) and not hooks.failed
        verdict = oom.classify(error, parts.settings.recovery.is_oom) if ours else None
        if verdict is None or verdict.kind is oom.Kind.MASKED:
            error.add_note("elastic_mbs: parameters and optimizer state are as they were before this step.")
            raise
        oom.forget(error)
    if verdict.kind is oom.Kind.POISONED:
        raise PoisonedDeviceError(f"the device cannot be trusted after this error; save what you need and restart the process: {verdict.message}")
    return verdict


def _run(scaler: torch.amp.GradScaler | None, optimizer: Optimizer, way: Way) -> None:
    """One try, through the scaler where there is one: it leaves the step out where a gradient is not finite."""
    if scaler is None:
        way()
        return
    attributes = vars(optimizer)
    names = ("step", "grad_scale", "found_inf")  # what the scaler and we hang on the optimizer, and what an error would leave there
    before = {name: attributes[name] for name in names if name in attributes}
    if way != optimizer.step:
        attributes["step"] = way
    try:
        scaler.step(optimizer)
    finally:
        for name in names:
            attributes.pop(name, None)
        attributes.update(before)


def _each(parts: Parts, optimizer: Optimizer, step: Way, undo: Undo) -> None:
    """Steps the parameters one after the other; one that fails is put back by itself and tried once more."""
    groups = optimizer.param_groups
    try:
        for group, parameter in list(with_gradient(optimizer)):
            optimizer.param_groups = [{**group, "params": [parameter]}]
            try:
                step()
                continue
            except Exception as error:
                if oom.classify(error, parts.settings.recovery.is_oom) is None:
                    raise
                oom.forget(error)
            undo.restore(parameter)
            oom.release(devices=[parameter.device], thorough=True)
            step()
    finally:
        optimizer.param_groups = groups


class _HooksOnce:
    """Lets the user's step hooks run once for the whole step, however often it is tried: one may clip gradients, another average weights.

    Attributes:
        fired: whether the step has begun.
        failed: whether the error that is on its way comes out of a hook.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.fired = self.failed = False
        self._optimizer = optimizer
        self._before: dict[int, Any] = {}
        self._after: dict[int, Any] = {}

    def __enter__(self) -> _HooksOnce:
        before, after = self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks
        self._before, self._after = dict(before), dict(after)
        # In their own places, so that one that takes itself off, or another one on, finds what it looks for.
        before.clear()
        before[-1] = self._begin
        for key, hook in self._before.items():
            before[key] = self._once(hook)
        for key in self._after:
            after[key] = _nothing
        return self

    def __exit__(self, *error: object) -> None:
        before, after = self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks
        before.pop(-1, None)
        for hooks, own in ((before, self._before), (after, self._after)):
            for key in own.keys() & hooks.keys():
                hooks[key] = own[key]

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.fired = True

    def _once(self, hook: Any) -> Callable[[Optimizer, Any, Any], None]:
        ran = False

        def run(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal ran
            if ran:
                return
            ran = self.failed = True
            if hook(optimizer, args, kwargs) is not None:
                raise MisuseError("a step hook that changes the arguments of step() does not go with optimizer_step(), which passes none")
            self.failed = False

        return run

    def fire_after(self) -> None:
        """Runs the hooks that wait for a step to be made; none where the scaler has left it out."""
        if self.fired:
            for key, hook in self._after.items():
                if key in self._optimizer._optimizer_step_post_hooks:
                    hook(self._optimizer, (self._optimizer,), {})


def _nothing(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """In the place of a hook that waits."""


# ---------------------------------------------------------------------- what steps of others' optimizers take


class _Learning:
    """Measures what a step takes, where that is not known, for the next one like it."""

    def __init__(self, parts: Parts, optimizer: Optimizer) -> None:
        self._parts = parts
        self._signature = _signature(optimizer)
        self._before: int | None = None
        if not one_by_one(optimizer) and self._signature not in parts.optimizer_needs:
            parts.meter.reset_peak()
            usage = parts.meter.usage()
            self._before = usage.allocated if usage is not None else None

    def end(self) -> None:
        """The step was made."""
        usage = self._parts.meter.usage() if self._before is not None else None
        if usage is not None and self._before is not None:
            self._parts.optimizer_needs[self._signature] = max(0, usage.peak_allocated - self._before)


def _signature(optimizer: Optimizer) -> tuple[str, int, bool]:
    """What a step's need is kept by: class, bytes of the parameters, and whether some of them have no state yet."""
    size, fresh = 0, False
    for _, parameter in with_gradient(optimizer):
        size += parameter.numel() * parameter.element_size()
        fresh = fresh or not has_state(optimizer, parameter)
    return type(optimizer).__qualname__, size, fresh
