"""Models by name, built in or the user's own, each made from its seed."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from elastic_mbs.errors import UsageError

from ..streams import Streams, start_streams
from .builtin import BUILTIN
from .subject import Subject, naming

KEPT_BATCHES = 64  # batches of a loader, taken again after the last: a run under stress is short
Factory = Callable[[], Subject]


def find(name: str, device: torch.device | str = "cpu") -> Factory:
    """Return the factory of a built-in model, or of the user's own, `path.py:factory`.

    A built-in one is larger for a GPU. Raises a UsageError where there is no such model.
    """
    path, _, attribute = name.rpartition(":")
    if name in BUILTIN:
        return partial(BUILTIN[name], big=torch.device(device).type != "cpu")
    if not (path and attribute):
        given = (path or name).removesuffix(":")
        own = (
            f"name its factory, as in {given}:make"
            if given.endswith(".py")
            else "or your own as path.py:factory"
        )
        raise UsageError(f"--model {name}: no such model; one of {', '.join(BUILTIN)}, {own}")
    module = _module(Path(path), name)
    factory = getattr(module, attribute, None)
    if factory is None:
        there = [
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise UsageError(
            f"--model {name}: {path} has no function {attribute!r}; its functions: "
            f"{', '.join(there) or 'none'}"
        )
    if not callable(factory):
        raise UsageError(
            f"--model {name}: {path} has {attribute!r}, but that is of type "
            f"{type(factory).__name__} and no function"
        )
    return lambda: _subject(factory(), name)


def make(
    name: str,
    seed: int,
    device: torch.device | str = "cpu",
    *,
    there: torch.device | str | None = None,
) -> Subject:
    """Return the subject made from its seed, the same each time.

    Its size is for `device`; `there` is the device that it goes to instead.
    """
    factory = find(name, device)
    start_streams(seed)
    with naming(name, "the factory does not run"):
        subject = factory()
    if callable(subject.batches):
        subject = replace(subject, batches=partial(_drawn, subject.batches, seed))
    place = torch.device(device if there is None else there)
    if place.type == "cuda":
        _take_workspaces(place)
    subject.model.to(place)
    return subject


@functools.cache
def _take_workspaces(device: torch.device) -> None:
    """Make cuBLAS take the memory that it keeps for good, before anything is cached.

    From the segment of a tensor it would pin all of that segment, beyond any limit.
    """
    square = torch.ones(8, 8, device=device, requires_grad=True)
    with warnings.catch_warnings():
        # In autograd's thread torch warns, once in a process, that cuBLAS comes before anything
        # else.
        warnings.simplefilter("ignore")
        (square @ square).sum().backward()


def _drawn(batches: Callable[[int], Any], seed: int, step: int) -> Any:
    """Return the batch that a function makes for a step.

    It draws from streams of its own, so the batch is the same whenever it is asked for.
    """
    with Streams.now():
        start_streams(seed + 7919 * (step + 1))
        return batches(step)


def _module(path: Path, name: str) -> ModuleType:
    """Return the file as a module, run once in a process."""
    if not path.is_file():
        raise UsageError(f"--model {name}: there is no file {path}")
    if path.suffix != ".py":
        raise UsageError(f"--model {name}: {path} is no Python file, whose name ends in .py")
    path = path.resolve()
    top, dotted = _package(path)
    if os.fspath(top) not in sys.path:
        # As for a script, files beside it can be imported, now and later.
        sys.path.insert(0, os.fspath(top))
    with naming(name, f"{path} does not run"):
        if dotted is not None:
            return importlib.import_module(dotted)
        own = f"_stress_model_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
        if own not in sys.modules:
            spec = importlib.util.spec_from_file_location(own, path)
            assert spec is not None
            assert spec.loader is not None
            # Dataclasses and pickles of the file look their module up.
            sys.modules[own] = module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[own]
                raise
        return sys.modules[own]


def _package(path: Path) -> tuple[Path, str | None]:
    """Return the folder from which a file is imported, and its full name there.

    A module of a package may import its neighbours relatively. The name is None for a file that is
    imported by its path.
    """
    top = path.parent
    parts = [path.stem]
    while (top / "__init__.py").is_file() and top.name.isidentifier():
        top, parts = top.parent, [top.name, *parts]
    known = sys.modules.get(parts[0])
    if (
        len(parts) == 1
        or not path.stem.isidentifier()
        or (known is not None and os.fspath(top / parts[0]) not in getattr(known, "__path__", ()))
    ):
        return path.parent, None
    return top, ".".join(parts)


def _subject(made: Any, name: str) -> Subject:
    """Return the result of a factory as a `Subject`.

    It may be a tuple of model, loss function and batches, and after them the optimizer's maker and
    options.
    """
    if isinstance(made, Subject):
        return made
    if not (isinstance(made, tuple) and len(made) in (3, 4, 5)):
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        wanted = (
            "(model, loss_fn, batches), and may add the optimizer's maker and a dict of options "
            "for ElasticMBS"
        )
        raise UsageError(f"--model {name}: the factory returned {what}; it must return {wanted}")
    model, loss_fn, batches, *more = made
    if not isinstance(model, nn.Module) or not callable(loss_fn):
        found = f"({type(model).__name__}, {type(loss_fn).__name__}, …)"
        raise UsageError(
            f"--model {name}: the factory returned {found}: not a module and a loss function"
        )
    given: dict[str, Any] = {}
    for number, each in zip(("fourth", "fifth"), more, strict=False):
        if not (isinstance(each, dict) or callable(each)):
            wanted = (
                "a function that makes the optimizer from the parameters, or a dict of options "
                "for ElasticMBS"
            )
            raise UsageError(
                f"--model {name}: the {number} is {type(each).__name__}; it must be {wanted}"
            )
        given["options" if isinstance(each, dict) else "optimizer"] = each
    return Subject(model, loss_fn, _batches(batches, name), name=name, **given)


def _batches(batches: Any, name: str) -> Any:
    """Return batches as a `Subject` has them: a sequence, or a function of the step's number."""
    kind = type(batches).__name__
    if isinstance(batches, Tensor | Mapping | str | bytes):
        raise UsageError(
            f"--model {name}: batches are one {kind}: for a single batch give a list of it, [batch]"
        )
    if inspect.isgeneratorfunction(batches) and not inspect.signature(batches).parameters:
        batches = batches()
    if callable(batches) and not isinstance(batches, Iterable):
        return batches
    if not isinstance(batches, Iterable):
        raise UsageError(
            f"--model {name}: batches are {kind}: give a list, a loader, a generator, or a "
            "function of the step's number"
        )
    batches = batches if isinstance(batches, Sequence) else list(islice(batches, KEPT_BATCHES))
    if not batches:
        raise UsageError(f"--model {name}: there are no batches")
    return batches
