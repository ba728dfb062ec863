"""Finds a model by name, built in or the user's own, and makes it from its seed, the same each time."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from elastic_mbs.errors import UsageError

from .models import BUILTIN, ON_GPU
from .subject import Subject, one_line

KEPT_BATCHES = 64
"""Of a loader only so many batches are taken, and taken again after the last: a run under stress is short."""

Factory = Callable[[], Subject]


def find(name: str, device: torch.device | str = "cpu") -> Factory:
    """The factory of a built-in model, or of the user's own.

    Args:
        name: a key of `BUILTIN`, or `path.py:factory`. The factory takes no argument and returns a `Subject`, or a tuple
            `(model, loss_fn, batches)` whose batches are a sequence, a loader, or a function of the step's number; a fourth entry makes the optimizer
            from the parameters.
        device: built-in models are larger for a GPU.

    Raises:
        UsageError: there is no such name, file or function, or the file cannot be run.
    """
    path, colon, attribute = name.rpartition(":")
    if name in BUILTIN:
        return (BUILTIN if torch.device(device).type == "cpu" else ON_GPU)[name]
    if not colon:
        raise UsageError(f"--model {name}: no such model; one of {', '.join(BUILTIN)}, or your own as path.py:factory")
    factory = getattr(_module(Path(path)), attribute, None)
    if not callable(factory):
        raise UsageError(f"--model {name}: {path} has no function {attribute!r}")
    return lambda: _subject(factory(), name)


def make(name: str, seed: int, device: torch.device | str = "cpu", *, there: torch.device | str | None = None) -> Subject:
    """The subject made from its seed: model, batches and random streams are the same each time.

    Args:
        name: as for `find`.
        seed: of torch's, Python's and numpy's random streams.
        device: whose size it has.
        there: where it goes, if not to that device: to look at its parameters beside the count.

    Raises:
        UsageError: there is no such model, or what the factory gives is no subject.
    """
    factory = find(name, device)
    torch.manual_seed(seed)
    random.seed(seed)
    with suppress(ImportError):
        import numpy.random  # by us: whoever imported it between two builds would leave the first of them with another stream

        numpy.random.seed(seed)
    try:
        subject = factory()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"--model {name}: the factory does not run: {one_line(error)}") from error
    subject.model.to(device if there is None else there)
    return subject


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"--model: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"_stress_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--model: {path} is no Python file")
    if spec.name in sys.modules:
        return sys.modules[spec.name]
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles of the file look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise UsageError(f"--model: {path} does not run: {type(error).__name__}: {error}") from error
    return module


def _subject(made: Any, name: str) -> Subject:
    if isinstance(made, Subject):
        return made
    if not (isinstance(made, tuple) and len(made) in (3, 4)):
        raise UsageError(
            f"--model {name}: the factory returned {type(made).__name__}; it must return (model, loss_fn, batches) or a fourth, the optimizer's maker"
        )
    model, loss_fn, batches = made[:3]
    if not isinstance(model, nn.Module) or not callable(loss_fn):
        raise UsageError(
            f"--model {name}: the factory returned ({type(model).__name__}, {type(loss_fn).__name__}, …): not a module and a loss function"
        )
    if not callable(batches) and not isinstance(batches, Sequence):
        if not isinstance(batches, Iterable):
            raise UsageError(f"--model {name}: batches are {type(batches).__name__}: give a list, a loader, or a function of the step's number")
        batches = list(islice(batches, KEPT_BATCHES))
    if isinstance(batches, Sequence) and not batches:
        raise UsageError(f"--model {name}: there are no batches")
    if len(made) == 3:
        return Subject(model, loss_fn, batches, name=name)
    if not callable(made[3]):
        raise UsageError(
            f"--model {name}: the fourth is {type(made[3]).__name__}; it must be a function that makes the optimizer from the parameters"
        )
    return Subject(model, loss_fn, batches, made[3], name=name)
