"""The training of a plan, made from its seed.

Batches of every shape, the model, other leaves, the loss of a piece, and the optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_mbs import count_tokens, cut

from ..streams import start_streams
from .layers import CLASSES, VOCABULARY, Network, flat_gradients, in_double
from .plan import Plan

FEATURES = 3
IGNORED = -100
TOKENS = count_tokens("labels")


@dataclass
class Record:
    """A batch as a dataclass, with a field that is no tensor."""

    x: Tensor
    rest: dict[str, Tensor]
    names: list[str]


@dataclass(frozen=True)
class Container:
    """Container of inputs, labels and weights in a batch."""

    pack: Callable[[Tensor, Tensor, Tensor], Any]
    unpack: Callable[[Any], tuple[Tensor, Tensor, Tensor]]
    tokens: Any = TOKENS  # counts the labels of each sample
    dims: Any = None  # dimension of the samples, where shapes do not say


def _names(x: Tensor) -> list[str]:
    return [f"sample {i}" for i in range(len(x))]


CONTAINERS = {
    "pair": Container(lambda x, y, w: (x, y, w), lambda b: b, count_tokens(1)),
    "dict": Container(
        lambda x, y, w: {"x": x, "labels": y, "weights": w, "names": _names(x), "scale": 1.0},
        lambda b: (b["x"], b["labels"], b["weights"]),
    ),
    "nested": Container(
        lambda x, y, w: {"inputs": (x, {"labels": y}), "more": [w, {"nothing": None}]},
        lambda b: (b["inputs"][0], b["inputs"][1]["labels"], b["more"][0]),
        count_tokens("inputs.1.labels"),
        cut.fields("more"),
    ),
    "items": Container(
        lambda x, y, w: {"x": list(x.unbind()), "labels": y, "weights": w},
        lambda b: (torch.stack(b["x"]), b["labels"], b["weights"]),
        dims=cut.items("x"),
    ),
    "record": Container(
        lambda x, y, w: Record(x, {"labels": y, "weights": w}, _names(x)),
        lambda b: (b.x, b.rest["labels"], b.rest["weights"]),
        count_tokens("rest.labels"),
    ),
    "columns": Container(  # positions first
        lambda x, y, w: {
            "x": x.transpose(0, 1).contiguous(),
            "labels": y.T.contiguous(),
            "weights": w,
        },
        lambda b: (b["x"].transpose(0, 1), b["labels"].T, b["weights"]),
        lambda b: (b["labels"] != IGNORED).sum(0),
        {"x": 1, "labels": 1},
    ),
}


def make_batch(plan: Plan, step: int) -> Any:
    """Return the batch of a step, from the plan's seed, on the plan's device."""
    with torch.device("cpu"):  # the generator's, where another device is the default one
        drawn = _drawn(plan, torch.Generator().manual_seed(plan.seed * 1009 + step))
    return CONTAINERS[plan.container].pack(*(tensor.to(plan.device) for tensor in drawn))


def _drawn(plan: Plan, stream: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs, labels and weights of a batch."""
    n = plan.samples
    length = plan.length
    if plan.tokens == "no":
        x = torch.randn(n, length, FEATURES, generator=stream, dtype=torch.float64).to(
            torch.bfloat16 if plan.half else torch.float64
        )
    else:
        x = torch.randint(0, VOCABULARY, (n, length), generator=stream)
    y = torch.randint(0, CLASSES, (n, length), generator=stream)
    weights = torch.rand(n, generator=stream, dtype=torch.float64) * torch.randint(
        0, 2, (n,), generator=stream
    )
    weights[int(torch.randint(0, n, (), generator=stream))] = 0.75  # one of them counts
    if plan.count in ("tokens", "both"):
        kept = torch.randint(0, length + 1, (n, 1), generator=stream)
        kept[int(torch.randint(0, n, (), generator=stream))] = length
        y = torch.where(torch.arange(length) < kept, y, IGNORED)
    return x, y, weights


def count_of(plan: Plan) -> Any:
    """Return `count=` for ElasticMBS."""
    container = CONTAINERS[plan.container]
    return {
        "samples": None,
        "tokens": container.tokens,
        "weights": lambda batch: container.unpack(batch)[2],
        "both": {"words": container.tokens, "rows": None},
    }[plan.count]


def counts_by_hand(plan: Plan, batch: Any) -> dict[str, list[Fraction]]:
    """Return the terms of each loss by sample, without the package's own reading of them."""
    _, labels, weights = CONTAINERS[plan.container].unpack(batch)
    rows = [Fraction(1)] * plan.samples
    words = [Fraction(int((row != IGNORED).sum())) for row in labels]
    if plan.count == "both":
        return {"words": words, "rows": rows}
    return {
        "loss": {
            "samples": rows,
            "tokens": words,
            "weights": [Fraction(float(w)) for w in weights],
        }[plan.count]
    }


