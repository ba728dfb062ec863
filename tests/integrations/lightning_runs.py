"""Runs of a small Lightning module in float64, and all that they leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

SAMPLES, BATCH = 22, 8  # the last batch is smaller
TOLERANCE = 1e-12
WARNINGS = [  # of Lightning's own
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `.*_step` but have no `.*_dataloader`"),
    pytest.mark.filterwarnings(
        "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:The frontend of torch.compile:UserWarning"),
]


class Seen(Metric):
    """The samples seen, which are added up in place, and listed."""

    total: Tensor
    each: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("each", [], dist_reduce_fx="cat")

    def update(self, targets: Tensor) -> None:
        self.total += len(targets)
        self.each.append(targets)

    def compute(self) -> Tensor:
        return self.total * 1000 + sum(map(len, self.each))


class Net(LightningModule):
    """Logs in every way; a step over more than `fits` samples runs out of memory."""

    def __init__(self, fits: int = BATCH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3)
        self.fits = fits
        self.train_f1, self.f1 = MulticlassF1Score(3), MulticlassF1Score(3)
        self.both = MetricCollection([MulticlassAccuracy(3, average="macro"), MulticlassF1Score(3)])
        self.seen = Seen()
        self.double()
        self.ended: list[Any] = []  # what each hook at the end of a batch was given

    def forward(self, batch: Any) -> Tensor:
        if len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 MiB.")
        output: Tensor = self.head(self.body(batch[0]))
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch)
        loss = functional.cross_entropy(output, batch[1])
        self.train_f1(output, batch[1])
        right = (output.argmax(1) == batch[1]).double()
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        self.log("right", right.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log(
            "worst",
            functional.cross_entropy(output, batch[1], reduction="none").max(),
            reduce_fx=torch.max,
            on_step=True,
            on_epoch=True,
        )
        self.log("by_two", right.mean(), batch_size=2 * len(right), on_epoch=True)
        self.log("train_f1", self.train_f1, on_step=False, on_epoch=True)
        self.seen.update(batch[1])
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return {"loss": loss, "right": right, "mean": output.mean()}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        output = self(batch)
        loss = functional.cross_entropy(output, batch[1])
        self.f1.update(output, batch[1])
        self.both.update(output, batch[1])
        self.log("val_loss", loss, on_step=True, on_epoch=True)
        self.log("f1", self.f1)
        self.log_dict(self.both)
        return loss

    test_step = validation_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended.append(dict(outputs))

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.ended.append(outputs)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}
        ]


def loader(samples: int = SAMPLES, seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator)), BATCH)


class Memory(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, metrics))


@dataclass
class Run:
    """What a run leaves behind."""

    trainer: Trainer
    module: Any
    lines: list[tuple[int | None, dict[str, float]]] = field(repr=False)

    def outcome(self) -> dict[str, Any]:
        hooks = getattr(self.module, "ended", [])
        state = {name: value.detach() for name, value in self.module.state_dict().items()}
        return {
            "weights": state,
            "lines": self.lines,
            "metrics": self.trainer.callback_metrics,
            "steps": self.trainer.global_step,
            "hooks": hooks,
        }


def trainer(callbacks: Sequence[Callback] = (), **options: Any) -> Trainer:
    quiet = {
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "logger": Memory(),
    }
    return Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "log_every_n_steps": 1,
            "callbacks": list(callbacks),
            **quiet,
            **options,
        }
    )


def fit(
    module: LightningModule,
    callbacks: Sequence[Callback] = (),
    train: Any = None,
    val: Any = None,
    path: Any = None,
    **options: Any,
) -> Run:
    made = trainer(callbacks, **options)
    made.fit(
        module,
        loader() if train is None else train,
        [loader(13, 1), loader(9, 2)] if val is None else val or None,
        ckpt_path=path,
    )
    return Run(made, module, getattr(made.logger, "lines", []))


def check_same(got: Any, wanted: Any, where: str = "") -> None:
    """Equal to 1e-12, whatever they are made of."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for key, value in wanted.items():
            check_same(got[key], value, f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), where
        for i, value in enumerate(wanted):
            check_same(got[i], value, f"{where}[{i}]")
    elif isinstance(wanted, Tensor | float):
        torch.testing.assert_close(
            torch.as_tensor(got),
            torch.as_tensor(wanted),
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=lambda text: f"{where}: {text}",
        )
    else:
        assert got == wanted, where
