"""accelerate with the runtime in its loop.

A convolutional network learns scikit-learn's digits in less memory than its batch needs. It needs
scikit-learn and the extra `accelerate`. Run it: python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from elastic_mbs import MemoryBudget
from elastic_mbs.integrations.accelerate import elastic

EPOCHS, BATCH, BUDGET = 8, 256, "1MiB"


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return images to train on, and others with their labels to test with."""
    found = load_digits()
    images, labels = (
        torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16,
        torch.tensor(found.target),
    )
    return TensorDataset(images[:1500], labels[:1500]), images[1500:], labels[1500:]


def main() -> None:
    torch.manual_seed(0)
    dataset, test_images, test_labels = digits()
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    # A budget makes memory run out here, in place of a small GPU.
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.003)
    model, optimizer, loader = accelerator.prepare(
        network, optimizer, DataLoader(dataset, BATCH, shuffle=True)
    )

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    losses = []
    with MemoryBudget(BUDGET), elastic(accelerator, model) as mbs:
        accelerator.register_for_checkpointing(mbs)  # save_state keeps the learned sizes
        for _ in range(EPOCHS):
            for batch in loader:
                result = mbs.backward(loss_fn, batch)  # was: accelerator.backward(loss_fn(batch))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                mbs.optimizer_step(optimizer)  # or optimizer.step()
                optimizer.zero_grad()
                losses.append(float(result))
        accuracy = float((mbs.evaluate(model, test_images).argmax(1) == test_labels).float().mean())
    print(
        f"loss {losses[0]:.2f} → {losses[-1]:.2f}, accuracy {accuracy:.2f}, in {BUDGET} with "
        f"batches of {BATCH}"
    )
    print(
        f"{mbs.stats.ooms} out-of-memory errors survived, micro-batches of "
        f"{result.micro_batch_size}"
    )


if __name__ == "__main__":
    main()
