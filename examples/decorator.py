"""The runtime on a step function: it is written for a micro-batch and called with a whole batch.

Run it: python examples/decorator.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import MemoryBudget, elastic_step

STEPS, BATCH, BUDGET = 40, 1024, "4MiB"


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    head = nn.Linear(256, 4)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.003)
    points = torch.randn(BATCH, 16)
    labels = points[:, :4].argmax(1)  # which of the first four coordinates is the largest

    @elastic_step([model, head])
    def train_step(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch  # a micro-batch
        logits = head(model(inputs))
        return functional.cross_entropy(logits, targets), logits.argmax(1) == targets

    losses = []
    ooms = 0
    with MemoryBudget(BUDGET):  # stands in for a small GPU
        for _ in range(STEPS):
            result = train_step((points, labels))  # the whole batch; the gradients are ready
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(result))
            ooms += result.ooms

    accuracy = float(result.outputs.float().mean())  # of all samples, in the batch's order
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, accuracy {accuracy:.0%}, in {BUDGET}")
    print(f"{ooms} out-of-memory errors survived, micro-batches of {result.micro_batch_size}")


if __name__ == "__main__":
    main()
