"""Modules and random generators that a step uses and that were not given.

A discriminator's statistics, a centre or a queue in a module of the loss: a replay would move them
twice. A generator of the user's own would go on from where a failed attempt has left it. They are
looked for in what the loss function can reach by name: its closure, the globals that its code
names, the object that it is bound to, its arguments, and so on from there. The first call of a loss
function looks far; later ones look at the nearest objects alone, for what has been made since.
Nothing is put in the way of the step itself: a hook on every module would make `torch.compile`
compile twice.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from itertools import repeat
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elastic_mbs.rollback.attributes import Numbers, containers_of, is_torchs, tensors_of
from elastic_mbs.rollback.by_class import ByClass

FAR, NEAR = 5_000, 100  # objects that are looked at
_NUMPYS = {"numpy.random._generator", "numpy.random.mtrand"}
_CONTAINERS = {dict, list, tuple, set, frozenset}
_LONG = 100  # items: a longer container holds data
_WITHOUT_MODULES = {"torch", "numpy", *sys.stdlib_module_names}  # code that reaches none
_FOREIGN = {"elastic_mbs", *_WITHOUT_MODULES}  # objects that hold none
_DEAD_ENDS = type | ModuleType | BuiltinFunctionType | torch.Tensor
_ATOMS = {type(None), bool, int, float, str, bytes, torch.Tensor, nn.Parameter, torch.device}


class Reached(NamedTuple):
    """The modules and random generators that can be reached from some objects."""

    modules: list[nn.Module]
    generators: list[Any]


def reached(
    sources: Iterable[object], *, known: Container[nn.Module] = (), most: int = FAR
) -> Reached:
    """Return the modules and random generators that can be reached from some objects.

    Args:
        sources: the objects.
        known: modules that are left out, with everything behind them.
        most: the number of objects to look at, the nearest ones first.
    """
    found: dict[nn.Module, None] = {}
    generators: list[Any] = []
    seen: set[int] = set()
    waiting = list(sources)
    for value in waiting:  # it grows on the way
        kind: Any = type(value)  # mypy takes a class for one without a hash
        following = _following(kind)
        if following is None or id(value) in seen:
            continue
        if len(seen) == most:
            break
        seen.add(id(value))
        if isinstance(value, nn.Module):
            if value in known:
                continue
            found.update(dict.fromkeys(filter(_is_readable, value.modules())))
        if following is _of_generator:
            generators.append(value)
        waiting += following(value)
    return Reached([module for module in found if module not in known], generators)


def can_keep_state(module: nn.Module) -> bool:
    """Return whether a step can change state of a module.

    Of torch's own modules a step changes running statistics. A module of the user's can change its
    buffers, and its attributes that are tensors, containers, numbers, flags or strings.
    """
    kind: Any = type(module)
    if is_torchs(module):
        return "running_mean" in module._buffers
    numbers = not _is_foreign(kind) and any(
        map(isinstance, Numbers.of([module]).values, repeat(int | float | str))
    )
    return bool(numbers or module._buffers or tensors_of(module) or containers_of(module))


def caller() -> Iterator[Any]:
    """Yield the values that the code outside of this package sees which has called it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _room(frame.f_globals.get("__name__")) == "elastic_mbs":
        frame = frame.f_back
    there = frame.f_locals
    values = list(there.values())
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(there) is dict:
        there.clear()  # a copy, which the frame of a function keeps before Python 3.13
    yield from values
    yield from _globals_of(frame.f_code, frame.f_globals)


# Asked of the same few classes in every call.
@ByClass
def _following(kind: Any) -> Callable[[Any], Iterable[Any]] | None:
    """Return the function that gives all that is reached in one step from a value of a class.

    Returns:
        The function; None where nothing is reached from any value of the class.
    """
    # Nothing of the user's runs: an object can make its attributes when asked.
    if kind in _ATOMS or issubclass(kind, _DEAD_ENDS):
        return None
    if issubclass(kind, torch.Generator | random.Random) or kind.__module__ in _NUMPYS:
        return _of_generator
    if kind is FunctionType:
        return _of_function
    if kind is MethodType:
        return lambda method: (method.__func__, method.__self__)
    if issubclass(kind, functools.partial):
        return lambda each: (each.func, *each.args, *each.keywords.values())
    if kind in _CONTAINERS:
        return _of_dict if kind is dict else _of_items
    return _of_object


def _of_generator(value: Any) -> Iterable[Any]:
    return ()


def _of_items(value: Collection[Any]) -> Iterable[Any]:
    return value if len(value) <= _LONG else ()


def _of_dict(value: Mapping[Any, Any]) -> Iterable[Any]:
    return value.values() if len(value) <= _LONG else ()


def _of_object(value: Any) -> Iterable[Any]:
    kind: Any = type(value)
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    if "__wrapped__" in own:
        return (own["__wrapped__"],)
    if _is_foreign(kind):  # nn.Sequential can hold modules of the user's
        return own.get("_modules", {}).values() if issubclass(kind, nn.Module) else ()
    # What an object of the user's does when it is called is in a function of its class.
    code = "forward" if issubclass(kind, nn.Module) else "__call__"
    return [*own.values(), getattr(kind, code, None)]


def _of_function(function: FunctionType) -> Iterator[Any]:
    if _room(function.__module__) in _WITHOUT_MODULES:
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from _globals_of(function.__code__, function.__globals__)
    if hasattr(function, "__wrapped__"):
        yield function.__wrapped__


def _globals_of(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the globals that some code names, and those of the functions inside it."""
    for name in code.co_names:
        if name in names:
            yield names[name]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner, names)


def _room(name: str | None) -> str:
    """Return the package of a module, by the module's name."""
    return (name or "").partition(".")[0]


@ByClass
def _is_foreign(kind: Any) -> bool:
    return all(_room(base.__module__) in _FOREIGN for base in kind.__mro__)


def _is_readable(module: nn.Module) -> bool:
    """Return whether a module's state is in the places where torch keeps it, with a shape."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return not isinstance(module, torch.jit.ScriptModule) and not any(
        tensor is not None and is_lazy(tensor) for tensor in tensors
    )
