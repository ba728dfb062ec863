"""Ways to use a Trainer that Lightning's own tests have: all go on with the callback inside."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from elastic_mbs.integrations.lightning import ElasticCallback
from tests.integrations.lightning_runs import WARNINGS, check_same, trainer

pytestmark = [pytest.mark.no_oom_injection, *WARNINGS]


class Several(LightningModule):
    """A step over batches of several loaders, some of which can be at their end."""

    def __init__(self, fits: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.fits = nn.Linear(4, 2).double(), fits

    def training_step(self, batch: dict[str, Tensor | None], batch_idx: int) -> Tensor:
        found = [part for part in batch.values() if part is not None]
        if len(found[0]) > self.fits:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 MiB.")
        return torch.stack([self.layer(part).pow(2).mean() for part in found]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("loss", self.training_step(batch, batch_idx), batch_size=4)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def rows(samples: int, seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(torch.randn(samples, 4, generator=generator).double(), 4)  # type: ignore[arg-type]  # a tensor has samples, too


def combined(mode: Any) -> CombinedLoader:
    return CombinedLoader({"a": rows(8, 1), "b": rows(16, 2)}, mode)


def both(run: Callable[[Trainer, Several], Any]) -> None:
    """Compare what a run returns, and its weights, without the callback and with errors in it."""
    plain, cut, callback = Several(), Several(fits=3), ElasticCallback()
    wanted = run(trainer(max_epochs=1), plain)
    check_same(run(trainer([callback], max_epochs=1), cut), wanted)
    check_same(cut.state_dict(), plain.state_dict())
    assert callback.runtime.stats.ooms


@pytest.mark.parametrize("mode", ["max_size", "min_size", "max_size_cycle"])
def test_loaders_of_unequal_length_leave_none_in_their_last_batches(mode: str) -> None:
    both(lambda made, module: made.fit(module, combined(mode)))
    both(lambda made, module: made.validate(module, combined(mode), verbose=False))
    both(lambda made, module: made.test(module, combined(mode), verbose=False))


@pytest.mark.parametrize("name", ["validation_step", "test_step", "predict_step"])
def test_a_module_may_say_none_where_it_has_no_step(name: str) -> None:
    class Without(Several):
        pass

    setattr(Without, name, None)
    plain, cut, callback = Without(), Without(fits=3), ElasticCallback()
    trainer(max_epochs=1).fit(plain, combined("min_size"))
    trainer([callback], max_epochs=1).fit(cut, combined("min_size"))
    check_same(cut.state_dict(), plain.state_dict())
    assert callback.runtime.stats.ooms


def pickled(made: Trainer) -> Trainer:
    again: Trainer = pickle.loads(pickle.dumps(made))
    return again


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copied_trainer_trains_with_a_runtime_of_its_own(
    copied: Callable[[Trainer], Trainer],
) -> None:
    first, callback = Several(fits=3), ElasticCallback()
    made = trainer([callback], max_epochs=1, logger=False)
    made.fit(first, combined("min_size"))
    again, second = copied(made), copy.deepcopy(first)
    other = next(each for each in again.callbacks if isinstance(each, ElasticCallback))
    assert other.state_dict() == callback.state_dict() != {}, "what was learned goes along"
    for one, module in ((made, first), (again, second)):
        one.fit_loop.max_epochs = 2
        one.fit(module, combined("min_size"))
    check_same(second.state_dict(), first.state_dict())
    assert other.runtime is not callback.runtime
    assert other.runtime.stats.ooms == 0, "it began at a size that fits"


class Copies(Several):
    def on_train_batch_end(self, *_: Any) -> None:
        copy.deepcopy(self.trainer)
        pickle.dumps(self.trainer.callbacks)


def test_a_trainer_may_be_copied_while_it_trains() -> None:
    module, plain = Copies(fits=3), Several()
    trainer([ElasticCallback()], max_epochs=1, logger=False).fit(module, combined("min_size"))
    trainer(max_epochs=1).fit(plain, combined("min_size"))
    check_same(module.state_dict(), plain.state_dict())


class Fetches(Several):
    """Manual optimisation of batches that training_step fetches itself."""

    def __init__(self, elastic: ElasticCallback | None, fits: int = 4) -> None:
        super().__init__(fits)
        self.automatic_optimization, self.elastic = False, elastic

    def loss(self, batch: Any) -> Tensor:
        return super().training_step(batch, 0)

    def training_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]  # Lightning asks for this name
        batch = next(dataloader_iter)[0]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if self.elastic is None:
            self.manual_backward(self.loss(batch))
        else:
            self.elastic.runtime.backward(self.loss, batch)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_a_step_with_manual_optimisation_may_fetch_its_batches() -> None:
    callback = ElasticCallback()
    plain, cut = Fetches(None), Fetches(callback, fits=3)
    trainer(max_epochs=1).fit(plain, combined("min_size"))
    trainer([callback], max_epochs=1).fit(cut, combined("min_size"))
    check_same(cut.state_dict(), plain.state_dict())
    assert callback.runtime.stats.ooms
