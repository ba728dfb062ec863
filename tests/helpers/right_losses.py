"""Losses that are made up of their samples' losses, of every kind that users have.

Each row is a model, a loss function, a batch and the options of the runtime.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elastic_mbs import count_tokens
from tests.helpers.steps import cross_entropy, mlp, pairs

Batch = Any


@dataclass
class Case:
    """A loss function over a model."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    batch: Batch
    options: dict[str, Any] = field(default_factory=dict)
    draws: bool = False  # other numbers in pieces than in the whole


def float32(n: int = 8) -> tuple[Tensor, Tensor]:
    x, y = pairs(n)
    return x.float(), y


def vae(reduction: str = "mean") -> Case:
    model = nn.ModuleDict({"encode": nn.Linear(6, 6), "decode": nn.Linear(3, 6)}).double()

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        x = b[0].sigmoid()
        mean, log_variance = model["encode"](x).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        again = model["decode"](latent).sigmoid()
        bce = functional.binary_cross_entropy(again, x, reduction="sum")
        kld = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        total: Tensor = bce + kld
        return total / len(x) if reduction == "mean" else total

    return Case(model, loss_fn, pairs(), {"reduction": reduction}, draws=True)


def diffusion() -> Case:
    model = nn.Linear(7, 6).double()

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        x = b[0]
        t = torch.randint(0, 100, (len(x),)) / 100
        noise = torch.randn(x.shape, dtype=x.dtype)
        noisy = x * (1 - t[:, None]) + noise * t[:, None]
        return functional.mse_loss(model(torch.cat([noisy, t[:, None]], 1)), noise)

    return Case(model, loss_fn, pairs(), draws=True)


def mixup() -> Case:
    model = mlp()

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        x, y = b
        share, order = np.random.beta(0.4, 0.4), torch.randperm(len(x))
        logits = model(share * x + (1 - share) * x[order])
        return share * functional.cross_entropy(logits, y) + (1 - share) * functional.cross_entropy(
            logits, y[order]
        )

    return Case(model, loss_fn, pairs(), draws=True)


def dropout(*, always: bool) -> Case:
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4)).double()

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        hidden = model[1](model[0](b[0]))
        hidden = functional.dropout(hidden, 0.3, training=True) if always else hidden
        return functional.cross_entropy(model[2](hidden), b[1])

    return Case(model, loss_fn, pairs(), draws=True)


def drawn_on_the_host() -> Case:
    model = mlp()

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        scale = torch.tensor([random.random() for _ in b[1]]).double()
        return (functional.cross_entropy(model(b[0]), b[1], reduction="none") * scale).mean()

    return Case(model, loss_fn, pairs(), draws=True)


def batch_norm() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()
    return Case(model, cross_entropy(model), pairs())


def amp() -> Case:
    model = mlp(64).float()

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.cross_entropy(model(b[0]), b[1])

    return Case(model, loss_fn, float32())


def half() -> Case:
    model = mlp(64).bfloat16()
    return Case(model, lambda b: cross_entropy(model)((b[0].bfloat16(), b[1])), float32())


def ctc() -> Case:
    model = nn.LSTM(5, 7)  # time first, as its user transposes
    lengths = torch.tensor([9, 7, 9, 8, 6, 9, 9, 5])
    batch = {
        "sound": torch.randn(8, 9, 5),
        "lengths": lengths,
        "text": torch.randint(1, 7, (8, 3)),
        "letters": torch.tensor([3, 2, 1, 3, 1, 2, 3, 2]),
    }

    def loss_fn(b: dict[str, Tensor]) -> Any:
        scores = model(b["sound"].transpose(0, 1))[0].log_softmax(-1)
        return functional.ctc_loss(scores, b["text"], b["lengths"], b["letters"])

    return Case(model, loss_fn, batch)


