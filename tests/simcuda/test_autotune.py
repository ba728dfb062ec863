"""Turns of calls are timed by events of the device, which runs behind the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, Event
from elastic_mbs.escalation.autotune import TURNS, Autotune
from elastic_mbs.escalation.ladder import Step
from stress.limits.simcuda import Simulation
from stress.reference.state import error_of
from tests.helpers.steps import elastic, grads, rungs_in_use, there, whole_gradient

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
BLOCKS, WIDTH, SAMPLES = 4, 16, 8


class Job:
    """A deep model on the device, whose runtime takes turns, and the steps of each call."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        ]
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*blocks)).double()
        x = torch.randn(SAMPLES, 64, WIDTH, dtype=torch.float64)
        wanted = whole_gradient(self.model, lambda twin: twin(x).square().mean())
        self.x, self.wanted = x.to(DEVICE), [there(grad).to(DEVICE) for grad in wanted]
        self.model.to(DEVICE)
        self.events: list[Event] = []
        self.used: list[tuple[Step, ...]] = []
        self.mbs: ElasticMBS = elastic(
            self.model, on_event=self.events.append, escalate="auto", jitter=0.0, grow=True
        )

    def loss_fn(self, x: Tensor) -> Tensor:
        rungs = rungs_in_use()
        if rungs is not None:
            self.used.append(rungs)
        found: Tensor = self.model(x).square().mean()
        return found

    def call(self) -> tuple[Step, ...]:
        self.used.clear()
        self.model.zero_grad()
        self.mbs.backward(self.loss_fn, self.x)
        assert error_of(grads(self.model), self.wanted) <= 1e-12
        return self.used[0]


def test_every_way_takes_its_turns_and_is_timed(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[float | None]()
    note = Autotune.note

    def noted(tuning: Autotune, seconds: float | None, elements: int) -> None:
        told.append(seconds)
        note(tuning, seconds, elements)

    monkeypatch.setattr(Autotune, "note", noted)
    job = Job()
    report = job.mbs.plan(job.loss_fn, job.x, autotune=True, budget="512MiB")
    ways = [way.step for way in report.ways if way.largest]
    assert None in ways
    assert len(ways) > 2
    used = [job.call() for _ in range(TURNS * len(ways))]
    assert used == TURNS * [() if step is None else (step,) for step in ways]
    assert len(told) == TURNS * len(ways)
    assert all(each is not None and each > 0 for each in told)
