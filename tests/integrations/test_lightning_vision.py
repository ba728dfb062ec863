"""Vision-language models in a Lightning Trainer: pictures go with their samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from elastic_mbs import count_tokens
from elastic_mbs.integrations.lightning import ElasticCallback
from elastic_mbs.testing.faults import RandomFaults
from tests.helpers.steps import quiet
from tests.integrations.lightning_runs import WARNINGS, check_same, fit
from tests.integrations.trainer_runs import MARKS
from tests.integrations.vision_models import MODELS, made

AMBIGUOUS = "ignore:Trying to infer the `batch_size`:UserWarning"  # stock Lightning's, of Qwen

pytestmark = [*MARKS, *WARNINGS, pytest.mark.filterwarnings(AMBIGUOUS)]


class Reader(LightningModule):
    """A model of transformers inside a module, as users have it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = made(name)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(name: str) -> DataLoader[Any]:
    vision = MODELS[name]
    data: Any = [*vision.samples(), *vision.samples()[::-1]]
    return DataLoader(data, batch_size=6, collate_fn=vision.collate)


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "LLaVA", "Idefics2"])
def test_a_trainer_trains_and_validates_as_without_errors(name: str) -> None:
    data: dict[str, Any] = {"train": loader(name), "val": loader(name), "max_epochs": 1}
    stock = fit(Reader(name), **data)
    callback = ElasticCallback(count=count_tokens(shift=True), micro_batch_size=4, **quiet())
    with RandomFaults(0, name, always=True):
        ours = fit(Reader(name), [callback], **data)
    assert callback.runtime.stats.ooms > 0
    check_same(ours.outcome(), stock.outcome())
