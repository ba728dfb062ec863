"""Lightning Fabric with the runtime in its loop.

A small transformer learns the text of Python's own library in less memory than its batch needs. It
needs the extra `lightning`. Run it: python examples/fabric_loop.py
"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from elastic_mbs import MemoryBudget
from elastic_mbs.integrations.fabric import elastic

STEPS, BATCH, LENGTH, BUDGET = 20, 64, 32, "3MiB"


class Transformer(nn.Module):
    """A predictor of the next character."""

    def __init__(self, characters: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Parameter(torch.zeros(LENGTH, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embed(text) + self.place, src_mask=self.mask))
        return logits


def main() -> None:
    torch.manual_seed(0)
    characters = sorted(set(text := Path(argparse.__file__).read_text()))
    windows = torch.tensor([characters.index(character) for character in text]).unfold(
        0, LENGTH + 1, 16
    )
    # A budget makes memory run out here, in place of a small GPU.
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(
        network := Transformer(len(characters)), torch.optim.AdamW(network.parameters(), lr=0.003)
    )
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(windows), BATCH, shuffle=True))

    def loss_fn(batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(
            model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten()
        )

    losses = []
    with MemoryBudget(BUDGET), elastic(fabric, model) as mbs:
        for batch, _ in zip(loader, range(STEPS), strict=False):
            result = mbs.backward(loss_fn, batch)  # was: fabric.backward(loss_fn(batch))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            mbs.optimizer_step(optimizer)  # or optimizer.step()
            optimizer.zero_grad()
            losses.append(float(result))
    print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}, in {BUDGET} with batches of {BATCH}")
    print(
        f"{mbs.stats.ooms} out-of-memory errors survived, micro-batches of "
        f"{result.micro_batch_size}"
    )


if __name__ == "__main__":
    main()
