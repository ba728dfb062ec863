"""Lightning: what the callback refuses, and the way out that it names."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor

from elastic_mbs import GradientOptions, UnsupportedError, UsageError
from elastic_mbs.integrations.lightning import ElasticCallback
from tests.integrations.lightning_runs import WARNINGS, Net, fit, trainer

pytestmark = [pytest.mark.no_oom_injection, *WARNINGS]


class Fetches(Net):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]  # Lightning asks for this name
        return super().training_step(*next(dataloader_iter)[:2])


class Sometimes(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output if (batch[1] == 0).any() else None


class Searches(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class OwnWay(Precision):
    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        tensor.backward()


class OwnStrategy(DDPStrategy):
    """A strategy that may sum gradients in another way."""


class HalfGradients(SingleDeviceStrategy):
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        half: Tensor = super().backward(closure_loss / 2, *args, **kwargs)
        return half


REFUSED: dict[str, tuple[type[Net], dict[str, Any], str]] = {
    "a strategy of many": (
        Net,
        {"strategy": OwnStrategy(), "devices": 1},
        r"OwnStrategy over 1 processes.*Trainer\(strategy='ddp'\).*or one device",
    ),
    "a backward of the strategy": (
        Net,
        {"strategy": HalfGradients("cpu")},
        "HalfGradients has a backward of its own.*override LightningModule.backward",
    ),
    "a precision of its own": (Net, {"plugins": OwnWay()}, "OwnWay has a backward of its own"),
    "BatchSizeFinder": (
        Net,
        {"callbacks": [BatchSizeFinder()]},
        "BatchSizeFinder waits for an out-of-memory error.*give the batch you want",
    ),
    "dataloader_iter": (
        Fetches,
        {},
        r"training_step\(dataloader_iter\) fetches its batches itself.*training_step\(batch, "
        r"batch_idx\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_trainer_that_cannot_be_replayed_is_refused(case: str) -> None:
    made, options, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=message):
        ElasticCallback().setup(trainer(**options), made(), "fit")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Sometimes, "training_step returned None for some pieces.*return a loss of zero"),
        (Searches, "LBFGS runs the batch several times.*another optimizer"),
    ],
)
def test_a_step_that_could_not_be_replayed_is_refused_with_the_way_out(
    made: type[Net], message: str
) -> None:
    with pytest.raises((UnsupportedError, UsageError), match=message):
        fit(made(), [ElasticCallback(micro_batch_size=1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 4},
            "ElasticCallback has no option 'batch_size': did you mean micro_batch_size=…",
        ),
        ({"micro_batch_size": 0}, "micro_batch_size=0 is neither"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "ElasticCallback sets scaler= by itself"),
        ({"gradients": GradientOptions(backward=print)}, "Lightning's: override"),
        ({"count": {"loss": None}}, "training_step returns one"),
    ],
    ids=["unknown", "wrong", "scaler", "backward", "losses"],
)
def test_a_wrong_option_is_refused_when_the_callback_is_made(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ElasticCallback(**options)


def test_a_trainer_of_the_older_package_is_refused() -> None:
    callback = ElasticCallback()
    with pytest.raises(UsageError, match="once a Trainer with this callback has begun"):
        _ = callback.runtime
    with pytest.raises(
        UsageError,
        match=r"types\.SimpleNamespace.*from elastic_mbs\.integrations\.pytorch_lightning",
    ):
        callback.setup(SimpleNamespace(), Net(), "fit")


def test_tensor_parallelism_alone_is_refused() -> None:
    callback, strategy = ElasticCallback(), ModelParallelStrategy(1, 1)
    strategy.model = Net()
    callback._strategy = strategy
    with pytest.raises(UnsupportedError, match=r"without fully_shard.*in configure_model"):
        _ = callback.runtime
