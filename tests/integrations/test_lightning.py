"""A Lightning Trainer with the callback, under errors, trains and logs as one without both."""

from __future__ import annotations

import re
import traceback
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from elastic_mbs import (
    ElasticMBS,
    GradientOptions,
    MemoryBudget,
    MicroBatchFloorError,
    count_tokens,
    cut,
)
from elastic_mbs.integrations.lightning import ElasticCallback
from elastic_mbs.testing import InjectOOM
from elastic_mbs.testing.faults import RandomFaults
from tests.helpers.room import ROOT
from tests.helpers.strikes import every_operation
from tests.integrations.lightning_runs import (
    BATCH,
    WARNINGS,
    Net,
    Run,
    check_same,
    fit,
    loader,
    trainer,
)

pytestmark = [pytest.mark.no_oom_injection, *WARNINGS]
FITS = 3  # samples of a batch of 8


class Scaled(Net):
    """Looks at whether autocast is on, and draws the scale of a GradScaler into what it leaves."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert torch.is_autocast_enabled("cpu")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        scaler = self.trainer.precision_plugin.scaler
        self.ended.append(
            [parameter.grad.clone() for parameter in self.parameters()]
            + ([] if scaler is None else [scaler.get_scale()])
        )


class OwnBackward(Net):
    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()


class Pairs(Net):
    """Trains on batches of two loaders at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        a, b = batch["a"], batch["b"]
        loss = functional.cross_entropy(self(a), a[1]) + functional.cross_entropy(self(b), b[1]) / 2
        self.log("loss", loss)
        return loss


class SkipsOneBatch(Net):
    """With dropout: a batch that is skipped has drawn its random numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        functional.dropout(torch.ones(3), 0.5)
        return None if batch_idx == 1 else output


class Hooked(Net):
    """Counts what runs around backward, and logs there."""

    def __init__(self, fits: int = BATCH) -> None:
        super().__init__(fits)
        self.before: list[float] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.before.append(float(loss.detach()))
        self.log("before", loss)

    def on_after_backward(self) -> None:
        grads = torch.cat(
            [
                parameter.grad.flatten()
                for parameter in self.parameters()
                if parameter.grad is not None
            ]
        )
        self.log("norm", grads.norm())


def scaled(scale: float) -> MixedPrecision:
    return MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    )


CASES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "plain": (Net, {}),
    "clipped": (Net, {"gradient_clip_val": 0.05}),
    "accumulated": (Net, {"accumulate_grad_batches": 3, "max_epochs": 3, "gradient_clip_val": 0.2}),
    "bf16-mixed": (Scaled, {"precision": "bf16-mixed"}),
    "scaler": (Scaled, {"plugins": scaled}),
    "scaler, accumulated": (Scaled, {"plugins": scaled, "accumulate_grad_batches": 3}),
    "64-true": (Net, {"precision": "64-true"}),
    "own backward": (OwnBackward, {}),
    "two loaders": (
        Pairs,
        {"train": lambda: CombinedLoader({"a": loader(), "b": loader(seed=5)}, "min_size")},
    ),
    "a batch skipped": (SkipsOneBatch, {}),
    "hooks": (Hooked, {}),
    "validation within the epoch": (Net, {"val_check_interval": 1, "num_sanity_val_steps": 0}),
}


OPTIONS: dict[str, dict[str, Any]] = {"two loaders": {"dims": cut.fields("a", "b")}}


def run(case: str, fits: int = BATCH, callback: ElasticCallback | None = None) -> Run:
    made, options = CASES[case]
    options = {
        name: value(256.0) if name == "plugins" else value() if callable(value) else value
        for name, value in options.items()
    }
    return fit(made(fits), [] if callback is None else [callback], **options)


@pytest.mark.parametrize("case", CASES)
def test_weights_logs_outputs_and_steps_are_lightnings_own(case: str) -> None:
    callback = ElasticCallback(**OPTIONS.get(case, {}))
    with RandomFaults(1, case, always=True) as faults:
        got = run(case, FITS, callback)
    assert faults.hits
    assert callback.runtime.stats.ooms > len(faults.hits) // 2
    check_same(got.outcome(), run(case).outcome())


def struck(monkeypatch: pytest.MonkeyPatch, door: str, inject: InjectOOM) -> None:
    """Has operations of the calls of one door fail, and no others."""
    call = getattr(ElasticMBS, door)

    def run_struck(self: ElasticMBS, *args: Any, **kwargs: Any) -> Any:
        with inject:
            return call(self, *args, **kwargs)

    monkeypatch.setattr(ElasticMBS, door, run_struck)


@pytest.mark.parametrize("door", ["backward", "evaluate"])
def test_an_error_at_any_operation_of_a_step_changes_nothing(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    once: dict[str, Any] = {
        "max_epochs": 1,
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
    }
    wanted = fit(Net(), **once).outcome()
    for inject in every_operation(stride=67):
        with monkeypatch.context() as patch:
            struck(patch, door, inject)
            check_same(fit(Net(), [ElasticCallback(micro_batch_size=4)], **once).outcome(), wanted)


def test_an_error_anywhere_in_a_fit_is_recovered_or_lightnings_own() -> None:
    """Between two calls Lightning records logs, copies the loss, and steps."""
    once: dict[str, Any] = {
        "max_epochs": 1,
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
    }
    wanted, ours = fit(Net(), **once).outcome(), 0
    for inject in every_operation(stride=73):
        net, callback = Net(), ElasticCallback(micro_batch_size=4)
        try:
            with inject:
                run = fit(net, [callback], **once)
        except RuntimeError as error:  # Lightning's teardown can fail over it, too
            told = "".join(traceback.format_exception(error))
            assert "injected: out of memory" in told
            assert "elastic_mbs/integrations" not in told, inject.hits
        else:
            check_same(run.outcome(), wanted)
            ours += 1
    assert ours > 3


class Ones(LightningModule):
    """A gradient of one for each batch, and a step that leaves it to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.grads: list[float] = []

    def training_step(self, batch: Any) -> Tensor:
        loss: Tensor = (self.weight * batch[0]).mean()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.weight.grad is not None
        self.grads.append(float(self.weight.grad))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("length", [True, False], ids=["length known", "length unknown"])
