"""The runtime around a training loop: a network fits a curve in less memory than its batch needs.

Run it: python examples/context_manager.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, MemoryBudget

STEPS, BATCH, BUDGET = 40, 2048, "2MiB"


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.linspace(-3, 3, BATCH).unsqueeze(1)
    batch = (x, torch.sin(x))

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = piece
        return functional.mse_loss(model(inputs), targets)

    losses = []
    with MemoryBudget(BUDGET), ElasticMBS(model) as mbs:  # the budget stands in for a small GPU
        for _ in range(STEPS):
            result = mbs.backward(loss_fn, batch)  # was: loss_fn(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(result))

    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, in {BUDGET} with batches of {BATCH}")
    print(
        f"{mbs.stats.ooms} out-of-memory errors survived, micro-batches of "
        f"{result.micro_batch_size}"
    )


if __name__ == "__main__":
    main()
