"""The diffs of docs/loops.md: both sides train the same, the new one under failures."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from elastic_mbs import ElasticMBS, Policy
from elastic_mbs.testing.faults import RandomFaults
from stress.reference.state import error_of
from tests.helpers.room import ROOT

pytestmark = pytest.mark.no_oom_injection

PAGE = (ROOT / "docs" / "loops.md").read_text()
SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
DIFFS = [
    pytest.param(diff, id=f"{title}-{n}")
    for title, text in SECTIONS
    for n, diff in enumerate(re.findall(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
]
FITS = 5  # samples of a batch of 8


def side(diff: str, sign: str) -> str:
    return "".join(
        line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[:1] in (" ", "\n", sign)
    )


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.value(x).squeeze(1)


class Writer(nn.Module):
    """A language model that reads from left to right."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(9, 6), nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 9)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.read(self.embed(ids))[0])
        return scores


def completions() -> dict[str, Tensor]:
    """Return a rollout: 16 texts of 3 to 12 tokens, four for each prompt, with their rewards."""
    lengths = torch.tensor([12, 3, 5, 9, 4, 4, 7, 3, 11, 6, 3, 5, 8, 4, 3, 10])
    mask = (torch.arange(12) < lengths[:, None]).long()
    return {"ids": torch.randint(1, 9, mask.shape) * mask, "mask": mask, "rewards": torch.rand(16)}


class Criterion(nn.Module):
    """A loss that fails in training on more than `fits` samples, and notes the use of autocast."""

    autocast_was: Tensor

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.fits = fits
        self.register_buffer("autocast_was", torch.zeros(2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(output) > self.fits:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 MiB.")
        self.autocast_was[int(torch.is_autocast_enabled("cpu"))] = 1
        return functional.cross_entropy(output, target)


class TimmScaler:
    """A copy of timm's NativeScaler: backward, clipping, step and update in one call."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu")
        self.state_dict = self._scaler.state_dict

    def __call__(
        self, loss: Tensor, optimizer: torch.optim.Optimizer, clip_grad: float, parameters: Any
    ) -> None:
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()


def mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def world(*, fits: int) -> dict[str, Any]:
    """Return the names that the page takes for granted.

    The training loss runs out of memory on more than `fits` samples.
    """
    torch.manual_seed(0)
    model, generator, discriminator, agent = mlp(3), mlp(4), mlp(1), Agent()
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = sgd([*model.parameters(), *agent.parameters()])
    dataset = TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
    rollout = dict(zip(["advantages", "returns", "log_probs"], torch.randn(3, 24), strict=True))
    subject = {
        "model": model,
        "criterion": Criterion(fits),
        "optimizer": optimizer,
    }
    data = {"dataset": dataset, "loader": DataLoader(dataset, 8), "DataLoader": DataLoader}
    half = {
        "device": "cpu",
        "dtype": torch.bfloat16,
        "amp_autocast": partial(torch.autocast, "cpu", torch.bfloat16),
        "loss_scaler": TimmScaler(),
    }
    gan = {
        "generator": generator,
        "optimizer_g": sgd(generator.parameters()),
        "softplus": functional.softplus,
    }
    gan |= {"discriminator": discriminator, "optimizer_d": sgd(discriminator.parameters())}
    ppo = {
        "agent": agent,
        "rollout": {**rollout, "observations": dataset.tensors[0], "actions": dataset.tensors[1]},
    }
    lm = Writer()
    optimizer.add_param_group({"params": [*lm.parameters()]})
    grpo = {"lm": lm, "completions": completions(), "Policy": Policy}
    rnn = nn.GRU(4, 3, num_layers=2, batch_first=True)
    optimizer.add_param_group({"params": [*rnn.parameters()]})
    text = torch.randn(3, 8, 5, 4).unbind(), torch.randint(0, 3, (3, 8, 5)).unbind()
    bptt = {"rnn": rnn, "chunks": [*zip(*text, strict=True)]}
    loops = {**data, **half, **gan, **ppo, **grpo, **bptt}
    return {"torch": torch, "ElasticMBS": ElasticMBS, **subject, **loops}


def outcome(names: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return the results of a loop by name: the numbers in each state, and its count."""
    states = {
        name: value.state_dict()
        for name, value in names.items()
        if hasattr(value, "state_dict") and not isinstance(value, type)
    }
    leaves = {
        name: pytree.tree_leaves(value)
        for name, value in {
            **states,
            "correct": names.get("correct"),
            "kls": names.get("kls"),
        }.items()
    }
    return {
        name: [torch.as_tensor(leaf) for leaf in found if isinstance(leaf, Tensor | float | int)]
        for name, found in leaves.items()
    }


@pytest.mark.parametrize("guarded", [False, True], ids=["plain-step", "guarded-step"])
@pytest.mark.parametrize("diff", DIFFS)
def test_both_sides_of_every_diff_train_the_same(
    diff: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        exec(side(diff, "-"), before := world(fits=8))
        new = side(diff, "+")
        if guarded:
            new = re.sub(
                r"scaler\.step\((\w+)\)|(optimizer\w*)\.step\(\)", r"mbs.optimizer_step(\1\2)", new
            )
        with RandomFaults(0, diff, always=True) as faults:
            exec(new, after := world(fits=FITS))
    finally:
        torch.set_default_dtype(default)
    after["mbs"].close()
    assert after["mbs"].stats.ooms >= 1
    assert faults.hits or "compile" in diff  # a compiled model does not run under a dispatch mode
    got = outcome(after)
    off = {name: error_of(got[name], wanted) for name, wanted in outcome(before).items()}
    assert {name: error for name, error in off.items() if not error <= 1e-12} == {}


def test_the_page_has_a_diff_of_few_lines_for_every_kind_of_loop() -> None:
    assert len(DIFFS) == len(SECTIONS) + 1 == 17  # accumulation has two
    texts = [
        {
            sign: {
                line[1:].strip() for line in str(diff.values[0]).splitlines() if line[:1] == sign
            }
            for sign in "+-"
        }
        for diff in DIFFS
    ]
    # lines that only moved do not count
    assert {len(text["+"] - text["-"]) for text in texts} == {2, 3, 4, 5}
