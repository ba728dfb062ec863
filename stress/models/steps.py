"""Small training steps of every kind that can go wrong in its own way, each rebuilt from its seed for every injection."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import count_tokens

from .interpreted import InterpretedBackend
from .networks import GPT, EncoderDecoder, Experts, Hidden, HostMasks, Recurrent, Residual, SparseBag

LossFn = Callable[[Any], Any]


@dataclass
class Case:
    """One training step.

    Attributes:
        model: its module.
        loss_fn: the loss of a piece.
        batch: the whole batch.
        separable: the batch's gradient does not depend on how it is split.
        guests: leaves outside the model.
        options: for ElasticMBS.
        tolerance: largest difference from the reference, relative to its largest entry.
        backend: where operations are counted when they run inside a compiled graph.
    """

    model: nn.Module
    loss_fn: LossFn
    batch: Any
    separable: bool = True
    guests: list[Tensor] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-12
    backend: InterpretedBackend | None = None

    def leaves(self) -> list[Tensor]:
        """Every trainable leaf."""
        return [*self.model.parameters(), *self.guests]


BATCH = 8


def _data(width: int = 6, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, width), torch.randint(0, classes, (BATCH,))


def _classify(model: nn.Module) -> LossFn:
    return lambda batch: functional.cross_entropy(model(batch[0]), batch[1])


def mlp() -> Case:
    """Linear layers: the plain case."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return Case(model, _classify(model), _data())


def conv_batchnorm() -> Case:
    """A residual conv net with BatchNorm: gradients and buffers depend on the partition."""
    model = Residual()
    return Case(model, _classify(model), (torch.randn(BATCH, 2, 4, 4), torch.randint(0, 3, (BATCH,))), separable=False)


def _tokens(ignore: bool = True) -> dict[str, Tensor]:
    tokens = torch.randint(0, 12, (BATCH, 5))
    labels = tokens.roll(-1, 1)
    if ignore:
        for row, keep in enumerate((5, 1, 0, 3, 2, 5, 4, 1)):  # a sample without labels among them
            labels[row, keep:] = -100
    return {"input_ids": tokens, "labels": labels}


def _language(model: nn.Module) -> LossFn:
    return lambda batch: functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def gpt_tied() -> Case:
    """A transformer with tied embeddings, weighted by tokens."""
    model = GPT()
    return Case(model, _language(model), _tokens(), options={"count": count_tokens("labels")})


def gpt_dropout() -> Case:
    """Dropout: masks are part of the result."""
    model = GPT(dropout=0.3)
    return Case(model, _language(model), _tokens(), separable=False, options={"count": count_tokens("labels")})


def encoder_decoder() -> Case:
    """An encoder–decoder whose batch is nested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = EncoderDecoder()
    batch = {"pair": (torch.randint(0, 12, (BATCH, 4)), torch.randint(0, 12, (BATCH, 3))), "y": torch.randint(0, 12, (BATCH, 3))}
    return Case(model, lambda b: functional.cross_entropy(model(*b["pair"]).flatten(0, 1), b["y"].flatten()), batch)


def gru() -> Case:
    """A GRU."""
    model = Recurrent(nn.GRU)
    return Case(model, _classify(model), (torch.randn(BATCH, 3, 4), torch.randint(0, 4, (BATCH,))))


def lstm() -> Case:
    """An LSTM."""
    model = Recurrent(nn.LSTM)
    return Case(model, _classify(model), (torch.randn(BATCH, 3, 4), torch.randint(0, 4, (BATCH,))))


def routed_experts() -> Case:
    """Routing: which parameters a piece uses depends on its samples, and one is never used."""
    model = Experts()
    return Case(model, _classify(model), _data())


def checkpoint_nonreentrant() -> Case:
    """Activation checkpointing, the recommended kind, with dropout inside."""
    model = GPT(dropout=0.3, reentrant=False)
    return Case(model, _language(model), _tokens(ignore=False), separable=False)


def checkpoint_reentrant() -> Case:
    """Reentrant checkpointing: a shared parameter commits several times in one backward."""
    model = GPT(reentrant=True)
    return Case(model, _language(model), _tokens(ignore=False))


def hidden_backward() -> Case:
    """A custom function that recomputes and calls backward itself: its leaves are not in the graph."""
    model = Hidden()
    return Case(model, _classify(model), _data())


def sparse_embedding() -> Case:
    """Sparse embedding gradients."""
    model = SparseBag()
    return Case(model, _classify(model), (torch.randint(0, 12, (BATCH, 5)), torch.randint(0, 4, (BATCH,))))


def two_losses() -> Case:
    """Two losses with two counts: one per token, one per sample."""
    model = GPT()
    language = _language(model)

    def loss_fn(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"tokens": language(batch), "norm": model(batch["input_ids"]).pow(2).mean()}

    return Case(model, loss_fn, _tokens(), options={"count": {"tokens": count_tokens("labels"), "norm": None}})


def guests() -> Case:
    """Leaves outside the model: a learned loss weight, a soft prompt, and a batch that requires grad."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    weight, prompt = torch.zeros((), requires_grad=True), torch.randn(6).requires_grad_()
    x, y = _data()
    x.requires_grad_()
    return Case(model, lambda b: functional.cross_entropy(model(b[0] + prompt), b[1]) * weight.exp(), (x, y), guests=[weight, prompt, x])


