"""One sample that does not fit, on a GPU; without one, the same tests run on the CPU.

On CUDA the errors are the allocator's own, and offloaded tensors go to pinned memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import Deescalated, Escalated, Event
from stress.reference.state import error_of
from tests.helpers.room import PLENTY, Room
from tests.helpers.steps import elastic, grads, whole_gradient

WIDTH = 16
QUICK = {"grow": True, "patience": 2, "jitter": 0.0, "sensor": None}


class Block(nn.Module):
    """A block that mixes positions, and has an MLP with large activations."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, hidden), nn.GELU(), nn.Tanh(), nn.Sigmoid(), nn.Linear(hidden, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(x).cumsum(1) / x.shape[1]
        found: Tensor = x + self.inner(x)
        return found


class Language(nn.Module):
    """A language model."""

    def __init__(self, vocabulary: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.Sequential(*(Block(hidden) for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.embed(ids)))
        return found


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def made(device: torch.device, vocabulary: int, hidden: int) -> tuple[Language, Tensor]:
    """Return a model and one sample: on a GPU, with activations of hundreds of megabytes."""
    torch.manual_seed(0)
    model = Language(vocabulary, hidden, 4).double().to(device)
    length = 2048 if device.type == "cuda" else 128
    generator = torch.Generator().manual_seed(1)
    return model, torch.randint(0, vocabulary, (1, length), generator=generator).to(device)


@pytest.mark.parametrize(
    ("rungs", "vocabulary", "hidden", "part"),
    [
        (("logits",), 4096, 16, 0.45),
        (("tile",), 64, 1024, 0.35),
        (("checkpoint",), 64, 1024, 0.5),
        (("offload",), 64, 1024, 0.5),
        (("logits", "tile", "checkpoint"), 4096, 1024, 0.25),
        ("auto", 4096, 1024, 0.3),
    ],
    ids=str,
)
def test_one_sample_that_does_not_fit_has_the_exact_gradient(
    device: torch.device, rungs: str | tuple[str, ...], vocabulary: int, hidden: int, part: float
) -> None:
    model, ids = made(device, vocabulary, hidden)
    events: list[Event] = []

    def step(piece: Tensor) -> Tensor:
        return loss_of(model, piece)

    with Room(device, model) as room:
        room.track(ids)
        wanted = whole_gradient(model, lambda twin: loss_of(twin, ids))
        loss_of(model, ids).backward()
        need = room.need(lambda: loss_of(model, ids).backward())
        mbs = elastic(model, on_event=events.append, escalate=rungs, **QUICK)
        model.zero_grad(set_to_none=False)
        room.allow(int(part * need))
        mbs.backward(step, ids)
        assert error_of(grads(model), wanted) <= 1e-12
        taken = [event for event in events if isinstance(event, Escalated)]
        assert taken
        room.allow(PLENTY)
        for _ in range(2 * len(taken) + 2):
            model.zero_grad()
            assert mbs.backward(step, ids).ooms == 0
            assert error_of(grads(model), wanted) <= 1e-12
        assert len([event for event in events if isinstance(event, Deescalated)]) == len(taken)
