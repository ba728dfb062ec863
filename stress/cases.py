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
from torch.utils.checkpoint import checkpoint

from elastic_mbs import count_tokens
from elastic_mbs.testing import InjectOOM

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


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(x)))
        x = x + self.norm2(self.body(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def conv_batchnorm() -> Case:
    """A residual conv net with BatchNorm: gradients and buffers depend on the partition."""
    model = _Residual()
    return Case(model, _classify(model), (torch.randn(BATCH, 2, 4, 4), torch.randint(0, 3, (BATCH,))), separable=False)


class _GPT(nn.Module):
    def __init__(self, dropout: float = 0.0, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.norm = nn.LayerNorm(6)
        self.query = nn.Linear(6, 18)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = dropout
        self.reentrant = reentrant

    def block(self, x: Tensor) -> Tensor:
        q, k, v = self.query(self.norm(x)).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + functional.dropout(self.mix(attended), self.dropout, self.training)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


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
    model = _GPT()
    return Case(model, _language(model), _tokens(), options={"count": count_tokens("labels")})


def gpt_dropout() -> Case:
    """Dropout: masks are part of the result."""
    model = _GPT(dropout=0.3)
    return Case(model, _language(model), _tokens(), separable=False, options={"count": count_tokens("labels")})


class _EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.net = nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        out: Tensor = self.head(self.net(self.embed(source), self.embed(target)))
        return out


def encoder_decoder() -> Case:
    """An encoder–decoder whose batch is nested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _EncoderDecoder()
    batch = {"pair": (torch.randint(0, 12, (BATCH, 4)), torch.randint(0, 12, (BATCH, 3))), "y": torch.randint(0, 12, (BATCH, 3))}
    return Case(model, lambda b: functional.cross_entropy(model(*b["pair"]).flatten(0, 1), b["y"].flatten()), batch)


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.net = kind(4, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.net(x)[0][:, -1])
        return out


def gru() -> Case:
    """A GRU."""
    model = _Recurrent(nn.GRU)
    return Case(model, _classify(model), (torch.randn(BATCH, 3, 4), torch.randint(0, 4, (BATCH,))))


def lstm() -> Case:
    """An LSTM."""
    model = _Recurrent(nn.LSTM)
    return Case(model, _classify(model), (torch.randn(BATCH, 3, 4), torch.randint(0, 4, (BATCH,))))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).softmax(-1)
        best = choice.argmax(-1)
        out = torch.zeros(x.shape[0], 4, dtype=x.dtype)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * choice[rows, index, None])
        return out


def routed_experts() -> Case:
    """Routing: which parameters a piece uses depends on its samples, and one is never used."""
    model = _Experts()
    return Case(model, _classify(model), _data())


def checkpoint_nonreentrant() -> Case:
    """Activation checkpointing, the recommended kind, with dropout inside."""
    model = _GPT(dropout=0.3, reentrant=False)
    return Case(model, _language(model), _tokens(ignore=False), separable=False)


def checkpoint_reentrant() -> Case:
    """Reentrant checkpointing: a shared parameter commits several times in one backward."""
    model = _GPT(reentrant=True)
    return Case(model, _language(model), _tokens(ignore=False))


class Recompute(torch.autograd.Function):
    """Recomputes its module in backward and calls backward by itself, as offloaded checkpointing and reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        """Runs the module without a graph."""
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            out: Tensor = module(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        """Runs it again, and its backward."""
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


class _Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(Recompute.apply(self.block, self.stem(x)))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return out


def hidden_backward() -> Case:
    """A custom function that recomputes and calls backward itself: its leaves are not in the graph."""
    model = _Hidden()
    return Case(model, _classify(model), _data())


class _SparseBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4, sparse=True)
        self.head = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(tokens).mean(1))
        return out


def sparse_embedding() -> Case:
    """Sparse embedding gradients."""
    model = _SparseBag()
    return Case(model, _classify(model), (torch.randint(0, 12, (BATCH, 5)), torch.randint(0, 4, (BATCH,))))


def two_losses() -> Case:
    """Two losses with two counts: one per token, one per sample."""
    model = _GPT()
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


class _HostMasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        import numpy as np

        mask = torch.from_numpy(np.random.rand(x.shape[0], 8))  # the legacy stream is what such models use
        scale = random.random() + 0.5
        out: Tensor = self.second(torch.tanh(self.first(x)) * mask * scale)
        return out


def host_masks() -> Case:
    """Masks drawn with `random` and numpy."""
    import numpy as np

    np.random.seed(0)  # it may have been imported just now
    model = _HostMasks()
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


class InterpretedBackend:
    """A torch.compile backend that runs the aot_autograd graphs operation by operation, so that each can be made to fail.

    torch.compile does not run under a dispatch mode; inside its graphs the operations are counted here instead.
    """

    def __init__(self) -> None:
        self.inject: InjectOOM | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        """Compiles nothing: interprets."""
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)(graph, inputs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func  # type: ignore[import-untyped]  # it has no annotations

        backend = self

        class Interpreter(torch.fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                if backend.inject is not None and hasattr(target, "_schema"):
                    backend.inject.step(str(target))
                return super().call_function(target, args, kwargs)

        return make_boxed_func(lambda *values: Interpreter(graph).run(*values))


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
