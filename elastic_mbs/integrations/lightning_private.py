"""A Trainer's steps in pieces.

Names of Lightning that are not public are used in this module alone;
`tests/integrations/test_lightning_private.py` holds them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce, wraps
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from elastic_mbs.batch.join import PerPiece
from elastic_mbs.engine.shared.running import running_call
from elastic_mbs.errors import UnsupportedError, UsageError
from elastic_mbs.integrations.lightning_names import LightningNames
from elastic_mbs.memory import oom
from elastic_mbs.runtime import ElasticMBS

EVALUATIONS = ("validation_step", "test_step", "predict_step")
_SKIPPED = (
    "training_step returned None for some pieces of a batch and a loss for others, so whether the "
    "batch is skipped is not known: decide by what all samples share, or return a loss of zero "
    "(0.0 * loss) for what does not count"
)


class Steps:
    """A stand-in for a Trainer's steps, until `put_back`.

    Only these instances change: progress, checkpoints and other Trainers do not.
    """

    def __init__(
        self,
        names: LightningNames,
        trainer: Any,
        runtime: Callable[[], ElasticMBS],
        count: Callable[[Any], Any] | None,
    ) -> None:
        self._names = names
        self._trainer, self._runtime, self._count = trainer, runtime, count
        self._fit_loop, self._loop = (
            trainer.fit_loop,
            trainer.fit_loop.epoch_loop.automatic_optimization,
        )
        self._loop._make_closure = self._make_closure
        for name in EVALUATIONS:
            setattr(
                trainer.strategy,
                name,
                partial(self._evaluate, name, getattr(trainer.strategy, name)),
            )

    def put_back(self) -> None:
        """Give the steps back."""
        vars(self._loop).pop("_make_closure", None)
        for name in EVALUATIONS:
            vars(self._trainer.strategy).pop(name, None)

    def _make_closure(self, kwargs: Mapping[str, Any], optimizer: Optimizer, batch_idx: int) -> Any:
        """Return a closure whose training_step does all the work.

        Gradients exist before Lightning's zero_grad and backward would run.
        """
        if isinstance(optimizer, LBFGS):
            raise UnsupportedError(
                "LBFGS runs the batch several times in a step, which could not be undone "
                "half-way: use another optimizer"
            )
        return self._names.closure(step_fn=partial(self._train, kwargs, optimizer, batch_idx))

    def _train(self, arguments: Mapping[str, Any], optimizer: Optimizer, index: int) -> Any:
        """Make the gradients of one batch."""
        module, result_of = self._trainer.lightning_module, self._names.closure_result
        log = _BatchLog(self._trainer, self._count)
        zero_grad = self._loop._make_zero_grad_fn(index, optimizer)
        # in the epoch in which StochasticWeightAveraging reads the statistics of BatchNorm
        forward_only = self._loop._skip_backward
        skipped = set[bool]()

        step = wraps(module.training_step)(partial(self._step, arguments, skipped))
        if zero_grad is not None:
            zero_grad()
        runtime = self._runtime()
        door = partial(runtime.evaluate, outputs="device") if forward_only else runtime.backward
        result = log.run(door, step, arguments["batch"])
        loss, extra = (
            result
            if forward_only
            else (result.loss, log.retry("join the outputs of the pieces", lambda: result.outputs))
        )
        if not forward_only:
            self._end_window(optimizer, index)
        if True in skipped:
            return result_of(None)
        if not forward_only:  # on_after_backward
            self._names.precision.post_backward(self._trainer.precision_plugin, loss, module)
        return log.retry(
            "copy the loss", lambda: result_of(log.whole(loss), extra=log.whole(extra) or {})
        )

    def _step(
        self, arguments: Mapping[str, Any], skipped: set[bool], piece: Any
    ) -> tuple[Tensor, dict[str, Any] | None]:
        """Run training_step on a piece; note in `skipped` if it returned no loss."""
        module = self._trainer.lightning_module
        result = self._loop._make_step_fn({**arguments, "batch": piece})()
        loss = result.closure_loss
        skipped.add(loss is None)
        if len(skipped) > 1:
            raise UsageError(_SKIPPED)
        if loss is None:
            # reaches no parameter
            return torch.zeros((), device=module.device, requires_grad=True), None
        if not self._loop._skip_backward:
            # on_before_backward; the rest of a plugin's work there is the engine's
            self._names.precision.pre_backward(self._trainer.precision_plugin, loss, module)
        return loss, result.extra or None

    def _end_window(self, optimizer: Optimizer, index: int) -> None:
        """Make gradients the mean over a window of `accumulate_grad_batches` that ends early.

        Each loss was divided by the length of a whole window.
        """
        whole = self._trainer.accumulate_grad_batches
        batches = (index + 1) % whole
        if batches and not self._fit_loop._should_accumulate():
            for parameter in (
                each
                for group in optimizer.param_groups
                for each in group["params"]
                if each.grad is not None
            ):
                parameter.grad.mul_(whole / batches)

    def _evaluate(self, name: str, whole_step: Callable[..., Any], batch: Any, *others: Any) -> Any:
        log = _BatchLog(self._trainer, self._count)

        @wraps(getattr(self._trainer.lightning_module, name))
        def step(piece: Any) -> Any:
            return whole_step(piece, *others)

        evaluate = partial(self._runtime().evaluate, outputs="device")
        return log.whole(log.run(evaluate, step, batch))


class _Piece:
    """The latest attempt at one piece: its logs, and the metrics from before it."""

    def __init__(self, samples: int, metrics: Sequence[Metric]) -> None:
        self.worth: Any = samples  # its loss terms, which weigh its means
        # hook, name and which time; value; options
        self.logged: list[tuple[tuple[str, str, int], Any, dict[str, Any]]] = []
        self._metrics = [
            (
                metric,
                dict(vars(metric)),
                [(state, _copy(state)) for state in metric.metric_state.values()],
            )
            for metric in metrics
        ]

    def log(self, hook: str, name: str, value: Any, **options: Any) -> None:
        """Keep a log for the batch's end; of a metric, the value of its last `forward`."""
        times = sum(each[:2] == (hook, name) for each, _, _ in self.logged)
        self.logged.append(
            (
                (hook, name, times),
                (value, value._forward_cache) if isinstance(value, Metric) else value,
                options,
            )
        )

    def undo(self) -> None:
        """Put the metrics back. Takes no memory."""
        for metric, attributes, states in self._metrics:
            vars(metric).clear()
            vars(metric).update(attributes)
            for state, value in states:
                if isinstance(state, Tensor):
                    state.copy_(value)
                else:
                    state[:] = value


