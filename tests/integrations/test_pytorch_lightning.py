"""Trainers of `pytorch_lightning`, the same code as `lightning.pytorch` in another package."""

from __future__ import annotations

from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassF1Score

from elastic_mbs import UsageError
from elastic_mbs.integrations import lightning as ours
from elastic_mbs.integrations import pytorch_lightning as theirs
from tests.integrations.lightning_runs import BATCH, WARNINGS, check_same, loader

pytestmark = [pytest.mark.no_oom_injection, *WARNINGS]


class Net(pytorch_lightning.LightningModule):
    """Logs a loss and a metric; a step over more than `fits` samples runs out of memory."""

    def __init__(self, fits: int = BATCH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fits = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), fits
        self.f1 = MulticlassF1Score(3)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 MiB.")
        output = self.body(batch[0])
        loss = functional.cross_entropy(output, batch[1])
        self.f1(output, batch[1])
        self.log("loss", loss, on_epoch=True)
        self.log("f1", self.f1, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self.body(batch[0]), batch[1])
        self.log("val_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def made(package: Any, callbacks: list[Any], **options: Any) -> Any:
    return package.Trainer(
        max_epochs=2,
        accelerator="cpu",
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )


def outcome(module: Net, callbacks: list[Any], **options: Any) -> dict[str, Any]:
    trainer = made(pytorch_lightning, callbacks, **options)
    trainer.fit(module, loader(), loader(13, 1))
    return {
        "weights": {name: value.detach() for name, value in module.state_dict().items()},
        "metrics": trainer.callback_metrics,
        "steps": trainer.global_step,
    }


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_a_run_under_errors_is_the_run_without(precision: Any) -> None:
    callback = theirs.ElasticCallback()
    got = outcome(Net(fits=3), [callback], precision=precision)
    assert callback.runtime.stats.ooms > 0
    wanted = outcome(Net(), [], precision=precision)
    if precision == "64-true":
        check_same(got, wanted)
    else:
        assert got["steps"] == wanted["steps"]
        for name, value in wanted["weights"].items():
            torch.testing.assert_close(got["weights"][name], value, atol=0.02, rtol=0.02)


def test_a_callback_of_the_other_package_is_refused_with_the_right_import() -> None:
    callback = ours.ElasticCallback()
    trainer = made(pytorch_lightning, [])
    with pytest.raises(UsageError, match=r"from elastic_mbs\.integrations\.pytorch_lightning$"):
        callback.setup(trainer, Net(), "fit")
    trainer = made(lightning.pytorch, [])
    with pytest.raises(UsageError, match=r"from elastic_mbs\.integrations\.lightning$"):
        theirs.ElasticCallback().setup(trainer, Net(), "fit")