def losses(plan: Plan, scores: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return the losses of a piece by name, each a mean or a sum over its terms."""
    total = plan.reduction == "sum"
    if plan.count in ("samples", "weights"):
        rows = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none").mean(1)
        if plan.count == "samples":
            return {"loss": rows.sum() if total else rows.mean()}
        summed = (rows * weights.to(rows.dtype)).sum()
        return {"loss": summed if total else summed / weights.sum().to(rows.dtype)}
    words = F.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=plan.reduction
    )
    rows = scores.pow(2).mean((1, 2))
    return (
        {"loss": words}
        if plan.count == "tokens"
        else {"words": words, "rows": rows.sum() if total else rows.mean()}
    )


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda leaves: torch.optim.SGD(leaves, lr=0.05),
    "momentum": lambda leaves: torch.optim.SGD(leaves, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda leaves: torch.optim.Adam(leaves, lr=0.01, foreach=False),
    "adamw": lambda leaves: torch.optim.AdamW(leaves, lr=0.01, amsgrad=True),
    "adam foreach": lambda leaves: torch.optim.Adam(leaves, lr=0.01, foreach=True),
    "adam fused": lambda leaves: torch.optim.Adam(leaves, lr=0.01, fused=True),
    "adagrad": lambda leaves: torch.optim.Adagrad(leaves, lr=0.01),
    "rmsprop": lambda leaves: torch.optim.RMSprop(leaves, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda leaves: torch.optim.NAdam(leaves, lr=0.01),
}


@dataclass
class Output:
    """An output object, as models of some libraries return it."""

    loss: Any
    scores: Tensor


class Setup:
    """A model in training, with leaves outside of it and an optimizer over both."""

    def __init__(self, plan: Plan, model: Network, guests: list[Tensor]) -> None:
        self.plan = plan
        self.model = model
        self.guests = guests
        self.optimizer = OPTIMIZERS[plan.optimizer](self.leaves())
        self.flat: list[Tensor] = []  # the buffer that gradients are views of, where they are

    def leaves(self) -> list[Tensor]:
        """Return every leaf that has a gradient."""
        return [*(p for p in self.model.parameters() if p.requires_grad), *self.guests]

    def grads(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in self.leaves()]

    def terms(self, piece: Any) -> tuple[dict[str, Tensor], Tensor]:
        """Return the losses of a piece by name, and its scores."""
        plan = self.plan
        x, labels, weights = CONTAINERS[plan.container].unpack(piece)
        if plan.edits and x.is_floating_point():
            x.mul_(0.5)
        scores = self.model(x)
        if plan.guests == "prompt":
            scores = scores + self.guests[0]
        terms = losses(plan, scores, labels, weights)
        if plan.guests == "weight":
            terms = {name: term * self.guests[0].exp() for name, term in terms.items()}
        return terms, scores

    def loss_fn(self, piece: Any) -> Any:
        terms, scores = self.terms(piece)
        loss: Any = terms if self.plan.count == "both" else terms["loss"]
        made = {
            "loss": loss,
            "pair": (loss, scores),
            "dict": {"loss": loss, "scores": scores},
            "object": Output(loss, scores),
        }
        return made[self.plan.returns]

    def scores(self, piece: Any) -> Any:
        return self.model(CONTAINERS[self.plan.container].unpack(piece)[0])

    def twin(self) -> Setup:
        """Return a copy by value, gradients and the optimizer's state included."""
        twin = Setup(self.plan, *copy.deepcopy((self.model, self.guests)))
        for mine, theirs in zip(twin.leaves(), self.leaves(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.detach().clone()
            if theirs in self.optimizer.state:
                twin.optimizer.state[mine] = copy.deepcopy(self.optimizer.state[theirs])
        return twin


def set_up(plan: Plan) -> Setup:
    """Return the setup of a plan, with every random stream at the same place."""
    start_streams(plan.seed)
    features = FEATURES if plan.tokens == "no" else 0
    with in_double():
        model = Network(
            plan.layers,
            plan.width,
            features=features,
            sparse=plan.tokens == "sparse",
            tie=plan.tied,
            branches=plan.branches,
        )
    dtype = torch.bfloat16 if plan.half else torch.float64
    guests = {
        "weight": [torch.zeros((), dtype=dtype)],
        "prompt": [torch.randn(1, 1, 3, dtype=dtype)],
    }.get(plan.guests, [])
    setup = Setup(
        plan,
        model.to(plan.device, dtype),
        [guest.to(plan.device).requires_grad_() for guest in guests],
    )
    sparse = {
        id(module.weight)
        for module in setup.model.modules()
        if isinstance(module, nn.Embedding) and module.sparse
    }
    leaves = [leaf for leaf in setup.leaves() if id(leaf) not in sparse]
    if plan.gradients == "flat":
        setup.flat = [flat_gradients(leaves)]
    elif plan.gradients != "none":
        for leaf in leaves[:: 1 if plan.gradients == "all" else 2]:
            leaf.grad = torch.randn_like(leaf)
    return setup
