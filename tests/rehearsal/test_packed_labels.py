"""`verify` names the count of labels of which each sample brings several, and it is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import count_tokens, cut
from tests.helpers.steps import elastic, off_by, whole_gradient

LENGTHS = torch.tensor([5, 2, 7, 3, 4, 6])
TOKENS = int(LENGTHS.sum())
STARTS = torch.cat([torch.zeros(1).long(), LENGTHS.cumsum(0)])
IDS = torch.randint(1, 20, (TOKENS,), generator=torch.Generator().manual_seed(0))
PLACES = torch.cat([torch.arange(int(length)) for length in LENGTHS])
W = torch.linspace(0.1, 2.0, 20).double()


def reader() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).double()


def loss_of(model: nn.Module, b: Any, *, shift: bool, **options: Any) -> Tensor:
    scores, labels = model(b["ids"].flatten()), b["labels"].flatten()
    scores, labels = (scores[:-1], labels[1:]) if shift else (scores, labels)
    return functional.cross_entropy(scores, labels, **options)


def padded_shift(model: nn.Module, b: Any, **options: Any) -> Tensor:
    """Return a loss that moves the labels and pads them, as transformers does."""
    labels = functional.pad(b["labels"].flatten(), (0, 1), value=-100)[1:]
    return functional.cross_entropy(model(b["ids"].flatten()), labels)


def masked(model: nn.Module, b: Any, **options: Any) -> Tensor:
    """Return a mean that no function of torch takes."""
    labels = b["labels"].flatten()
    each = -model(b["ids"].flatten()).log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    loss: Tensor = (each * (labels >= 0)).sum() / (labels >= 0).sum()
    return loss


def check(loss: Callable[..., Tensor], batch: Any, advised: str, dims: Any, **options: Any) -> None:
    """Check that the count is named on two samples and on all, and is exact where followed."""
    model = reader()
    loss_fn = lambda b: loss(model, b, **options)  # noqa: E731
    for samples in (2, 6):
        report = elastic(model, dims=dims).verify(loss_fn, batch, samples=samples)
        assert not report.ok
        assert f"give count={advised}" in " ".join(report.findings)
    if " a function" in advised:  # in words
        count = lambda b: torch.stack([w.sum() for w in W[b["labels"]].split(b["n"].tolist())])  # noqa: E731
    else:
        count = eval(advised, {"count_tokens": count_tokens})
    mbs = elastic(model, micro_batch_size=2, dims=dims, count=count)
    assert mbs.verify(loss_fn, batch).ok
    assert len(mbs.backward(loss_fn, batch).partition) > 1
    assert off_by(model, whole_gradient(model, lambda twin: loss(twin, batch, **options))) <= 1e-12


KINDS: dict[str, tuple[dict[str, Tensor], Any]] = {
    "by cu_seqlens": ({"cu_seqlens": STARTS, "position_ids": PLACES}, {}),
    "by=": (
        {"which": torch.repeat_interleave(torch.arange(6), LENGTHS), "kinds": torch.arange(6)},
        cut.ragged("ids", "labels", by="which"),
    ),
    "lengths=": ({"n": LENGTHS}, cut.ragged("ids", "labels", lengths="n")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pad", [-100, 0])
def test_the_mean_over_flat_labels(kind: str, pad: int) -> None:
    more, dims = KINDS[kind]
    labels = torch.where(torch.arange(TOKENS) % 3 > 0, IDS, pad)
    index = "" if pad == -100 else f", ignore_index={pad}"
    advised = f"count_tokens('labels'{index})"
    options = {"shift": False, "ignore_index": pad}
    check(loss_of, {"ids": IDS, "labels": labels, **more}, advised, dims, **options)


@pytest.mark.parametrize("shape", [(TOKENS,), (1, TOKENS)])
@pytest.mark.parametrize("loss", [loss_of, padded_shift, masked])
def test_the_mean_over_packed_labels(shape: Any, loss: Any) -> None:
    labels = torch.where(torch.arange(TOKENS) % 3 > 0, IDS, -100)
    labels[STARTS[:-1]] = -100  # nothing predicts the first token of a sequence
    batch = {"ids": IDS, "labels": labels, "position_ids": PLACES}
    batch = {name: value.view(shape) for name, value in batch.items()} | {"cu_seqlens": STARTS}
    advised = f"count_tokens('labels'{', shift=True' * (loss is loss_of)})"
    check(loss, batch, advised, {}, shift=True)


def test_weights_over_several_labels_of_a_sample_are_described_and_not_guessed() -> None:
    more, dims = KINDS["lengths="]
    terms = "the sum of the weights of such labels, w[y].sum(), in each sample"
    advised = f" a function batch → {terms}"
    check(loss_of, {"ids": IDS, "labels": IDS, **more}, advised, dims, shift=False, weight=W)
