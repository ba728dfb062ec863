"""elastic_step: the step function sees a micro-batch, its caller the whole batch."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Protocol

from torch import nn

from elastic_mbs.engine.model import modules_of
from elastic_mbs.engine.result import StepResult
from elastic_mbs.errors import UsageError
from elastic_mbs.runtime import ElasticMBS


class ElasticStep(Protocol):
    """A decorated step function.

    Attributes:
        mbs: the runtime behind it; on a method, a function from the instance to its runtime.
    """

    mbs: Any

    def __call__(self, *args: Any, **kwargs: Any) -> StepResult:
        """Runs the step on the whole batch; gradients are ready when it returns."""


def elastic_step(model: nn.Module | Sequence[nn.Module] | Callable[[Any], Any], **options: Any) -> Callable[[Callable[..., Any]], ElasticStep]:
    """Decorates a step function: it gets a micro-batch and returns its loss, its caller passes the whole batch.

    ```python
    @elastic_step(model)
    def train_step(batch): return loss_fn(model(batch["x"]), batch["y"])

    result = train_step(batch)                     # gradients are ready
    ```

    On a method, `model` is a function of `self`, and each instance gets its own runtime, a new one when its model is another:

    ```python
    class Trainer:
        @elastic_step(lambda self: self.model)
        def train_step(self, batch): ...
    ```

    Args:
        model: as for `ElasticMBS`, or a function from `self` to that.
        **options: as for `ElasticMBS`.

    Raises:
        UsageError: `model` is none of these, or an option is wrong.
    """
    if isinstance(model, nn.Module) or not callable(model):
        return lambda fn: _on_function(fn, ElasticMBS(model, **options))
    if isinstance(model, type):
        raise UsageError(f"elastic_step({model.__name__}) got a class: give the module itself, or `lambda self: self.model` on a method")

    def on_method(fn: Callable[..., Any]) -> ElasticStep:
        if not callable(fn):  # `@elastic_step` alone: what was to be the model is the step function, and this is its first batch
            raise UsageError(f"{getattr(model, '__name__', model)} was decorated without its model: write @elastic_step(model) above it")
        return _on_method(fn, model, options)

    return on_method


def _on_function(fn: Callable[..., Any], mbs: ElasticMBS) -> ElasticStep:
    @functools.wraps(fn)
    def step(batch: Any, *args: Any, **kwargs: Any) -> StepResult:
        return mbs.backward(fn, batch, *args, **kwargs)

    step.mbs = mbs  # type: ignore[attr-defined]  # functions take attributes; typing has no word for it
    return step  # type: ignore[return-value]  # for the same reason


class _Holder:
    """An instance's runtime, kept in the instance so that both end together; a copy or a pickle of the instance starts without one.

    Attributes:
        mbs: the runtime.
        owner: gives the instance: a shallow copy of it has the same holder, and is another.
        modules: what the runtime was made for.
    """

    def __init__(self) -> None:
        self.mbs: ElasticMBS | None = None
        self.owner: Callable[[], Any] = lambda: None
        self.modules: list[nn.Module] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Holder:
        return _Holder()

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # slots without one for it: the collector finds the cycle
        return lambda: owner


def _same(modules: Sequence[nn.Module], others: Sequence[nn.Module]) -> bool:
    """Whether they are the same networks: a list of two may be made anew for each call, or a model be wrapped."""
    return (len(modules) == len(others) and all(map(is_, modules, others))) or _owners(modules) == _owners(others)


def _owners(modules: Sequence[nn.Module]) -> set[int]:
    return {id(part) for module in modules for part in module.modules() if part._parameters or part._buffers}


def _on_method(fn: Callable[..., Any], model: Callable[[Any], Any], options: dict[str, Any]) -> ElasticStep:
    key = f"_elastic_step_{fn.__qualname__}"

    def runtime_of(owner: Any) -> ElasticMBS:
        try:
            holder = vars(owner).setdefault(key, _Holder())
        except TypeError as error:
            raise UsageError(f"{type(owner).__name__} has no __dict__ to keep its runtime in: use ElasticMBS(...) directly") from error
        if holder.owner() is not owner:
            holder = vars(owner)[key] = _Holder()
            holder.owner = _reference(owner)
        modules = modules_of(model(owner))
        if holder.mbs is None or not _same(modules, holder.modules):
            # Another model is another run: what this runtime watches, and would put back, is the old one's.
            made = ElasticMBS(modules, **options)
            if holder.mbs is not None:
                holder.mbs.close()
            holder.mbs, holder.modules = made, list(modules)
        mbs: ElasticMBS = holder.mbs
        return mbs

    @functools.wraps(fn)
    def step(self: Any, batch: Any, *args: Any, **kwargs: Any) -> StepResult:
        return runtime_of(self).backward(types.MethodType(fn, self), batch, *args, **kwargs)

    step.mbs = runtime_of  # type: ignore[attr-defined]  # functions take attributes; typing has no word for it
    return step  # type: ignore[return-value]  # for the same reason
