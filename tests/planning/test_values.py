"""A step that reads values is planned where they are those of labels, masks and constants alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, MemoryBudget
from tests.helpers.planned import peak_of
from tests.helpers.steps import elastic, mlp, pairs, quiet, there

pytestmark = pytest.mark.no_oom_injection
causal = nn.Transformer.generate_square_subsequent_mask
OUTSIDE = causal(6)


class Masked(nn.Module):
    """An encoder and a decoder that get causal masks, and are not told that they are causal."""

    def __init__(self, mask: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.net = nn.Transformer(16, 2, 1, 1, 32, batch_first=True, dropout=0.0)
        self.make = mask
        self.register_buffer("mask", causal(6))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.make(self)
        out: Tensor = self.net(x, x, src_mask=mask, tgt_mask=mask)
        return out


MASKS: dict[str, Callable[[Any], Tensor]] = {
    "made in the step": lambda model: causal(6),
    "of flags": lambda model: torch.triu(torch.ones(6, 6, dtype=torch.bool), diagonal=1),
    "a buffer": lambda model: model.mask,
    "from elsewhere": lambda model: OUTSIDE,
}


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)


@pytest.mark.parametrize("mask", MASKS)
def test_a_transformer_that_looks_at_its_mask_is_planned(mask: str) -> None:
    torch.manual_seed(0)
    model, x = Masked(MASKS[mask]), torch.randn(16, 6, 16)

    def loss_fn(b: Tensor) -> Tensor:
        out: Tensor = model(b).square().mean()
        return out

    with MemoryBudget(2**40, track=[model, x, OUTSIDE]) as budget:
        report = ElasticMBS(model, **quiet()).plan(loss_fn, x)
        assert report.reason is None
        for size in (16, 4):
            loss_fn(x[:size]).backward()
            real = peak_of(budget, lambda size=size: backward(loss_fn(x[:size])))  # type: ignore[misc]
            planned = there(there(report.model).predict(size * x[0].numel(), first=False))
            assert abs(planned / real - 1) <= 0.001


def counted(out: Tensor, labels: Tensor) -> Tensor:
    hidden = out.clone().relu_()  # written, and no memory of what is known
    return hidden.mean() * int((labels > 1).sum())


def test_what_is_written_elsewhere_leaves_labels_known() -> None:
    model = mlp()
    report = elastic(model, micro_batch_size=8).plan(lambda b: counted(model(b[0]), b[1]), pairs())
    assert report.reason is None


def written(out: Tensor) -> Tensor:
    known = torch.zeros(3, dtype=out.dtype)
    known[:1].add_(out.mean())
    return out.mean() if known.sum() > 0 else -out.mean()


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "written to": written,
    "not set": lambda out: out.mean() if torch.empty(3).sum() > 0 else -out.mean(),
    "drawn": lambda out: out.mean() if torch.rand(3).sum() > 0 else -out.mean(),
    "of the model": lambda out: out.mean() if (out * torch.ones(4)).sum() > 0 else -out.mean(),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_depends_on_more_than_constants_is_not_known(case: str) -> None:
    model = mlp()
    report = elastic(model, micro_batch_size=8).plan(lambda b: UNKNOWN[case](model(b[0])), pairs())
    assert "reads the value" in there(report.reason)


SELECTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "labels by their own mask": lambda out, y: out.mean() * y.masked_select(y > 1).numel(),
    "a list of labels": lambda out, y: out.mean() * (y + 1).tolist()[0],
    "their different values": lambda out, y: out.mean() * len(y.unique()),
    "repeated labels": lambda out, y: out.mean() * len(torch.repeat_interleave(y, y)),
    "rows by a mask": lambda out, y: out[y > 1].exp().mean(),
    "rows by a mask and columns": lambda out, y: out[y > 1][:, [0, 2]].exp().mean(),
    "rows by a mask of the rows and one column": lambda out, y: out[y > 1, 1].exp().mean(),
    "numbers by a mask": lambda out, y: out.masked_select((y > 1)[:, None]).exp().mean(),
}


@pytest.mark.parametrize("case", SELECTED)
def test_what_a_mask_of_labels_selects_is_planned(case: str) -> None:
    torch.manual_seed(0)
    model, rows = mlp(), pairs(64)

    def loss_fn(b: Any) -> Tensor:
        return SELECTED[case](model(b[0]), b[1])

    with MemoryBudget(2**40, track=[model, *rows]) as budget:
        report = ElasticMBS(model, **quiet()).plan(loss_fn, rows)
        assert report.reason is None
        loss_fn(rows).backward()
        real = peak_of(budget, lambda: backward(loss_fn(rows)))
        elements = sum(part.numel() for part in rows)
        planned = there(there(report.model).predict(elements, first=False))
        assert abs(planned / real - 1) <= 0.02


LENGTHS: dict[str, Callable[[Tensor], Any]] = {
    "a constant": lambda x: torch.full((len(x),), 40),
    "the sums of a mask like the inputs": lambda x: torch.ones_like(x[..., 0]).long().sum(1),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_ctc_loss_is_planned_from_the_lengths_of_its_labels(kind: str) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 12), torch.randn(16, 40, 8), torch.randint(1, 12, (16, 9))
    y[1::2, 7:] = -1

    def loss_fn(b: Any) -> Tensor:
        log_probs = model(b[0]).log_softmax(-1).transpose(0, 1)
        labels = b[1].masked_select(b[1] >= 0)
        return nn.functional.ctc_loss(log_probs, labels, LENGTHS[kind](b[0]), (b[1] >= 0).sum(1))

    with MemoryBudget(2**40, track=[model, x, y]) as budget:
        report = ElasticMBS(model, **quiet()).plan(loss_fn, (x, y))
        assert report.reason is None
        loss_fn((x, y)).backward()
        real = peak_of(budget, lambda: backward(loss_fn((x, y))))
        elements = x.numel() + y.numel()
        planned = there(there(report.model).predict(elements, first=False))
        assert abs(planned / real - 1) <= 0.02
