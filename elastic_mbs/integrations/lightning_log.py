"""What the pieces of one batch log, as the whole batch would have logged it: once, and for the attempts that count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from types import TracebackType
from typing import Any, Self

import torch
from lightning.pytorch import Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from elastic_mbs.batch.join import PerPiece
from elastic_mbs.engine.misuse import running_call
from elastic_mbs.integrations import lightning_private as private
from elastic_mbs.memory import oom


class Piece:
    """The latest attempt at one piece: what it has logged, and the metrics as they were before it."""

    def __init__(self, samples: int, metrics: Sequence[Metric]) -> None:
        self.worth: Any = samples  # loss terms, which the means of its values are weighted by
        self.skipped = False  # `training_step` returned None
        self.logged: list[tuple[str, str, Any, dict[str, Any]]] = []  # hook, name, value and options of each `self.log`
        self._metrics = [(metric, dict(vars(metric)), _values(metric)) for metric in metrics]

    def record(self, hook: str, name: str, value: Any, **options: Any) -> None:
        """One `self.log`; of a metric, which goes on changing, what it shows now."""
        self.logged.append((hook, name, (value, private.batch_value(value)) if isinstance(value, Metric) else value, options))

    def undo(self) -> None:
        """Puts the metrics back to where they were. Takes no memory."""
        for metric, attributes, values in self._metrics:
            vars(metric).clear()
            vars(metric).update(attributes)
            for state, value in values:
                if isinstance(state, list):
                    state[:] = value
                else:
                    state.copy_(value)


class BatchLog:
    """Collects what every piece logs. As a context manager it takes everything back when the call ends by an error."""

    def __init__(self, trainer: Trainer, count: Callable[[Any], Any] | None) -> None:
        self._trainer, self._count = trainer, count
        self._metrics = [module for module in trainer.lightning_module.modules() if isinstance(module, Metric)]
        self._pieces: dict[int, Piece] = {}  # by the first sample

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Takes everything back after an error."""
        if error is not None:
            self._rewind(0)

    @property
    def pieces(self) -> list[Piece]:
        """The attempts that count, in the order of their samples."""
        return [piece for _, piece in sorted(self._pieces.items())]

    @contextmanager
    def attempt(self, data: Any) -> Iterator[Piece]:
        """Around one attempt at a piece: an earlier attempt at its samples, or at later ones, has failed or is run again."""
        call = running_call()
        start, samples = (0, 1) if call is None else (call.state.attempt.piece.start, len(call.state.attempt))
        self._rewind(start)
        piece = self._pieces[start] = Piece(samples, self._metrics)
        with private.recorded(self._trainer, piece.record):
            yield piece
        if self._count is not None:
            piece.worth = torch.as_tensor(self._count(data)).sum()

    def _rewind(self, start: int) -> None:
        for behind in sorted((each for each in self._pieces if each >= start), reverse=True):
            self._pieces.pop(behind).undo()

    def publish(self) -> None:
        """Logs once what the pieces have logged."""
        found: dict[tuple[str, str, int], list[tuple[Any, dict[str, Any], Any]]] = {}
        for piece in self.pieces:
            times = Counter[tuple[str, str]]()
            for hook, name, value, options in piece.logged:
                found.setdefault((hook, name, times[hook, name]), []).append((value, options, piece.worth))
                times[hook, name] += 1
        for (hook, name, _), entries in found.items():
            value, options = self._retry(f"put together what self.log({name!r}, ...) was given", partial(_together, entries))
            private.log(self._trainer, hook, name, value, options)

    def whole(self, outputs: Any) -> Any:
        """The outputs of the batch, with the mean where the pieces gave a floating-point number each."""
        return apply_to_collection(outputs, PerPiece, self._mean)

    def _mean(self, values: PerPiece) -> Any:
        if len(values) == 1:
            return values[0]
        if not all(isinstance(value, float) or (isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()) for value in values):
            return values
        mean = self._retry("take the mean of the outputs", partial(_mean, values, [piece.worth for piece in self.pieces]))
        return mean if isinstance(values[0], Tensor) else float(mean)

    def _retry(self, what: str, operation: Callable[[], Any]) -> Any:
        return oom.retry(what, operation, (self._trainer.strategy.root_device,))


def _values(metric: Metric) -> list[tuple[Any, Any]]:
    """The states of a metric, each with a copy of its value."""
    return [(state, list(state) if isinstance(state, list) else state.clone()) for state in metric.metric_state.values()]


def _together(entries: Sequence[tuple[Any, dict[str, Any], Any]]) -> tuple[Any, dict[str, Any]]:
    """The value and the options for the whole batch."""
    values = [value for value, _, _ in entries]
    options = dict(entries[0][1])
    sizes = [each.get("batch_size") for _, each, _ in entries]
    given = None not in sizes
    if given:
        options["batch_size"] = sum(sizes)
    weights = sizes if given else [worth for _, _, worth in entries]
    if isinstance(values[0], tuple):
        metric = values[0][0]
        shown = [value for _, value in values if isinstance(value, Tensor)]
        if len(values) == len(shown) > 1:
            private.set_batch_value(metric, _mean(shown, weights))
        return metric, options
    reduced = options.get("reduce_fx", "mean")
    by_name = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    combine = by_name.get(reduced if isinstance(reduced, str) else reduced.__name__)
    if len(values) == 1:
        return values[0], options
    return (_mean(values, weights) if combine is None else reduce(combine, values)), options


def _mean(values: Sequence[Any], weights: Sequence[Any]) -> Any:
    """The weighted mean; what weighs nothing may be NaN. In float32 at least."""
    tensors = [value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64) for value in values]
    stacked = torch.stack([value.to(torch.promote_types(value.dtype, torch.float32)) for value in tensors])
    shares = torch.stack([torch.as_tensor(weight, device=stacked.device) for weight in weights])
    return (stacked * shares).masked_fill(shares == 0, 0).sum(0) / shares.sum()
