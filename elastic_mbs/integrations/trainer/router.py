"""The loss that balances the experts of a model, taken of a whole batch although it is cut.

It is E · Σ f·P over the E experts. f is the share of the batch's tokens that choose an expert, and
P its mean probability. A choice has no gradient. So once f of the batch is known, the loss is a
mean over tokens, and pieces add up to it: f is found in a pass without gradients.

On several ranks each has the loss of its own batch, as in the stock trainer, and f is found before
every batch: a rank that began again, once its batch is cut, would make more calls than the others.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from elastic_mbs.engine.report import BeginAgain
from elastic_mbs.errors import UnsupportedError
from elastic_mbs.integrations.exchange import Exchange
from elastic_mbs.integrations.rows import Rows
from elastic_mbs.integrations.trl.metrics import BatchMetrics
from elastic_mbs.integrations.trl.private import ROUTER_LOSS, has_router_loss, kind_of
from elastic_mbs.memory import oom

# The function of transformers that all its models with this loss have a copy of, and what it takes.
FUNCTION = "load_balancing_loss_func"
PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
_SHARED = "transformers.models.mixtral.modeling_mixtral"  # trl's copy, whatever the model
_SAME = 1e-3  # relative difference of two losses that is rounding, also of sums in float32
_WAY_OUT = (
    "leave it out (output_router_logits=False, in trl router_aux_loss_coef=0.0), or use the "
    "trainer as it is, with a smaller per_device_train_batch_size"
)

Value = TypeVar("Value")
Loss = Callable[..., Any]


class _BatchCut(BeginAgain):
    """A batch was cut whose sums are not known: it begins again, once they are."""


@dataclass(frozen=True)
class Sums:
    """Sums over tokens of all layers: choices of each expert, its probabilities, tokens.

    Attributes:
        choices: how many tokens chose each expert, of shape (E,).
        probabilities: of shape (E,), with a graph where the router's logits have one.
        tokens: without padding, a scalar.
    """

    choices: Tensor
    probabilities: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, gate_logits: Any, num_experts: int, top_k: int, attention_mask: Any) -> Sums:
        """Return the sums over some samples; the arguments are those of transformers."""
        first = gate_logits[0]
        choices = probabilities = tokens = torch.zeros((), device=first.device)
        for logits in gate_logits:
            shares = torch.softmax(logits.to(first.device), dim=-1)
            chosen = shares.topk(top_k, dim=-1).indices
            shares = shares.float()
            rows = shares.new_ones(len(shares))
            if attention_mask is not None:
                rows = attention_mask.reshape(-1).to(rows)
            none = shares.new_zeros(num_experts)
            choices = choices + none.scatter_add(0, chosen.flatten(), rows.repeat_interleave(top_k))
            probabilities = probabilities + (shares * rows.unsqueeze(-1)).sum(0)
            tokens = tokens + rows.sum()
        return cls(choices, probabilities, tokens)

    def loss(self, whole: Sums) -> Tensor:
        """Return the part of these tokens in the loss of the whole batch."""
        product = (whole.choices / whole.tokens) * (self.probabilities / whole.tokens)
        return product.sum() * len(whole.choices)


class _Found:
    """The sums of a piece; no dataclass, whose fields the engine would join."""

    def __init__(self, sums: list[Sums]) -> None:
        self.sums = sums


class Router:
    """The router's loss of a trainer; it does nothing for a trainer without one.

    Args:
        trainer: the trainer.
        exchange: the other ranks.
    """

    def __init__(self, trainer: Any, exchange: Exchange) -> None:
        self._trainer = trainer
        self._exchange = exchange
        self._known: Sums | None = None  # of the running batch, where it may be cut
        self._value: Tensor | None = None  # the loss of the running batch
        self._mean: float | None = None  # of the batches of all ranks
        self._cut = dict[bool, bool]()  # by training: the last batch was cut

    @property
    def active(self) -> bool:
        """True if the trainer adds the loss of a router."""
        return adds_loss(self._trainer)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The loss of the batch by the name that trl notes it under, as a mean over the ranks."""
        if self._value is None or not kind_of(type(self._trainer)):
            return {}
        return {ROUTER_LOSS: _read(self._value) if self._mean is None else self._mean}

    def share(self, num_items: Any, steps: int, *, everywhere: bool) -> float:
        """Return the weight of the loss of this rank's batch in the sum over the ranks.

        DDP and FSDP take the mean over the ranks. transformers multiplies by their number where the
        items of all ranks were counted, and trl, which divides by the steps itself, does not.

        Args:
            num_items: of the step's batches; None where they are not counted.
            steps: batches that make a step.
            everywhere: they are the items of all ranks.
        """
        ranks: int = self._trainer.args.world_size
        if num_items is None:
            return 1 / steps / ranks
        return 1.0 if everywhere and not has_router_loss(self._trainer) else 1 / ranks

    def around(
        self,
        rows: Rows,
        samples: Any,
        loss: Callable[[Any], Any],
        run: Callable[[], Value],
        *,
        training: bool,
        told: bool = False,
    ) -> Value:
        """Return the result of `run`, with the sums of the batch known where it is cut.

        All ranks call it.

        Args:
            rows: reads the batch.
            samples: the batch.
            loss: computes the trainer's loss of a piece.
            run: runs the batch in pieces. It is called again where a batch was cut that was
                expected to stay whole.
            training: it is a batch of the training.
            told: the caller tells the other ranks of an error.
        """
        self._known = self._value = self._mean = None
        if not self.active:
            return run()
        if self._trainer.args.world_size > 1:
            with nullcontext() if told else self._exchange.told():
                self._learn(rows, samples, loss)
            self._mean = self._mean_over_ranks()
            return run()
        if self._cut.get(training, False):
            self._learn(rows, samples, loss)
        try:
            found, cut = run(), self._cut.get(training, False)
        except _BatchCut:
            self._learn(rows, samples, loss)
            found, cut = run(), True
        last = self._trainer.elastic.last_result
        self._cut[training] = cut if last is None or not training else len(last.partition) > 1
        return found

    def _learn(self, rows: Rows, samples: Any, loss: Callable[[Any], Any]) -> None:
        """Find the sums over a batch in pieces without gradients."""
        trainer, noted = self._trainer, list[Sums]()
        metrics = BatchMetrics(trainer)

        def of_piece(piece: Any) -> Any:
            noted.clear()
            with rows.comparable(), self._replaced(lambda plain: _noting(plain, noted)):
                loss(piece)
            return _Found(list(noted))

        try:
            found = trainer.elastic.evaluate(of_piece, samples, outputs="device")
        finally:
            metrics.restore()
        pieces = [each.sums for each in found]
        if {len(each) for each in pieces} != {1}:
            raise UnsupportedError(
                f"{type(trainer.model).__name__} takes its router's loss {len(pieces[0])} times in "
                f"a step, so it is not known which part is whose: {_WAY_OUT}"
            )
        devices = (pieces[0][0].tokens.device,)
        self._known, self._value = oom.retry(
            "add up the choices of experts", lambda: _added(pieces), devices
        )

    def _mean_over_ranks(self) -> float:
        """Return the mean of the ranks' losses, without samples that the last batch repeats."""
        value = self._value
        assert value is not None  # it is known with the sums
        everyone = self._exchange.all(_read(value))[: self._exchange.counted]
        return float(sum(everyone) / len(everyone))

    @contextmanager
    def of_piece(self, *, whole: bool, factor: float = 1.0) -> Iterator[None]:
        """Make the router's loss of a piece its part in the loss of the batch.

        Args:
            whole: the piece is the batch.
            factor: of the part, because the loss of the piece is weighed.
        """
        known = self._known
        if known is None and not whole and self.active:
            raise _BatchCut

        def part(plain: Loss) -> Loss:
            def compute(*args: Any, **kwargs: Any) -> Any:
                if known is None or whole:
                    value = plain(*args, **kwargs)
                    self._value = value.detach()
                    return value * factor
                if not torch.is_grad_enabled():  # an evaluation takes the mean over its pieces
                    value = self._value
                    assert value is not None  # it is known with the sums
                    return value * factor
                return Sums.of(*_bound(plain, args, kwargs)).loss(known) * factor

            return compute

        with self._replaced(part):
            yield

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave the router's loss out of the trainer's."""
        with self._replaced(lambda plain: lambda *args, **kwargs: plain(*args, **kwargs) * 0.0):
            yield

    @contextmanager
    def _replaced(self, replacement: Callable[[Loss], Loss]) -> Iterator[None]:
        with ExitStack() as stack:
            for module in _modules(self._trainer.model) if self.active else ():
                plain = vars(module)[FUNCTION]
                stack.callback(vars(module).__setitem__, FUNCTION, plain)
                vars(module)[FUNCTION] = replacement(plain)
            yield


def adds_loss(trainer: Any) -> bool:
    """Return whether a trainer adds the loss of a router."""
    config = getattr(trainer.model, "config", None)
    return bool(getattr(config, "output_router_logits", False)) or has_router_loss(trainer)


def check_router(trainer: Any) -> None:
    """Refuse the loss of a router that is not known.

    Raises:
        UnsupportedError: pieces may not add up to it.
    """
    if not adds_loss(trainer):
        return
    name = type(trainer.model).__name__
    functions = [vars(module)[FUNCTION] for module in _modules(trainer.model)]
    known = [each for each in functions if [*inspect.signature(each).parameters] == PARAMETERS]
    if not known or len(known) < len(functions):
        raise UnsupportedError(
            f"the router's loss of {name} is not the one of Mixtral and its like, so it is not "
            f"known how pieces add up to it: {_WAY_OUT}"
        )


def _modules(model: Any) -> list[ModuleType]:
    """Return the modules of Python in which a model, or trl for it, finds the function."""
    names = dict.fromkeys(type(each).__module__ for each in model.modules())
    found = [sys.modules[name] for name in names if FUNCTION in vars(sys.modules[name])]
    # trl imports its copy inside of the first loss, when it is too late to replace it
    return list(dict.fromkeys([*found, importlib.import_module(_SHARED)])) if found else []


def _read(value: Tensor) -> float:
    """Return the number in a tensor on a device whose memory may be short."""
    return float(oom.retry("read the router's loss", value.item, (value.device,)))


def _bound(plain: Loss, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all arguments of a call of the function, in their order."""
    bound = inspect.signature(plain).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _noting(plain: Loss, noted: list[Sums]) -> Loss:
    """Return the function with a note of its sums, once they are known to make up its value."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        value, sums = plain(*args, **kwargs), Sums.of(*_bound(plain, args, kwargs))
        ours = sums.loss(sums)
        if not torch.isclose(ours.to(value), value, rtol=_SAME, equal_nan=True):
            raise UnsupportedError(
                f"the router's loss is {float(value):.6g} where the one of Mixtral would be "
                f"{float(ours):.6g}, so it is not known how pieces add up to it: {_WAY_OUT}"
            )
        noted.append(sums)
        return value

    return compute


def _added(pieces: list[list[Sums]]) -> tuple[Sums, Tensor]:
    """Return the sums over all pieces, and the loss that they make up."""
    fields = [(each.choices, each.probabilities, each.tokens) for (each,) in pieces]
    sums = Sums(*(torch.stack(list(each)).sum(0) for each in zip(*fields, strict=True)))
    return sums, sums.loss(sums)