class _BatchLog:
    """The logs of one batch's pieces, recorded as the whole batch would have logged them, once."""

    def __init__(self, trainer: Any, count: Callable[[Any], Any] | None) -> None:
        self._trainer, self._module, self._results, self._count = (
            trainer,
            trainer.lightning_module,
            trainer._results,
            count,
        )
        self._metrics = [module for module in self._module.modules() if isinstance(module, Metric)]
        self._pieces: dict[int, _Piece] = {}  # by the first sample

    def run(self, door: Callable[..., Any], step: Callable[[Any], Any], batch: Any) -> Any:
        """Return `door(step, batch)`, and record the logs of its pieces.

        After an error nothing is logged, and metrics are as they were.
        """
        try:
            result = door(wraps(step)(partial(self._attempt, step)), batch)
        except BaseException:
            self._rewind(0)
            raise
        self._pieces = dict(sorted(self._pieces.items()))
        logged = defaultdict[tuple[str, str, int], list[tuple[Any, dict[str, Any], Any]]](list)
        for piece in self._pieces.values():
            for key, value, options in piece.logged:
                logged[key].append((value, options, piece.worth))
        self._record(logged)
        return result

    def _record(
        self, logged: Mapping[tuple[str, str, int], list[tuple[Any, dict[str, Any], Any]]]
    ) -> None:
        """Hand the batch's logs to Lightning, all of them or none.

        Lightning makes new tensors for its sums, so a copy of the names is enough to put back.
        """
        before = {
            key: (metric, dict(vars(metric))) for key, metric in (self._results or {}).items()
        }

        def put_back() -> None:
            for key in [key for key in self._results or () if key not in before]:
                del self._results[key]
            for metric, attributes in before.values():
                vars(metric).clear()
                vars(metric).update(attributes)

        def record() -> None:
            put_back()
            for (hook, name, _), entries in logged.items():
                value, options = _together(entries)
                self._results.log(hook, name, value, **options)

        try:
            self.retry("record what self.log was given", record)
        except BaseException:
            put_back()
            raise

    def _attempt(self, step: Callable[[Any], Any], data: Any) -> Any:
        """Run one attempt; undo earlier ones at the same samples or at later ones."""
        call = running_call()
        start, samples = (0, 1) if call is None else (call.attempt.piece.start, len(call.attempt))
        self._rewind(start)
        piece = self._pieces[start] = _Piece(samples, self._metrics)
        if self._results is not None:  # `predict_step` cannot log
            self._results.log = piece.log
        try:
            value = step(data)
        finally:
            if self._results is not None:
                del self._results.log
        if self._count is not None:
            piece.worth = torch.as_tensor(self._count(data)).sum()
        return value

    def _rewind(self, start: int) -> None:
        for later in sorted((each for each in self._pieces if each >= start), reverse=True):
            self._pieces.pop(later).undo()

    def whole(self, outputs: Any) -> Any:
        """Return the batch's outputs, with the mean where pieces gave a floating-point number."""
        return apply_to_collection(outputs, PerPiece, self._whole, allow_frozen=True)

    def _whole(self, values: PerPiece) -> Any:
        if len(values) == 1:
            return values[0]
        if not all(
            isinstance(value, float)
            or (isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point())
            for value in values
        ):
            return values
        return self.retry(
            "take the mean of the outputs",
            partial(_mean, values, [piece.worth for piece in self._pieces.values()]),
        )

    def retry(self, what: str, operation: Callable[[], Any]) -> Any:
        """Retry an operation that changes nothing until it has succeeded."""
        return oom.retry(what, operation, (self._module.device,))


