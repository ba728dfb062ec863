"""`mbs.verify` names the cause where pieces give another loss than the batch, without a trace."""

import random
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import MicroBatchFloorError, UsageError, VerifyReport, count_tokens
from elastic_mbs.rehearsal.kept import Kept
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import FailOn, Pair, cross_entropy, elastic, failing, mlp, pairs
from tests.helpers.strikes import AtLine, Everywhere, until_clean

pytestmark = pytest.mark.injectable

VERIFY = ("rehearsal/verify.py", "engine/snapshot.py", "rollback/buffers.py")


def tokens() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()
    labels = torch.randint(0, 11, (8, 5))
    for row, keep in enumerate((5, 1, 2, 4, 3, 2, 2, 5)):
        labels[row, keep:] = -100
    return model, {"input_ids": torch.randint(0, 11, (8, 5)), "labels": labels}


def language(model: nn.Module) -> Any:
    return lambda b: functional.cross_entropy(
        model(b["input_ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100
    )


def says(report: VerifyReport, *words: str) -> bool:
    return any(all(word in finding for word in words) for finding in report.findings)


def test_verify_accepts_correct_losses() -> None:
    model, batch = tokens()
    report = elastic(model, count=count_tokens("labels")).verify(language(model), batch)
    assert report.ok
    assert report.findings == ()
    assert report.whole == pytest.approx(report.split, rel=1e-12)
    assert str(report).startswith("ok: loss")
    report.raise_if_wrong()
    plain = mlp()
    summed = elastic(plain, reduction="sum")
    assert summed.verify(partial(_sum, plain), pairs()).ok
    assert summed.verify(lambda b: _sum(plain, b) / summed.total, pairs()).ok
    batch_norm = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    report = elastic(batch_norm).verify(cross_entropy(batch_norm), pairs())
    assert report.ok
    assert says(report, "BatchNorm")


def test_verify_names_a_missing_count_also_for_shifted_labels() -> None:
    """A causal language model shifts its labels.

    The advice has to be the shifted count, also where the count without a shift was given.
    """
    model, batch = tokens()
    report = elastic(model).verify(language(model), batch)
    assert says(report, "count=count_tokens('labels')")
    with pytest.raises(UsageError, match="WRONG"):
        report.raise_if_wrong()

    def loss_fn(b: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(
            model(b["input_ids"])[:, :-1].flatten(0, 1),
            b["labels"][:, 1:].flatten(),
            ignore_index=-100,
        )

    for given in (None, count_tokens("labels")):
        report = elastic(model, count=given).verify(loss_fn, batch)
        assert not report.ok
        assert says(
            report, "from the second of each sample on", "count=count_tokens('labels', shift=True)"
        )
    assert elastic(model, count=count_tokens("labels", shift=True)).verify(loss_fn, batch).ok


def _sum(model: nn.Module, b: Pair) -> Tensor:
    return functional.cross_entropy(model(b[0]), b[1], reduction="sum")


def _regularised(model: nn.Module, b: Pair) -> Tensor:
    return _sum(model, b) + 0.1 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def _contrastive(model: nn.Module, b: Pair) -> Tensor:
    features = functional.normalize(model(b[0]), dim=1)
    return functional.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)))


@pytest.mark.parametrize(
    ("reduction", "loss", "words"),
    [
        ("mean", _sum, ("is a sum", "reduction='sum'")),
        ("sum", lambda model, b: cross_entropy(model)(b), ("is a mean", "reduction='mean'")),
        ("sum", _regularised, ("a part of about {:.6g} that", "once per piece")),
        ("mean", _contrastive, ("compares samples", "contrastive", "backward_embeddings")),
    ],
    ids=["sum", "mean", "regulariser", "contrastive"],
)
def test_verify_names_the_cause(
    model: nn.Sequential, reduction: str, loss: Any, words: tuple[str, ...]
) -> None:
    report = elastic(model, reduction=reduction).verify(partial(loss, model), pairs())
    assert not report.ok
    size = 0.1 * sum(p.square().sum().item() for p in model.parameters())
    assert says(report, *(word.format(size) for word in words))


def test_verify_names_the_loss_with_randomness_not_rolled_back() -> None:
    model, own = mlp(), random.Random(0)
    draw = own.random  # behind a method in C nobody finds it
    losses: dict[str, Any] = {
        "good": cross_entropy(model),
        "bad": lambda b: cross_entropy(model)(b) * draw(),
    }
    names: dict[str, None] = dict.fromkeys(losses)
    report = elastic(model, count=names).verify(
        lambda b: {name: loss(b) for name, loss in losses.items()}, pairs()
    )
    assert not report.ok
    assert says(report, "'bad'", "generators=")
    assert not says(report, "'good'")
    assert elastic(model, generators=[own]).verify(losses["bad"], pairs()).ok


