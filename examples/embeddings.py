"""A contrastive loss, which compares all samples of a batch, in less memory than the batch needs.

The gradient is that of the loss over the whole batch: every sample has all others as negatives.
Run it: python examples/embeddings.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, MemoryBudget

STEPS, BATCH, POINTS, BUDGET = 30, 256, 16, "6MiB"


def main() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 16))
    scale = nn.Parameter(torch.tensor(2.0))  # learned; the runtime finds it in the loss
    optimizer = torch.optim.Adam([*encoder.parameters(), scale], lr=0.01)
    centers = torch.randn(BATCH, 1, 8)
    batch = tuple(centers + torch.randn(BATCH, POINTS, 8) for _ in range(2))  # two views of each

    def embed(piece: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Return one row per sample for each view."""
        return tuple(functional.normalize(encoder(view).mean(1), dim=1) for view in piece)

    def contrast(embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss over the embeddings of the whole batch."""
        a, b = embeddings
        return functional.cross_entropy(scale.exp() * a @ b.T, torch.arange(len(a)))

    losses = []
    with MemoryBudget(BUDGET), ElasticMBS(encoder) as mbs:  # the budget stands in for a small GPU
        for _ in range(STEPS):
            # was: contrast(embed(batch)).backward()
            result = mbs.backward_embeddings(embed, contrast, batch)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(result))

    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, in {BUDGET} with {BATCH - 1} negatives each")
    print(
        f"{mbs.stats.ooms} out-of-memory errors survived, micro-batches of "
        f"{result.micro_batch_size}"
    )


if __name__ == "__main__":
    main()
