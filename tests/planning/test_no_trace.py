"""A plan leaves no trace in model, gradients, optimizer, random streams or memory."""

import gc
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from elastic_mbs import ElasticMBS, MemoryBudget, UsageError
from tests.helpers.steps import quiet, there


class Restless(nn.Module):
    """A model whose forward changes all that a forward can change."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.rnn = (
            nn.BatchNorm1d(8, momentum=None),
            nn.Dropout(0.5),
            nn.GRU(8, 8),
        )
        self.first, self.last = parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2)
        self.tied, self.blocks = (
            self.last,
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)),
        )
        self.register_buffer("mean", torch.zeros(8))
        self.mask = torch.ones(8)
        self.calls, self.kept, self.cache = 0, [torch.zeros(1)], {"first": torch.ones(1)}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.blocks(self.drop(self.norm(torch.tanh(self.first(x)))) * self.mask)
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        self.cache["new"] = self.late = x.detach()
        self.kept.append(x.detach())
        self.register_buffer("lazy", torch.arange(8))
        random.random(), numpy.random.rand()
        self.train(not self.training)
        out: Tensor = self.last(self.rnn(x)[0] - self.mean)
        return out


def contents(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield all that the modules hold, with the identities, versions and values of tensors."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key == "_elastic_mbs":  # the place of its runtime
                continue
            inside = (
                list(value.items() if isinstance(value, dict) else enumerate(value))
                if isinstance(value, dict | list)
                else [("", value)]
            )
            yield name, key, id(value), len(inside)
            for each, found in inside:
                tensors = (
                    (found._version, found.detach().clone().tolist(), id(found.grad))
                    if isinstance(found, Tensor)
                    else ()
                )
                yield (
                    name,
                    key,
                    each,
                    id(found) if isinstance(value, dict | list) else repr(value),
                    *tensors,
                )


class Subject:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.outside = Restless(), nn.Parameter(torch.ones(()))
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), self.outside])
        self.batch = torch.randn(8, 8), torch.randint(0, 2, (8,))
        self.steps = 0
        self.optimizer.register_step_post_hook(lambda *_: setattr(self, "steps", self.steps + 1))

    def loss_fn(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch[0]) * self.outside, batch[1])

    def state(self) -> Any:
        optimizer = [
            (id(p), id(v), v._version, v.tolist())
            for p, state in self.optimizer.state.items()
            for v in state.values()
        ]
        hosts = (
            random.getstate(),
            numpy.random.get_state()[1].tolist(),  # type: ignore[index]
            torch.get_rng_state().tolist(),
        )
        groups = [
            {**group, "params": list(map(id, group["params"]))}
            for group in self.optimizer.param_groups
        ]
        return (
            list(contents(self.model)),
            optimizer,
            groups,
            hosts,
            id(self.outside.grad),
            self.steps,
        )


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
def test_a_plan_changes_neither_model_nor_optimizer_nor_streams(trained: bool) -> None:
    subject = Subject()
    if trained:
        subject.loss_fn(subject.batch).backward()
        subject.optimizer.step()
    before = subject.state()
    report = ElasticMBS(subject.model, **quiet()).plan(
        subject.loss_fn, subject.batch, optimizer=subject.optimizer, budget=2**30, compare=True
    )
    assert report.reason is None
    assert {way.name for way in report.ways if way.reason is not None} <= {"logits", "tile"}
    assert len([way for way in report.ways if way.reason is None]) >= 3
    assert subject.state() == before
    subject.loss_fn(subject.batch).backward()
    subject.optimizer.step()
    assert not [o for o in gc.get_objects() if isinstance(o, FakeTensor)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError], ids=["an interrupt", "an error"])
def test_a_plan_that_ends_in_the_middle_changes_nothing(error: type[BaseException]) -> None:
    subject = Subject()
    before = subject.state()

    def loss_fn(batch: Any) -> Tensor:
        subject.loss_fn(batch).backward()
        raise error("in the middle")

    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext():
        report = ElasticMBS(subject.model, **quiet()).plan(loss_fn, subject.batch)
        assert "in the middle" in there(report.reason)
    subject.outside.grad = None  # made by the user's own backward
    assert subject.state() == before


def test_a_plan_takes_no_memory() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 10))
    batch, labels = torch.randn(1000, 1000), torch.zeros(1000, dtype=torch.long)
    with MemoryBudget(2**40, track=[model, batch, labels]) as budget:
        before = budget.live
        optimizer = torch.optim.AdamW(model.parameters())
        report = ElasticMBS(model, **quiet()).plan(
            lambda b: F.cross_entropy(model(b[0]), b[1]), (batch, labels), optimizer=optimizer
        )
        assert report.step > 3 * before / 2
        assert budget.peak - before < 4096
        assert budget.live - before < 4096


def test_tensors_that_the_loss_function_keeps_are_refused() -> None:
    model, kept = nn.Linear(8, 2), []

    def loss_fn(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        kept.append(loss.detach())
        return loss

    mbs = ElasticMBS(model, **quiet())
    with pytest.raises(UsageError, match=r"2 fake tensors.*the variable 'kept' of .*loss_fn"):
        mbs.plan(loss_fn, torch.randn(8, 8))
    kept.clear()
    assert mbs.backward(loss_fn, torch.randn(8, 8)).ooms == 0


def test_casts_kept_by_an_autocast_around_a_plan_are_no_fakes() -> None:
    model = nn.Linear(8, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            ElasticMBS(model, **quiet())
            .plan(lambda b: model(b).float().mean(), torch.randn(8, 8))
            .reason
            is None
        )
        model(torch.randn(8, 8)).float().mean().backward()
    assert there(model.weight.grad).abs().sum() > 0


def test_nothing_counts_as_kept_where_callers_hold_their_arguments() -> None:
    model = nn.Linear(8, 2)
    # Frames under dynamo hold their arguments; after a failed torch.compile all frames do.
    plan = torch._dynamo.run(ElasticMBS(model, **quiet()).plan)
    assert plan(lambda b: model(b).mean(), torch.randn(8, 8)).reason is None
