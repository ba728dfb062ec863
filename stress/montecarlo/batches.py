"""Batches of every shape, with samples that count differently, some of them nothing, and the loss of a piece of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from elastic_mbs import count_tokens, fields, items

from ..models.layers import CLASSES, VOCABULARY
from .plan import Plan

FEATURES = 3
IGNORED = -100


@dataclass
class Record:
    """A batch as a dataclass, with something in it that is no tensor."""

    x: Tensor
    rest: dict[str, Tensor]
    names: list[str]


def make_batch(plan: Plan, step: int) -> Any:
    """The batch of a step, from the plan's seed."""
    stream = torch.Generator().manual_seed(plan.seed * 1009 + step)
    n, length = plan.samples, plan.length
    dtype = torch.bfloat16 if plan.half else torch.float64
    if plan.tokens == "no":
        x = torch.randn(n, length, FEATURES, generator=stream, dtype=torch.float64).to(dtype)
    else:
        x = torch.randint(0, VOCABULARY, (n, length), generator=stream)
    y = torch.randint(0, CLASSES, (n, length), generator=stream)
    weights = torch.rand(n, generator=stream, dtype=torch.float64) * torch.randint(0, 2, (n,), generator=stream)
    weights[int(torch.randint(0, n, (), generator=stream))] = 0.75  # one of them counts
    if plan.count in ("tokens", "both"):
        kept = torch.randint(0, length + 1, (n, 1), generator=stream)
        kept[int(torch.randint(0, n, (), generator=stream))] = length
        y = torch.where(torch.arange(length) < kept, y, IGNORED)
    match plan.container:
        case "pair":
            return (x, y, weights)
        case "dict":
            return {"x": x, "labels": y, "weights": weights, "names": [f"sample {i}" for i in range(n)], "scale": 1.0}
        case "nested":
            return {"inputs": (x, {"labels": y}), "more": [weights, {"nothing": None}]}
        case "items":
            return {"x": list(x.unbind()), "labels": y, "weights": weights}
        case "record":
            return Record(x, {"labels": y, "weights": weights}, [f"sample {i}" for i in range(n)])
        case _:  # positions first
            return {"x": x.transpose(0, 1).contiguous(), "labels": y.T.contiguous(), "weights": weights}


def dims_of(plan: Plan) -> Any:
    """How a batch of this plan is cut, where shapes do not say."""
    return {"columns": {"x": 1, "labels": 1}, "items": items("x"), "nested": fields("more")}.get(plan.container)


def unpack(plan: Plan, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and weights of a batch or a piece."""
    match plan.container:
        case "pair":
            return batch[0], batch[1], batch[2]
        case "nested":
            return batch["inputs"][0], batch["inputs"][1]["labels"], batch["more"][0]
        case "items":
            return torch.stack(batch["x"]), batch["labels"], batch["weights"]
        case "record":
            return batch.x, batch.rest["labels"], batch.rest["weights"]
        case "columns":
            return batch["x"].transpose(0, 1), batch["labels"].T, batch["weights"]
        case _:
            return batch["x"], batch["labels"], batch["weights"]


LABELS: dict[str, Any] = {"pair": 1, "nested": "inputs.1.labels", "record": "rest.labels"}


def count_of(plan: Plan) -> Any:
    """`count=` for ElasticMBS."""
    if plan.container == "columns":
        tokens: Callable[[Any], Any] = lambda batch: (batch["labels"] != IGNORED).sum(0)  # noqa: E731  # the other branch is an object
    else:
        tokens = count_tokens(LABELS.get(plan.container, "labels"))
    return {"samples": None, "tokens": tokens, "weights": lambda batch: unpack(plan, batch)[2], "both": {"words": tokens, "rows": None}}[plan.count]


def counts_by_hand(plan: Plan, batch: Any) -> dict[str, list[Fraction]]:
    """The terms of each loss by sample, without the package's own reading of them."""
    _, labels, weights = unpack(plan, batch)
    rows = [Fraction(1)] * plan.samples
    words = [Fraction(int((row != IGNORED).sum())) for row in labels]
    found = {"samples": {"loss": rows}, "tokens": {"loss": words}, "weights": {"loss": [Fraction(float(w)) for w in weights]}}
    return {"words": words, "rows": rows} if plan.count == "both" else found[plan.count]


def losses(plan: Plan, scores: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The losses of a piece by name, each a mean or a sum over what it counts."""
    total = plan.reduction == "sum"
    if plan.count == "weights":
        rows = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none").mean(1)
        summed = (rows * weights.to(rows.dtype)).sum()
        return {"loss": summed if total else summed / weights.sum().to(rows.dtype)}
    rows = scores.pow(2).mean((1, 2))
    if plan.count == "samples":
        row_loss = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none").mean(1)
        return {"loss": row_loss.sum() if total else row_loss.mean()}
    words = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum" if total else "mean")
    if plan.count == "tokens":
        return {"loss": words}
    return {"words": words, "rows": rows.sum() if total else rows.mean()}