def flat_gradients() -> Case:
    """Gradients that are views of one flat buffer, as bucketing does; they are there at the start."""
    case = mlp()
    total = sum(p.numel() for p in case.model.parameters())
    flat, offset = torch.zeros(total), 0
    for parameter in case.model.parameters():
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return case


def gradients_at_start() -> Case:
    """`.grad` from an earlier backward is kept and added to."""
    case = mlp()
    for parameter in case.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return case


def gradients_at_start_dropout() -> Case:
    """`.grad` at the start and masks: neither the piece nor the batch could be replayed without setting gradients aside."""
    case = gpt_dropout()
    for parameter in case.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return case


def host_masks() -> Case:
    """Masks drawn with `random` and numpy."""
    import numpy as np

    np.random.seed(0)  # it may have been imported just now
    model = HostMasks()
    return Case(model, _classify(model), _data(), separable=False)


def spectral_norm() -> Case:
    """Spectral norm: buffers change at every forward."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 4))
    return Case(model, _classify(model), _data(), separable=False)


def edited_batch() -> Case:
    """A loss function that edits its batch in place."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        batch[0].mul_(0.5)
        return functional.cross_entropy(model(batch[0]), batch[1])

    return Case(model, loss_fn, _data())


def scaled() -> Case:
    """GradScaler and autocast; in bfloat16 two partitions differ by its rounding."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).float()

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.cross_entropy(model(batch[0]), batch[1])

    x, y = _data()
    return Case(model, loss_fn, (x.float(), y), options={"scaler": torch.amp.GradScaler("cpu", init_scale=4.0)}, tolerance=3e-2)


def half_in_float32() -> Case:
    """bfloat16 parameters whose gradients are summed in float32."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()
    x, y = _data()
    return Case(model, _classify(model), (x.bfloat16(), y), separable=False, options={"accumulate_dtype": torch.float32})


def compiled() -> Case:
    """torch.compile with aot_eager's graphs: no parameter commits before the compiled backward ends."""
    case, backend = mlp(), InterpretedBackend()
    torch._dynamo.reset()  # the graphs of cases built before count against the limit on recompilations
    model = torch.compile(case.model, backend=backend, dynamic=True)
    return Case(case.model, lambda batch: functional.cross_entropy(model(batch[0]), batch[1]), case.batch, backend=backend)


CASES: dict[str, Callable[[], Case]] = {
    build.__name__: build
    for build in (
        mlp,
        conv_batchnorm,
        gpt_tied,
        gpt_dropout,
        encoder_decoder,
        gru,
        lstm,
        routed_experts,
        checkpoint_nonreentrant,
        checkpoint_reentrant,
        hidden_backward,
        sparse_embedding,
        two_losses,
        guests,
        flat_gradients,
        gradients_at_start,
        gradients_at_start_dropout,
        host_masks,
        spectral_norm,
        edited_batch,
        scaled,
        half_in_float32,
        compiled,
    )
}


def build(name: str, seed: int = 0) -> Case:
    """The case, built in float64 from its seed; every random stream then stands at the same place."""
    torch.manual_seed(seed)
    random.seed(seed)
    with suppress(ImportError):
        import numpy.random  # by us: whoever imported it between two builds would leave the first of them with another stream

        numpy.random.seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return CASES[name]()
    finally:
        torch.set_default_dtype(default)