def _copy(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)


def _together(entries: Sequence[tuple[Any, dict[str, Any], Any]]) -> tuple[Any, dict[str, Any]]:
    """Return value and options of one `self.log` for the batch, from those of its pieces."""
    values, options = [value for value, _, _ in entries], dict(entries[0][1])
    weights = sizes = [each.get("batch_size") for _, each, _ in entries]
    if None in sizes:
        weights = [worth for _, _, worth in entries]
    else:
        options["batch_size"] = sum(sizes)
    if isinstance(values[0], tuple):
        metric, shown = values[0][0], [value for _, value in values if isinstance(value, Tensor)]
        if len(values) == len(shown) > 1:
            metric._forward_cache = _mean(shown, weights)
        return metric, options
    if len(values) == 1:
        return values[0], options
    combine = _COMBINE.get(getattr(options["reduce_fx"], "__name__", options["reduce_fx"]))
    return (_mean(values, weights) if combine is None else reduce(combine, values)), options


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _mean(values: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Return the weighted mean, in float32 at least. A value of weight 0 may be NaN."""
    if isinstance(values[0], float):
        return float(_mean([torch.tensor(value, dtype=torch.float64) for value in values], weights))
    stacked = torch.stack(
        [value.to(torch.promote_types(value.dtype, torch.float32)) for value in values]
    )
    shares = torch.stack([torch.as_tensor(weight, device=stacked.device) for weight in weights])
    return (stacked * shares).masked_fill(shares == 0, 0).sum() / shares.sum()