def grpo(*, tokens: bool) -> Case:
    """Advantages of one group, so that the losses of samples cancel out."""
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()
    mask = (torch.arange(5) < torch.tensor([5, 2, 4, 3, 5, 1, 2, 4])[:, None]).double()
    advantages = torch.randn(8, dtype=torch.float64)
    worth = mask.sum(1) if tokens else torch.ones(8)
    advantages = advantages - (advantages * worth).sum() / worth.sum()
    batch = {"ids": torch.randint(0, 11, (8, 5)), "mask": mask, "advantages": advantages}

    def loss_fn(b: dict[str, Tensor]) -> Any:
        scores = model(b["ids"]).log_softmax(-1).gather(2, b["ids"][..., None])[..., 0]
        ratio = (scores - scores.detach()).exp()
        each = -ratio * b["advantages"][:, None] * b["mask"]
        loss: Tensor = (each.sum(1) / b["mask"].sum(1)).mean()
        return each.sum() / b["mask"].sum() if tokens else loss

    return Case(model, loss_fn, batch, {"count": lambda b: b["mask"].sum(1)} if tokens else {})


def wgan() -> Case:
    """Two large numbers, whose difference is rounded."""
    model = nn.Linear(6, 1)
    with torch.no_grad():
        model.bias.fill_(3e5)

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        difference: Tensor = model(b[0] + 0.01).mean() - model(b[0]).mean()
        return difference

    return Case(model, loss_fn, float32())


def language(*, shift: bool) -> Case:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()
    labels = torch.randint(0, 11, (8, 5))
    for row, keep in enumerate((5, 1, 2, 4, 3, 2, 2, 5)):
        labels[row, keep:] = -100

    def loss_fn(b: dict[str, Tensor]) -> Any:
        logits, y = model(b["input_ids"]), b["labels"]
        logits, y = (logits[:, :-1], y[:, 1:]) if shift else (logits, y)
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    batch = {"input_ids": torch.randint(0, 11, (8, 5)), "labels": labels}
    return Case(model, loss_fn, batch, {"count": count_tokens("labels", shift=shift)})


def weighted() -> Case:
    model, w = mlp(), torch.tensor([0.1, 1.0, 5.0, 0.5]).double()
    return Case(
        model,
        lambda b: functional.cross_entropy(model(b[0]), b[1], weight=w),
        pairs(),
        {"count": lambda b: w[b[1]]},
    )