class Traced:
    """A model with all state that verify could change, and a loss that changes all of it."""

    def __init__(self, ends: BaseException | None = None) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)
        ).double()
        self.model[1].eval()
        self.model.register_buffer("calls", torch.zeros(()))
        self.batch, self.ends = pairs(), ends
        cross_entropy(self.model)(self.batch).backward()
        self.grads = [parameter.grad for parameter in self.model.parameters()]
        self.before = self.state()

    def loss_fn(self, b: Pair) -> Tensor:
        self.model.get_buffer("calls").add_(1.0)
        # NumPy's legacy stream is the one that is rolled back.
        noise = torch.rand(()) + random.random() + np.random.rand()
        loss: Tensor = cross_entropy(self.model)(b) + 0 * noise
        loss.backward(retain_graph=True)
        if self.ends is not None:
            raise self.ends
        return loss

    def state(self) -> list[Any]:
        tensors = [
            *self.model.state_dict().values(),
            *(grad for grad in self.grads if grad is not None),
        ]
        modes = [module.training for module in self.model.modules()]
        return [
            [tensor.tolist() for tensor in tensors],
            modes,
            torch.get_rng_state().tolist(),
            random.getstate(),
            repr(np.random.get_state()),
        ]

    def check(self) -> None:
        assert self.state() == self.before
        assert all(
            parameter.grad is grad
            for parameter, grad in zip(self.model.parameters(), self.grads, strict=True)
        )


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("ends", [None, ValueError("mine"), KeyboardInterrupt()])
def test_verify_leaves_no_trace_however_it_ends(ends: BaseException | None) -> None:
    traced = Traced(ends)
    mbs = elastic(traced.model, micro_batch_size=4)
    for _ in range(2):
        with nullcontext() if ends is None else pytest.raises(type(ends)):
            mbs.verify(traced.loss_fn, traced.batch)
        traced.check()
    assert mbs.stats.calls == 0
    traced.model.zero_grad()
    assert mbs.backward(cross_entropy(traced.model), traced.batch).partition == ((0, 4), (4, 8))


@pytest.mark.no_oom_injection
def test_verify_struck_at_any_operation_or_line_leaves_no_trace() -> None:
    operations, lines = (
        until_clean(lambda n: Everywhere(at=[n]), stride=23, least=50),
        until_clean(lambda n: AtLine(n, *VERIFY), stride=131, least=100),
    )
    strikes: Iterator[Any] = chain(operations, lines)
    for strike in strikes:
        traced = Traced()
        mbs = elastic(traced.model)
        with strike, suppress(KeyboardInterrupt):
            assert mbs.verify(traced.loss_fn, traced.batch, samples=2).ok
        traced.check()


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(
    ("owner", "name", "runs_before"),
    [(BufferCopies, "end_call", 1), (Kept, "restore", 0)],  # one end comes before all runs
)
def test_verify_answers_where_memory_runs_out_as_it_ends(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, runs_before: int
) -> None:
    traced, calls, original = Traced(), count(), getattr(owner, name)

    def struck(self: Any) -> None:
        if next(calls) == runs_before:
            raise MemoryError
        original(self)

    monkeypatch.setattr(owner, name, struck)
    assert elastic(traced.model).verify(traced.loss_fn, traced.batch, samples=2).ok
    assert next(calls) == 3
    traced.check()


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("n", [1, 5, 20, 60])
def test_verify_that_never_fits_leaves_a_typed_error_and_no_trace(
    n: int,
) -> None:
    traced = Traced()
    with InjectOOM(always_from=n), pytest.raises(MicroBatchFloorError, match="there is no room to"):
        elastic(traced.model).verify(traced.loss_fn, traced.batch, samples=2)
    traced.check()


def test_verify_passes_on_an_error_that_need_not_be_out_of_memory() -> None:
    model, fail = mlp(), FailOn(1, error=lambda: RuntimeError("could not create a primitive"))
    with pytest.raises(RuntimeError, match="could not create a primitive"):
        elastic(model).verify(failing(model, fail), pairs())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_verify_does_not_take_a_loss_that_is_no_number_for_randomness(
    model: nn.Sequential, value: float
) -> None:
    report = elastic(model).verify(lambda batch: cross_entropy(model)(batch) * value, pairs())
    assert not report.ok
    assert f"is {value}, which no split can be compared with" in report.findings[0]
    assert "no NaN was found in the batch or the model, so" in report.findings[0]


def test_a_loss_of_nan_is_traced_to_the_batch_or_the_model(model: nn.Sequential) -> None:
    x, y = pairs()
    report = elastic(model).verify(cross_entropy(model), (torch.full_like(x, torch.nan), y))
    assert "NaN is in the batch ('0')" in report.findings[0]
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan
    report = elastic(model).verify(cross_entropy(model), (x, y))
    assert "NaN is in the model ('weight' of a Linear)" in report.findings[0]


class Detector(nn.Module):
    """A model that returns losses in training and something else in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        out = self.head(x)
        return {"box": out.square().mean()} if self.training else list(out)


def test_an_error_of_a_model_in_evaluation_says_that_it_was_in_evaluation() -> None:
    model = Detector()
    mbs = elastic(model, micro_batch_size=2)

    def loss_fn(x: Tensor) -> Tensor:
        found: Tensor = sum(model(x).values())
        return found

    with pytest.raises(AttributeError) as caught:
        mbs.verify(loss_fn, torch.randn(4, 4))
    assert "compared with the modules in evaluation" in caught.value.__notes__[0]
    mbs.backward(loss_fn, torch.randn(4, 4))  # trains without it
