"""Evaluation, a guarded optimizer step and a checkpoint of what was learned about memory.

Run it: python examples/evaluation.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, MemoryBudget

STEPS, BATCH, BUDGET = 20, 2048, "4MiB"


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def main() -> None:
    model, optimizer = make()
    x = torch.randn(BATCH, 8)
    train, test = (x, x.sum(1, keepdim=True)), torch.randn(4 * BATCH, 8)

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        return functional.mse_loss(model(piece[0]), piece[1])

    losses = []
    with MemoryBudget(BUDGET), ElasticMBS(model) as mbs:  # the budget stands in for a small GPU
        for _ in range(STEPS):
            losses.append(float(mbs.backward(loss_fn, train)))
            mbs.optimizer_step(optimizer)  # Adam's first step allocates: whole or not at all
            optimizer.zero_grad()
        predicted = mbs.evaluate(model, test)  # without a graph, so in larger pieces; joined again
        saved = {"model": model.state_dict(), "sizes": mbs.state_dict()}
        ooms = mbs.stats.ooms

    model, optimizer = make()
    model.load_state_dict(saved["model"])
    with MemoryBudget(BUDGET), ElasticMBS(model) as mbs:
        mbs.load_state_dict(saved["sizes"])
        again = mbs.backward(loss_fn, train)  # starts at the size that was learned

    error = float((predicted - test.sum(1, keepdim=True)).abs().mean())
    print(f"loss {losses[0]:.3f} → {float(again):.3f}, mean error {error:.2f} on {len(test)} more")
    print(f"{ooms} out-of-memory errors survived, {again.ooms} after the sizes were loaded")


if __name__ == "__main__":
    main()
