"""Modules and random generators that a loss function brings along, and that nobody has named.

A trace runs the loss function for nothing. What it switches and draws is put back, so that training
begins as if there had been no plan.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elastic_mbs.rollback.random_streams import RandomStreams

_MOST = 20_000  # objects that are looked at
_LONG = 1_000  # a container with more items is data
_SKIPPED = {"torch", "numpy", "builtins"}  # packages whose functions and objects are not entered


class Outside:
    """The modes of all modules and the states of all generators that a function leads to."""

    def __init__(self, function: Callable[..., Any]) -> None:
        modules: list[nn.Module] = []
        generators: list[Any] = []
        kinds = _kinds_of_generators()
        for value in _reached(function):
            if isinstance(value, nn.Module):
                modules.append(value)
            elif isinstance(value, kinds):
                generators.append(value)
        self._modes = [(module, module.training) for module in modules]
        self._streams = RandomStreams(generators, ())
        self._drawn = self._streams.read(hosts=True)

    def put_back(self) -> None:
        """Put modes and generators back."""
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
        self._streams.restore(self._drawn)


def _kinds_of_generators() -> tuple[type, ...]:
    found: tuple[type, ...] = (random.Random, torch.Generator)
    if (numpy := sys.modules.get("numpy")) is not None:
        found += (numpy.random.Generator, numpy.random.RandomState)
    return found


def _reached(root: object) -> Iterator[object]:
    """Yield what a function leads to: its variables, the globals that it names, their parts."""
    left, seen = [root], dict[int, object]()
    while left and len(seen) < _MOST:
        value = left.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | Tensor | type):
            continue
        seen[id(value)] = value
        yield value
        left.extend(_parts(value))


def _parts(value: Any) -> list[object]:
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        return [] if _is_skipped(value.__module__) else _parts_of_function(value)
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _LONG else []
    if isinstance(value, list | tuple | set | frozenset):
        return list(value) if len(value) <= _LONG else []
    own = getattr(value, "__dict__", None)
    entered = isinstance(value, nn.Module) or not _is_skipped(type(value).__module__)
    if isinstance(value, types.ModuleType) or not entered or not isinstance(own, dict):
        return []
    return list(own.values())


def _parts_of_function(function: types.FunctionType) -> list[object]:
    found: list[object] = [
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is empty
            continue
    codes = [function.__code__]
    for code in codes:  # with those of the functions inside it
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        named = (function.__globals__.get(name) for name in code.co_names)
        found += [each for each in named if each is not None]
    return found


def _is_skipped(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _SKIPPED
