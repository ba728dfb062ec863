"""elastic_step: the step function sees a micro-batch, its caller the whole batch."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Unpack, cast

from torch import nn

from elastic_mbs.engine.outcome.result import StepResult
from elastic_mbs.engine.shared.trained_model import modules_of
from elastic_mbs.errors import UsageError
from elastic_mbs.options import Options, check_names
from elastic_mbs.runtime import ElasticMBS


class ElasticStep(Protocol):
    """A decorated step function.

    Attributes:
        mbs: the runtime behind it; on a method, a function from the instance to its runtime.
    """

    mbs: Any

    def __call__(self, *args: Any, **kwargs: Any) -> StepResult:
        """Run the step on the whole batch; gradients are ready when it returns."""


def elastic_step(
    model: nn.Module | Sequence[nn.Module] | Callable[[Any], Any] | None = None,
    **options: Unpack[Options],
) -> Callable[[Callable[..., Any]], ElasticStep]:
    """Decorate a step function: it gets a micro-batch, its caller passes the whole batch.

    ```python
    @elastic_step(model)
    def train_step(batch): return loss_fn(model(batch["x"]), batch["y"])

    result = train_step(batch)                     # gradients are ready
    ```

    On a method, `model` is a function of `self`, and each instance gets its own runtime, a new one
    when its model is another:

    ```python
    class Trainer:
        @elastic_step(lambda self: self.model)
        def train_step(self, batch): ...
    ```

    Args:
        model: as for `ElasticMBS`, or a function from `self` to that; never left out.
        **options: as for `ElasticMBS`.

    Raises:
        UsageError: `model` is none of these, or an option is wrong.
    """
    check_names("elastic_step", options)
    if model is None:
        raise _without_model("the step function")
    if isinstance(model, nn.Module) or not callable(model):
        return lambda fn: _on_function(fn, ElasticMBS(model, **options))
    if isinstance(model, type):
        raise UsageError(
            f"elastic_step({model.__name__}) got a class: give the module itself, or `lambda "
            "self: self.model` on a method"
        )

    def on_method(fn: Callable[..., Any]) -> ElasticStep:
        # `@elastic_step` alone: `model` is the step function then, and `fn` its first batch
        if not callable(fn):
            raise _without_model(getattr(model, "__name__", model))
        return _on_method(fn, model, options)

    return on_method


def _without_model(what: object) -> UsageError:
    return UsageError(
        f"{what} was decorated without its model: write @elastic_step(model) above it"
    )


def _on_function(fn: Callable[..., Any], mbs: ElasticMBS) -> ElasticStep:
    positional = _from_its_name(fn, place=0)

    def step(*args: Any, **kwargs: Any) -> StepResult:
        args = positional(args, kwargs)
        return mbs.backward(fn, *args, **kwargs)

    return _decorated(fn, step, mbs)


def _from_its_name(
    fn: Callable[..., Any], place: int
) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]:
    """Return a function that puts the batch first, also where it is given by its name.

    Args:
        fn: the step function.
        place: the number of parameters before the batch.
    """
    try:
        names = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # of a builtin
        names = []
    named = len(names) > place and names[place].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    name = names[place].name if named else "batch"

    def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if args:
            return args
        if name in kwargs:
            return (kwargs.pop(name),)
        raise UsageError(
            f"{getattr(fn, '__qualname__', fn)}() was called without its batch: give {name} by "
            "position, or by its name"
        )

    return given


def _decorated(fn: Callable[..., Any], step: Callable[..., StepResult], mbs: Any) -> ElasticStep:
    decorated: Any = functools.update_wrapper(step, fn)
    decorated.mbs = mbs
    return cast(ElasticStep, decorated)


@dataclass(frozen=True)
class _Holder:
    """An instance's runtime, kept in the instance so that both end together.

    A deep copy or a pickle of the instance starts without one.
    """

    owner: int = 0  # id of the instance: a shallow copy of it has the same holder, and is another
    modules: Sequence[nn.Module] = ()
    mbs: ElasticMBS | None = None

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()

    def serves(self, modules: Sequence[nn.Module]) -> bool:
        """Return True if these are the same networks.

        A list of them can be made anew for each call, and a model be wrapped.
        """
        return modules == self.modules or _owners(modules) == _owners(self.modules)


def _owners(modules: Sequence[nn.Module]) -> set[int]:
    return {
        id(part)
        for module in modules
        for part in module.modules()
        if part._parameters or part._buffers
    }


def _on_method(
    fn: Callable[..., Any], model: Callable[[Any], Any], options: Options
) -> ElasticStep:
    key = f"_elastic_step_{fn.__qualname__}"

    def runtime_of(owner: Any) -> ElasticMBS:
        try:
            attributes = vars(owner)
        except TypeError as error:
            raise UsageError(
                f"{type(owner).__name__} has no __dict__ to keep its runtime in: use "
                "ElasticMBS(...) directly"
            ) from error
        modules = tuple(modules_of(model(owner)))
        old: _Holder = attributes.get(key) or _Holder()
        own = old.mbs if old.owner == id(owner) else None
        if own is not None and old.serves(modules):
            return own
        # a runtime watches one model, and would put back the old one's state
        new = ElasticMBS(modules, **options)
        attributes[key] = _Holder(id(owner), modules, new)
        if own is not None:
            own.close()
        return new

    positional = _from_its_name(fn, place=1)

    def step(self: Any, /, *args: Any, **kwargs: Any) -> StepResult:
        args = positional(args, kwargs)
        return runtime_of(self).backward(types.MethodType(fn, self), *args, **kwargs)

    return _decorated(fn, step, runtime_of)
