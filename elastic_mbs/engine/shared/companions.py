"""Modules and random generators that a step uses and that were not given.

A discriminator's statistics, a centre or a queue in a module of the loss: a replay would move them
twice. A generator of the user's own would go on from where a failed attempt has left it. They are
looked for once for each loss function, in what the function can reach by name: its closure, the
globals that its code names, the object that it is bound to, its arguments, and so on from there.
Nothing is put in the way of the step itself: a hook on every module would make `torch.compile`
compile twice.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elastic_mbs.rollback.random_streams import check_generators

_MOST = 5_000  # objects that are looked at
_NUMPYS = {"numpy.random._generator", "numpy.random.mtrand"}
_CONTAINERS = {dict, list, tuple, set, frozenset}
_LONG = 100  # items: a longer container holds data
_FOREIGN = {"torch", "numpy", "elastic_mbs", *sys.stdlib_module_names}  # code without modules


class Reached(NamedTuple):
    """The modules and random generators that can be reached from some objects."""

    modules: list[nn.Module]
    generators: list[Any]


def reached(sources: Iterable[object]) -> Reached:
    """Return the modules and random generators that can be reached from some objects."""
    found: dict[nn.Module, None] = {}
    generators: list[Any] = []
    seen: set[int] = set()
    layer = list(sources)
    while layer and len(seen) < _MOST:  # the nearest ones first
        following: list[Any] = []
        for value in layer:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                found.update(dict.fromkeys(filter(_is_readable, value.modules())))
            if _is_generator(value):
                generators.append(value)
            else:
                following += _next(value)
        layer = following
    return Reached(list(found), generators)


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


def _next(value: Any) -> Iterable[Any]:
    """Return what is reached from a value in one step."""
    kind = type(value)  # nothing of the user's runs: an object can make its attributes when asked
    if kind is FunctionType:
        return _of_function(value)
    if kind is MethodType:
        return value.__func__, value.__self__
    if issubclass(kind, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if kind in _CONTAINERS:
        items = value.values() if kind is dict else value
        return items if len(value) <= _LONG else ()
    if issubclass(kind, type | ModuleType | BuiltinFunctionType | torch.Tensor):
        return ()
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    if "__wrapped__" in own:
        return (own["__wrapped__"],)
    if all(_room(base.__module__) in _FOREIGN for base in kind.__mro__):
        return ()
    # What an object of the user's does when it is called is in a function of its class.
    code = "forward" if issubclass(kind, nn.Module) else "__call__"
    return [*own.values(), getattr(kind, code, None)]


def _of_function(function: FunctionType) -> Iterator[Any]:
    if _room(function.__module__) in _FOREIGN - {"elastic_mbs"}:
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


def _is_generator(value: object) -> bool:
    kind = type(value)
    known = issubclass(kind, torch.Generator | random.Random) or kind.__module__ in _NUMPYS
    return known and check_generators([value]) is None


def _is_readable(module: nn.Module) -> bool:
    """Return whether a module's state is in the places where torch keeps it, with a shape."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return not isinstance(module, torch.jit.ScriptModule) and not any(
        tensor is not None and is_lazy(tensor) for tensor in tensors
    )
