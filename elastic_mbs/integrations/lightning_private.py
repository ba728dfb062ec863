"""What the callback needs of Lightning that has no public name. All of it is here; `tests/integrations/test_lightning_private.py` has what it relies on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

Undo = Callable[[], object]


@dataclass(frozen=True)
class TrainingBatch:
    """One batch of automatic optimisation, in place of Lightning's closure over `training_step`, `zero_grad` and `backward`."""

    trainer: Trainer
    arguments: Mapping[str, Any]  # of `training_step`, the batch among them
    optimizer: Optimizer
    index: int  # in its epoch

    @property
    def data(self) -> Any:
        """The batch itself."""
        return self.arguments["batch"]

    @property
    def forward_only(self) -> bool:
        """Whether there is no backward: in the epoch in which `StochasticWeightAveraging` reads the statistics of BatchNorm."""
        return bool(_loop(self.trainer)._skip_backward)

    def zero_grad(self) -> None:
        """Empties the gradients, with the hooks around it, where a window of `accumulate_grad_batches` begins."""
        zero_grad = _loop(self.trainer)._make_zero_grad_fn(self.index, self.optimizer)
        if zero_grad is not None:
            zero_grad()

    def step(self, piece: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """What `training_step` returns for a piece: the loss, divided by `accumulate_grad_batches`, or None, and what came with it."""
        result = _loop(self.trainer)._make_step_fn({**self.arguments, "batch": piece})()
        return result.closure_loss, result.extra

    def end_window(self) -> None:
        """Makes gradients the mean over their window where it ends early: each loss was divided by the length of a whole one."""
        whole = self.trainer.accumulate_grad_batches
        batches = (self.index + 1) % whole
        if batches and not self.trainer.fit_loop._should_accumulate():
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(whole / batches)


def replace_closure(trainer: Trainer, run: Callable[[TrainingBatch], tuple[Tensor | None, dict[str, Any]]]) -> Undo:
    """Has `run` make every batch of automatic optimisation, inside the optimizer's step as Lightning's own closure is."""

    def make_closure(kwargs: Mapping[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        def step() -> ClosureResult:
            loss, extra = run(TrainingBatch(trainer, kwargs, optimizer, batch_idx))
            return ClosureResult(loss, extra=extra)

        return Closure(step_fn=step)

    return replace(_loop(trainer), "_make_closure", make_closure)


def replace(owner: object, name: str, value: object) -> Undo:
    """Hides a method of the class behind one of this instance alone; progress, checkpoints and other instances are not touched."""
    setattr(owner, name, value)
    return partial(vars(owner).pop, name, None)


@contextmanager
def recorded(trainer: Trainer, record: Callable[..., None]) -> Iterator[None]:
    """Has `self.log` call `record(hook, name, value, **options)`. What a hook is called stays as it was where an error passes through."""
    module, results = trainer.lightning_module, trainer._results
    hook = module._current_fx_name
    undo = (lambda: None) if results is None else replace(results, "log", record)  # `predict_step` cannot log
    try:
        yield
    finally:
        undo()
        module._current_fx_name = hook


def log(trainer: Trainer, hook: str, name: str, value: Any, options: Mapping[str, Any]) -> None:
    """What `self.log` has come to, for the whole batch."""
    trainer._results.log(hook, name, value, **options)


def batch_value(metric: Metric) -> Any:
    """What the metric's last `forward` returned, which is what is logged per step; None where only `update` was called."""
    return metric._forward_cache


def set_batch_value(metric: Metric, value: Any) -> None:
    """Sets it."""
    metric._forward_cache = value


def _loop(trainer: Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.automatic_optimization

