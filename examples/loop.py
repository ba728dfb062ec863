"""The loop over micro-batches written out, for a step that is no function of a batch.

Run it: python examples/loop.py
"""

from functools import partial

import torch
from torch import nn

from elastic_mbs import ElasticMBS, MemoryBudget

STEPS, BATCH, BUDGET = 40, 2048, "2MiB"


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    points = torch.rand(BATCH, 2) * 4 - 2
    batch = (points, points.prod(1, keepdim=True))  # the network learns to multiply
    losses: list[float] = []
    worst: list[float] = []

    with MemoryBudget(BUDGET), ElasticMBS(model) as mbs:  # the budget stands in for a small GPU
        for _ in range(STEPS):
            worst.clear()
            for micro in mbs.micro_batches(batch):
                with micro:  # after an error the loop comes back with the same samples
                    inputs, targets = micro.data
                    errors = (model(inputs) - targets).square()
                    largest = float(errors.detach().max())
                    micro.backward(errors.mean())
                    # run once for each sample, when the whole batch is done
                    micro.on_commit(partial(worst.append, largest))
                    del errors  # a name outlives the block, and what it holds with it
            optimizer.step()
            optimizer.zero_grad()
            if (result := mbs.last_result) is not None:
                losses.append(float(result))

    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, largest error {max(worst):.3f}, in {BUDGET}")
    print(f"{mbs.stats.ooms} out-of-memory errors survived in {STEPS} steps")


if __name__ == "__main__":
    main()