def test_an_early_end_of_an_accumulation_window_gives_its_mean(
    length: bool,
) -> None:
    # five batches of two: a window of four, and one of one
    data: Any = TensorDataset(torch.ones(10, dtype=torch.float64))
    if not length:
        data = type(
            "Stream",
            (torch.utils.data.IterableDataset,),
            {"__iter__": lambda self: iter([(torch.ones((), dtype=torch.float64),)] * 10)},
        )()
    stock, ours = (
        [fit(Ones(), each, DataLoader(data, 2), (), max_epochs=1, accumulate_grad_batches=4)]
        for each in ([], [ElasticCallback()])
    )
    assert [stock[0].module.grads, ours[0].module.grads] == [[1.0, 0.25], [1.0, 1.0]]


def test_under_a_budget_that_splits_the_batch_training_is_the_same() -> None:
    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(4, 64), *[nn.Tanh() for _ in range(30)], nn.Linear(64, 8)
            ).double()

    with MemoryBudget("1GiB") as budget:
        wanted = fit(Deep())
    callback = ElasticCallback()
    with MemoryBudget(budget.peak // 2):
        got = fit(Deep(), [callback])
    assert callback.runtime.stats.ooms > 0
    assert max(callback.runtime.stats.sizes) < BATCH
    check_same(got.outcome(), wanted.outcome())


class Tokens(LightningModule):
    """A mean over labels, of which samples have few or many; whole samples have none."""

    def __init__(self, fits: int = BATCH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.fits, self.ended = nn.Embedding(7, 7).double(), fits, list[float]()

    def loss(self, batch: Any) -> Tensor:
        if len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("out of memory")
        return functional.cross_entropy(self.head(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: Any) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended.append(float(outputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_means_over_tokens_are_logged_as_the_whole_batch_would_with_count() -> None:
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(7, (2, 22, 5), generator=generator)
    labels[(torch.arange(5) >= (torch.arange(22) % 6).unsqueeze(1))] = -100
    data = DataLoader(TensorDataset(ids, labels), BATCH)
    got = fit(Tokens(FITS), [ElasticCallback(count=count_tokens(1))], data, data)
    check_same(got.outcome(), fit(Tokens(), (), data, data).outcome())


def test_the_forward_only_epoch_of_weight_averaging_runs_in_pieces() -> None:
    class Normed(Net):
        """Its BatchNorm is read and not used, so that weights do not depend on the pieces."""

        def __init__(self, fits: int) -> None:
            super().__init__(fits)
            self.norm = nn.BatchNorm1d(4, affine=False, dtype=torch.float64)

        def forward(self, batch: Any) -> Tensor:
            self.norm(batch[0])
            return super().forward(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def averaged(fits: int, *callbacks: Callback) -> Run:
        swa = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1, annealing_epochs=1)
        return fit(Normed(fits), [swa, *callbacks], loader(16), (), max_epochs=3)

    callback = ElasticCallback(micro_batch_size=4)
    got, wanted = averaged(4, callback).outcome(), averaged(BATCH).outcome()
    assert callback.runtime.stats.calls == 6  # of four epochs
    assert got["weights"].pop("norm.running_mean").isfinite().all()
    for state in (got, wanted):
        state["weights"] = {
            name: value for name, value in state["weights"].items() if not name.startswith("norm")
        }
    check_same(got, wanted)


class Manual(Net):
    """Automatic optimisation, written out."""

    def __init__(self, elastic: ElasticCallback | None, fits: int = BATCH) -> None:
        super().__init__(fits)
        self.automatic_optimization, self.elastic = False, elastic

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if self.elastic is None:
            loss = self.loss(batch)
            self.manual_backward(loss)
        else:
            loss = self.elastic.runtime.backward(self.loss, batch).loss
        optimizer.step()
        self.log("loss", loss)
        return {"loss": loss.detach()}


def test_with_manual_optimisation_the_runtime_runs_manual_backward() -> None:
    callback = ElasticCallback()
    with RandomFaults(1, "manual", always=True) as faults:
        got = fit(Manual(callback, FITS), [callback], plugins=scaled(4.0))
    assert faults.hits
    check_same(got.outcome(), fit(Manual(None), plugins=scaled(4.0)).outcome())


def test_a_resumed_run_goes_on_and_knows_its_sizes(tmp_path: Path) -> None:
    def elastic() -> list[Callback]:
        return [ElasticCallback()]

    whole = fit(Net(FITS), elastic(), max_epochs=3)
    first = fit(Net(FITS), elastic(), max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "one.ckpt")
    callback = ElasticCallback()
    second = fit(Net(FITS), [callback], max_epochs=3, path=tmp_path / "one.ckpt")
    assert callback.runtime.stats.ooms == 0
    assert second.trainer.global_step == whole.trainer.global_step == 9
    check_same(second.outcome()["weights"], whole.outcome()["weights"])
    check_same(
        [line for line in first.lines + second.lines if "loss_step" in line[1]],
        [line for line in whole.lines if "loss_step" in line[1]],
    )


def test_validate_test_and_predict_in_pieces_give_the_batchs_outputs() -> None:
    wanted, got = Net(), Net(FITS)
    callback = ElasticCallback()
    for stage in ("validate", "test", "predict"):
        stock, ours = (
            getattr(made, stage)(module, loader(13))
            for made, module in ((trainer(), wanted), (trainer([callback]), got))
        )
        check_same(ours, stock, stage)
    check_same(got.ended, wanted.ended)
    assert callback.runtime.stats.ooms >= 2


def test_on_before_backward_runs_for_each_piece_and_on_after_backward_once() -> None:
    got = fit(Hooked(FITS), [ElasticCallback(micro_batch_size=2)], loader(8), (), max_epochs=1)
    assert len(got.module.before) == 4
    assert [name for _, line in got.lines for name in line if name == "norm"] == ["norm"]


def test_switched_off_the_callback_changes_nothing() -> None:
    check_same(fit(Net(), [ElasticCallback(enabled=False)]).outcome(), fit(Net()).outcome())


def test_a_run_that_gives_up_leaves_no_trace() -> None:
    class NeverFits(Net):
        def on_before_backward(self, loss: Tensor) -> None:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 MiB.")

    module = NeverFits()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    made = trainer([ElasticCallback()])
    with pytest.raises(MicroBatchFloorError):
        made.fit(module, loader())
    check_same(module.state_dict(), start)
    assert (module.train_f1.update_count, module.seen.update_count, module.seen.each) == (0, 0, [])
    assert "loss_step" not in made.callback_metrics
    untouched(made)


def untouched(made: Trainer) -> None:
    assert "_make_closure" not in vars(made.fit_loop.epoch_loop.automatic_optimization)
    assert not any(name.endswith("_step") for name in vars(made.strategy))


def test_steps_are_replaced_while_a_run_lasts_and_nowhere_else() -> None:
    assert {point.group for point in distribution("elastic-mbs").entry_points} == {
        "console_scripts"
    }
    untouched(fit(Net()).trainer)
    untouched(fit(Net(), [ElasticCallback()]).trainer)


def test_both_sides_of_the_diff_of_the_page_train_the_same() -> None:
    diff = re.findall(
        r"^## Lightning\n.*?```diff\n(.*?)^```",
        (ROOT / "docs" / "trainers.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )[0]
    found = []
    for sign, fits in (("-", BATCH), ("+", FITS)):
        quiet = partial(
            Trainer,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        names = {
            "Trainer": quiet,
            "module": Net(fits),
            "train_loader": loader(),
            "val_loader": loader(9, 1),
        }
        exec(
            "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", sign)),
            names,
        )
        found.append(Run(names["trainer"], names["module"], []).outcome())
    check_same(found[1], found[0])


class Contrastive(Net):
    """Compares the samples of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        features = functional.normalize(self(batch), dim=1)
        among = functional.cross_entropy(features @ features.T, torch.arange(len(features)))
        return {**output, "loss": output["loss"] + among}


@pytest.mark.verifies
def test_a_split_step_is_compared_once_beside_the_logs(caplog: pytest.LogCaptureFixture) -> None:
    runs = [
        fit(Net(fits=FITS), callbacks=[ElasticCallback(gradients=GradientOptions(verify=verify))])
        for verify in ("error", "off")
    ]
    check_same(runs[0].outcome(), runs[1].outcome())
    fit(Contrastive(fits=FITS), callbacks=[ElasticCallback()])
    found = [each for each in caplog.messages if "do not make up the loss of" in each]
    assert len(found) == 1
    assert "the loss of Contrastive.training_step" in found[0]
