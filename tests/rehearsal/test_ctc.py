"""What is said of a CTC loss in a plain loop is right when followed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import Warned, count_tokens
from tests.helpers.steps import elastic, off_by, whole_gradient

N, STEPS, CLASSES, WIDTH = 6, 12, 5, 4
FRAMES = torch.tensor([12, 6, 9, 12, 10, 8])
WORDS = torch.tensor([4, 1, 3, 2, 4, 2])
KEPT = torch.arange(WIDTH) < WORDS[:, None]


def batch_of(*, pad: int, blank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    lowest = 1 if blank == 0 else 0
    labels = torch.randint(lowest, CLASSES - (blank > 0), (N, WIDTH), generator=draw)
    return {
        "x": torch.randn(N, STEPS, 3, generator=draw, dtype=torch.float64),
        "labels": torch.where(KEPT, labels, pad),
        "frames": FRAMES,
        "words": WORDS,
    }


def ctc(model: nn.Module, b: Any, *, blank: int, reduction: str) -> Tensor:
    steps = model(b["x"]).log_softmax(-1).transpose(0, 1)
    return functional.ctc_loss(
        steps, b["labels"], b["frames"], b["words"], blank=blank, reduction=reduction
    )


def reader() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, CLASSES).double()


def test_a_ctc_loss_is_a_mean_over_samples_and_no_other_count_is_advised_for_it() -> None:
    model, told, batch = reader(), list[Any](), batch_of(pad=-100, blank=0)

    def loss_fn(b: Any) -> Tensor:
        return ctc(model, b, blank=0, reduction="mean")

    mbs = elastic(model, micro_batch_size=4, on_event=told.append)
    mbs.backward(loss_fn, batch)
    exact = whole_gradient(model, lambda twin: ctc(twin, batch, blank=0, reduction="mean"))
    assert off_by(model, exact) <= 1e-12
    assert mbs.verify(loss_fn, batch).ok
    (text,) = [event.message for event in told if isinstance(event, Warned)]
    assert "If the loss is a mean over labels: count=count_tokens('labels')" in text
    assert "If it is a mean over samples (ctc_loss), that is right" in text
    counted = elastic(model, count=count_tokens("labels")).verify(loss_fn, batch)
    assert not counted.ok
    assert "is a mean over samples, and count= counts something else: leave" in str(counted)


@pytest.mark.parametrize("divisor", ["frames", "words"])
@pytest.mark.parametrize("blank", [0, CLASSES - 1])
def test_the_count_of_a_ctc_loss_divided_by_a_number_of_each_sample_is_named(
    divisor: str, blank: int
) -> None:
    # 0 pads the labels, and is one where it is not the blank: no count of labels is right
    batch = batch_of(pad=0, blank=blank)

    def make(each: nn.Module) -> Callable[[Any], Tensor]:
        return lambda b: ctc(each, b, blank=blank, reduction="sum") / b[divisor].sum()

    model = reader()
    for samples in (2, 6):
        report = elastic(model).verify(make(model), batch, samples=samples)
        assert not report.ok
        (advised,) = re.findall(r"give count=(lambda b: b\['\w+'\])", str(report))
        assert divisor in advised
    model.zero_grad()
    mbs = elastic(model, micro_batch_size=4, count=eval(advised))
    assert mbs.verify(make(model), batch).ok
    mbs.backward(make(model), batch)
    assert off_by(model, whole_gradient(model, lambda twin: make(twin)(batch))) <= 1e-12