def named() -> Case:
    model = mlp()

    def loss_fn(b: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        logits = model(b[0])
        return {"label": functional.cross_entropy(logits, b[1]), "size": logits.square().mean()}

    return Case(model, loss_fn, pairs(), {"count": {"label": None, "size": None}})


def in_pairs() -> Case:
    """Rows two by two: a piece of one row has no loss."""
    model = mlp()

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        good, bad = model(b[0]).mean(1).unflatten(0, (-1, 2)).unbind(1)
        return -functional.logsigmoid(good - bad).mean()

    return Case(model, loss_fn, pairs(), {"align": 2, "min_micro_batch_size": 2})


def per_sample_dice() -> Case:
    model = nn.Conv2d(1, 1, 3, padding=1).double()
    batch = torch.randn(8, 1, 5, 5).double(), (torch.rand(8, 1, 5, 5) > 0.5).double()

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        p = model(b[0]).sigmoid().flatten(1)
        t = b[1].flatten(1)
        return 1 - (2 * (p * t).sum(1) / (p.sum(1) + t.sum(1))).mean()

    return Case(model, loss_fn, batch)


def own_count_of_calls() -> Case:
    """A buffer that moves, and that the loss does not read."""
    model = mlp()
    model.register_buffer("seen", torch.zeros(()))

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        model.get_buffer("seen").add_(len(b[0]))
        return cross_entropy(model)(b)

    return Case(model, loss_fn, pairs())


def outside_discriminator() -> Case:
    """A module with BatchNorm that nobody named."""
    model = mlp()
    judge = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double().requires_grad_(False)
    return Case(model, lambda b: judge(model(b[0])).sigmoid().log().mean(), pairs())


def checkpointed(*, reentrant: bool) -> Case:
    model = mlp()

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        x = b[0].clone().requires_grad_()
        logits = checkpoint(model, x, use_reentrant=reentrant)
        return functional.cross_entropy(logits, b[1])

    return Case(model, loss_fn, pairs())


def summed() -> Case:
    model = mlp()
    return Case(
        model,
        lambda b: functional.cross_entropy(model(b[0]), b[1], reduction="sum"),
        pairs(),
        {"reduction": "sum"},
    )


def sequence_first_declared() -> Case:
    model = nn.LSTM(5, 4).double()
    batch = torch.randn(6, 8, 5).double(), torch.randint(0, 4, (6, 8))

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        return functional.cross_entropy(model(b[0])[0].flatten(0, 1), b[1].flatten())

    return Case(model, loss_fn, batch, {"dims": {"0": 1, "1": 1}})


def by_length() -> Case:
    case = language(shift=False)
    case.batch["mask"] = (case.batch["labels"] != -100).long()
    case.batch["input_ids"] *= case.batch["mask"]
    case.options |= {"pieces": "by_length", "length": "mask"}
    return case


def gradient_penalty() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        x = b[0].clone().requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (slope.norm(2, 1) - 1).square().mean()

    return Case(model, loss_fn, pairs())


def functional_gradients() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss_fn(b: tuple[Tensor, Tensor]) -> Any:
        slope = torch.func.vmap(torch.func.grad(lambda x: model(x).squeeze()))(b[0])
        return (slope.square().sum(1) - 1).square().mean()

    return Case(model, loss_fn, pairs())


def padded_attention() -> Case:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    mask = torch.arange(5) >= torch.tensor([5, 1, 2, 4, 3, 2, 2, 5])[:, None]
    batch = {"x": torch.randn(8, 5, 8).double(), "mask": mask, "y": torch.randn(8, 8).double()}

    def loss_fn(b: dict[str, Tensor]) -> Any:
        hidden = model(b["x"], src_key_padding_mask=b["mask"])
        return functional.mse_loss(hidden[:, 0], b["y"])

    return Case(model, loss_fn, batch)


def texts() -> Case:
    model = nn.EmbeddingBag(50, 4).double()
    batch = {"texts": ["a bc", "d", "e f g", "h", "ij k", "l", "m n", "o"], "y": pairs()[1]}

    def loss_fn(b: dict[str, Any]) -> Any:
        rows = [[len(word) + ord(word[0]) % 40 for word in text.split()] for text in b["texts"]]
        logits = torch.cat([model(torch.tensor([row])) for row in rows])
        return functional.cross_entropy(logits, b["y"])

    return Case(model, loss_fn, batch)


def actor_critic() -> Case:
    """PPO, with advantages that were normalised before the call."""
    model = nn.Linear(6, 5).double()
    batch = {"x": pairs()[0], "action": pairs()[1], "old": torch.randn(8).double() - 1}
    batch |= {"advantage": torch.randn(8).double(), "value": torch.randn(8).double()}

    def loss_fn(b: dict[str, Tensor]) -> Any:
        out = model(b["x"])
        chosen = torch.distributions.Categorical(logits=out[:, :4])
        ratio = (chosen.log_prob(b["action"]) - b["old"]).exp()
        clipped = torch.min(ratio * b["advantage"], ratio.clamp(0.8, 1.2) * b["advantage"])
        value = (out[:, 4] - b["value"]).square()
        return -clipped.mean() + 0.5 * value.mean() - 0.01 * chosen.entropy().mean()

    return Case(model, loss_fn, batch)


RIGHT: dict[str, Callable[[], Case]] = {
    "VAE": vae,
    "VAE, sum": lambda: vae("sum"),
    "diffusion": diffusion,
    "mixup": mixup,
    "dropout": lambda: dropout(always=False),
    "dropout always on": lambda: dropout(always=True),
    "drawn on the host": drawn_on_the_host,
    "BatchNorm": batch_norm,
    "AMP": amp,
    "half": half,
    "CTC": ctc,
    "GRPO": lambda: grpo(tokens=False),
    "DAPO": lambda: grpo(tokens=True),
    "WGAN": wgan,
    "tokens": lambda: language(shift=False),
    "shifted tokens": lambda: language(shift=True),
    "class weights, counted": weighted,
    "two names": named,
    "in pairs": in_pairs,
    "Dice of each sample": per_sample_dice,
    "a buffer that is not read": own_count_of_calls,
    "outside discriminator": outside_discriminator,
    "checkpointed": lambda: checkpointed(reentrant=False),
    "reentrant": lambda: checkpointed(reentrant=True),
    "sum": summed,
    "by length": by_length,
    "gradient penalty": gradient_penalty,
    "torch.func": functional_gradients,
    "padded attention": padded_attention,
    "texts": texts,
    "PPO": actor_critic,
    "sequence first, declared": sequence_first_declared,
}
