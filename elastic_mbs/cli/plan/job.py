"""The user's own model, loss function, first batch and optimizer, from a factory in a file."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from elastic_mbs.errors import UsageError


class Job(NamedTuple):
    """A step to be planned: model, loss function, batch, optimizer, options."""

    model: nn.Module
    loss_fn: Callable[[Any], Any]
    batch: Any
    optimizer: torch.optim.Optimizer
    options: dict[str, Any]  # for ElasticMBS

    @property
    def device(self) -> torch.device:
        return next(
            (parameter.device for parameter in self.model.parameters()), torch.device("cpu")
        )


def load(name: str, device: str | None) -> Job:
    """Return the job that `path.py:factory` makes, with its model on `device`.

    Raises:
        UsageError: the factory makes none; the error has one line.
    """
    try:
        return _job(_factory(name)(), device)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise UsageError(f"{name} does not run: {type(error).__name__}: {text}") from error


def _factory(name: str) -> Callable[[], Any]:
    path, _, attribute = name.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        raise UsageError(
            f"{name}: there is no Python file {path or name!r}; name a file and its function, as "
            "in train.py:make"
        )
    # as for a script: what lies beside it can be imported
    sys.path.insert(0, os.fspath(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(f"_planned_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UsageError(f"{name}: {path} has no function {attribute!r}")
    return factory  # type: ignore[no-any-return]  # it is the user's


def _job(made: Any, device: str | None) -> Job:
    if not (
        isinstance(made, tuple)
        and len(made) >= 3
        and isinstance(made[0], nn.Module)
        and callable(made[1])
    ):
        raise UsageError(
            "the factory must return (model, loss_fn, batches), and may add the optimizer's maker "
            "and a dict of options for ElasticMBS"
        )
    model, loss_fn, batches, *more = made
    if isinstance(batches, torch.Tensor | dict) or (
        isinstance(batches, tuple) and all(isinstance(part, torch.Tensor) for part in batches)
    ):
        raise UsageError(
            f"batches are one {type(batches).__name__}: for a single batch give a list of it, "
            "[batch]"
        )
    batch = batches(0) if callable(batches) else next(iter(batches))
    if device is not None:
        model.to(device)
    maker = next(
        (each for each in more if callable(each)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    )
    options = next((each for each in more if isinstance(each, dict)), {})
    return Job(model, loss_fn, batch, maker(model.parameters()), options)
