"""What `lightning_private` relies on in Lightning.

A test that fails here names what a new version has changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import Metric

from elastic_mbs.integrations.lightning_private import EVALUATIONS

SIGNATURES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "the closure of a batch is made here": (
        _AutomaticOptimization._make_closure,
        ["self", "kwargs", "optimizer", "batch_idx"],
    ),
    "training_step runs here": (_AutomaticOptimization._make_step_fn, ["self", "kwargs"]),
    "zero_grad runs here": (
        _AutomaticOptimization._make_zero_grad_fn,
        ["self", "batch_idx", "optimizer"],
    ),
    "the closure": (Closure.__init__, ["self", "step_fn", "backward_fn", "zero_grad_fn"]),
    "its result": (ClosureResult.__init__, ["self", "closure_loss", "extra"]),
    "whether a window goes on": (_FitLoop._should_accumulate, ["self"]),
    "on_before_backward": (Precision.pre_backward, ["self", "tensor", "module"]),
    "on_after_backward": (Precision.post_backward, ["self", "tensor", "module"]),
}


@pytest.mark.parametrize("what", SIGNATURES)
def test_lightnings_functions_take_what_they_took(what: str) -> None:
    function, names = SIGNATURES[what]
    assert list(inspect.signature(function).parameters) == names


def code(function: Any) -> str:
    assert isinstance(inspect.unwrap(function), FunctionType)
    return inspect.getsource(inspect.unwrap(function))


@pytest.mark.parametrize(
    ("what", "function", "line"),
    [
        (
            "the loop makes its closure by the method that is replaced",
            _AutomaticOptimization.run,
            "self._make_closure(kwargs, optimizer, batch_idx)",
        ),
        (
            "a closure without zero_grad and backward runs its step alone",
            Closure.closure,
            "if self._backward_fn is not None",
        ),
        (
            "training_step gets the values of its arguments in order",
            _AutomaticOptimization._training_step,
            '"training_step", *kwargs.values()',
        ),
        (
            "the loss is divided by the length of a whole window",
            _AutomaticOptimization._training_step,
            "trainer.accumulate_grad_batches)",
        ),
        ("self.log goes through the results of the loop", LightningModule.log, "results.log("),
        (
            "its batch size is that of results.batch",
            _ResultCollection.log,
            "self._extract_batch_size(self[key], batch_size, meta)",
        ),
        ("the trainer knows those results", Trainer._results.fget, "active_loop._results"),
        (
            "steps are looked up on the strategy",
            call._call_strategy_hook,
            "getattr(trainer.strategy, hook_name)",
        ),
        (
            "a metric is logged by what its last forward returned",
            Metric.forward,
            "self._forward_cache =",
        ),
        (
            "GradScaler scales in pre_backward, and the rest are hooks",
            MixedPrecision.pre_backward,
            "self.scaler.scale(tensor)",
        ),
    ],
)
def test_lightning_does_what_it_did(what: str, function: Any, line: str) -> None:
    assert line in code(function), what


def test_lightning_has_the_attributes_that_are_used() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    assert isinstance(loop, _AutomaticOptimization)
    assert loop._skip_backward is False
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
    assert all(callable(getattr(Strategy, name)) for name in EVALUATIONS)
    assert isinstance(inspect.getattr_static(Metric, "metric_state"), property)
