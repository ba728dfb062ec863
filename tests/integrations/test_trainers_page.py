"""The diffs of docs/trainers.md train the same on both sides, the new one under errors."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from stress.reference.state import error_of
from tests.helpers.room import ROOT
from tests.helpers.steps import mlp, pairs

PAGE = (ROOT / "docs" / "trainers.md").read_text()
SECTIONS = dict(
    re.findall(r"^## (accelerate|Fabric)\n.*?```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
)


def side(diff: str, sign: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", sign))


def criterion(fits: int, output: Tensor, target: Tensor) -> Tensor:
    if len(output) > fits:
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 MiB.")
    return functional.cross_entropy(output, target)


def world(fits: int) -> dict[str, Any]:
    """The page's names; a loss over more than `fits` samples runs out of memory."""
    model: nn.Module = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loop = {
        "accelerator": Accelerator(cpu=True),
        "fabric": Fabric(accelerator="cpu", devices=1),
        "scheduler": schedule,
    }
    return {
        **loop,
        "model": model,
        "optimizer": optimizer,
        "loader": DataLoader(TensorDataset(*pairs(24)), 8),
        "criterion": partial(criterion, fits),
    }


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("framework", ["accelerate", "Fabric"])
def test_both_sides_of_every_diff_train_the_same(framework: str) -> None:
    exec(side(SECTIONS[framework], "-"), before := world(fits=8))
    exec(side(SECTIONS[framework], "+"), after := world(fits=5))
    after["mbs"].close()
    assert after["mbs"].stats.ooms
    for name in ("model", "optimizer", "scheduler"):
        states = [
            [
                leaf
                for leaf in torch.utils._pytree.tree_leaves(names[name].state_dict())
                if isinstance(leaf, Tensor | float)
            ]
            for names in (after, before)
        ]
        assert error_of(*([torch.as_tensor(leaf) for leaf in state] for state in states)) <= 1e-12
