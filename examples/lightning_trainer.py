"""A Lightning Trainer with the runtime in it.

A small network learns handwritten digits in less memory than its batch needs. It needs the extra
`lightning`, and scikit-learn, which carries the digits. Run it: python
examples/lightning_trainer.py
"""

import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from elastic_mbs import MemoryBudget
from elastic_mbs.integrations.lightning import ElasticCallback

EPOCHS, BATCH, BUDGET = 3, 256, "2MiB"


class Digits(LightningModule):
    """A module that knows nothing of the runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 10),
        )
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)  # once per batch, in however many pieces
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())

    def on_train_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_epoch"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.005)


def main() -> None:
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(
        torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    )
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(
        max_epochs=EPOCHS, accelerator="cpu", callbacks=[elastic := ElasticCallback()], **quiet
    )
    with MemoryBudget(BUDGET):  # in place of a small GPU
        trainer.fit(
            module := Digits(), DataLoader(data, BATCH, shuffle=True), DataLoader(data, 4 * BATCH)
        )
    print(
        f"loss {module.losses[0]:.2f} → {module.losses[-1]:.2f}, in {BUDGET} with batches of "
        f"{BATCH}"
    )
    print(
        f"{elastic.runtime.stats.ooms} out-of-memory errors survived, accuracy "
        f"{float(trainer.callback_metrics['accuracy']):.0%}"
    )


if __name__ == "__main__":
    main()
