"""`verify` calls no right loss wrong, and leaves no trace of its runs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import count_tokens
from tests.helpers.right_losses import RIGHT
from tests.helpers.steps import elastic, off_by, whole_gradient


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("seed", range(3))
def test_a_right_loss_is_never_called_wrong(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    case = RIGHT[kind]()
    for samples in (2, 3, 6):
        report = elastic(case.model, **case.options).verify(
            case.loss_fn, case.batch, samples=samples
        )
        assert report.ok, report
        assert report.compared or case.draws or kind == "in pairs", report


LAZY = """
import sys, numpy, torch
from elastic_mbs import ElasticMBS

sys.modules.pop("numpy.random", None)
vars(numpy).pop("random", None)
model = torch.nn.Linear(3, 1)
def loss_fn(x):
    return model(x).mean() * numpy.random.rand()
print(ElasticMBS(model).verify(loss_fn, torch.randn(4, 3)))
"""


def test_numpy_that_loads_its_random_numbers_late_is_no_unknown_source() -> None:
    found = subprocess.run(
        [sys.executable, "-c", LAZY], capture_output=True, text=True, check=True
    ).stdout
    assert "generators=" not in found
    assert found.startswith("ok: ")  # the stream is put back for each piece, so all draw the same


KINDS = ("samples", "tokens", "classes", "sum", "batch")


@settings(max_examples=60)
@given(
    loss=st.sampled_from(KINDS),
    said=st.sampled_from(KINDS[:4]),
    pad=st.sampled_from([-100, 0, 1]),
    kept=st.lists(st.integers(1, 4), min_size=4, max_size=6),
    seed=st.integers(0, 99),
)
def test_a_loss_is_called_wrong_exactly_where_its_gradient_is(
    loss: str, said: str, pad: int, kept: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)).double()
    weight = torch.rand(7).double() + 0.1
    labels = torch.randint(2, 7, (len(kept), 4))
    labels[torch.arange(4) >= torch.tensor(kept)[:, None]] = pad
    batch = {"x": torch.randint(0, 7, labels.shape), "y": labels}

    def count_classes(b: Any) -> Tensor:
        return torch.where(b["y"] == pad, 0, weight[b["y"].clamp(min=0)]).sum(1)

    def make(each: nn.Module) -> Any:
        def loss_fn(b: Any) -> Any:
            logits = each(b["x"]).flatten(0, 1)
            w = weight if loss == "classes" else None
            taken = functional.cross_entropy(
                logits, b["y"].flatten(), w, ignore_index=pad, reduction="none"
            ).reshape(b["y"].shape)
            tokens = (b["y"] != pad).sum(1)
            if loss == "sum":
                return taken.sum()
            if loss == "samples":
                return (taken.sum(1) / tokens).mean()
            if loss == "batch":
                return taken.sum().square()
            return taken.sum() / (count_classes(b).sum() if w is not None else tokens.sum())

        return loss_fn

    options: dict[str, dict[str, Any]] = {
        "samples": {},
        "tokens": {"count": count_tokens("y", ignore_index=pad)},
        "classes": {"count": count_classes},
        "sum": {"reduction": "sum"},
    }
    mbs = elastic(model, micro_batch_size=1, **options[said])
    report = mbs.verify(make(model), batch)
    mbs.backward(make(model), batch)
    exact = off_by(model, whole_gradient(model, lambda twin: make(twin)(batch))) <= 1e-9
    assert report.compared
    assert report.ok == exact, report
