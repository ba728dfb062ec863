"""Batches without padding are cut into the samples of their row, and train as the stock trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DataCollatorWithFlattening
from trl import SFTTrainer

from elastic_mbs import Policy, UnsupportedError, UsageError
from elastic_mbs.integrations.transformers import ElasticTrainerMixin, elastic_trainer
from elastic_mbs.testing import InjectOOM
from elastic_mbs.testing.faults import RandomFaults
from tests.helpers.strikes import every_operation
from tests.integrations.test_trl import sft
from tests.integrations.trainer_runs import MARKS, ROUNDED, apart, llama, trained, trainer

pytestmark = MARKS
NEAR = 1e-10
FREE = {"padding_free": True, "max_length": None}
FORMS: dict[str, dict[str, Any]] = {
    "positions": {},
    "cumulated": {"return_flash_attn_kwargs": True},
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    "from 2": {"position_ids_start": 2},
}


def texts(n: int = 16) -> list[dict[str, list[int]]]:
    """Return texts of 1 to 10 tokens; some have no labels."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for number in range(n):
        ids = torch.randint(40, (1 + 7 * number % 10,), generator=draw).tolist()
        labels = [-100 if token % 3 == 0 or number % 5 == 4 else token for token in ids]
        found.append({"input_ids": ids, "labels": labels})
    return found


def run(kind: Any, collator: Any, faults: Any = None, model: Any = None, **args: Any) -> Any:
    plain = {"data_collator": collator, "remove_unused_columns": False}
    options: dict[str, Any] = {} if kind is transformers.Trainer else {"elastic": {}}
    made = llama() if model is None else model
    return trained(kind, made, texts(), faults, **plain | options | args)


ELASTIC: Any = elastic_trainer(transformers.Trainer)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_trainer_trains_as_without_errors(form: str, attention: str) -> None:
    collator = DataCollatorWithFlattening(**FORMS[form])
    models = [llama(), llama()]
    for model in models:
        model.set_attn_implementation(attention)
    stock = run(transformers.Trainer, collator, model=models[0])
    faults = RandomFaults(0, form, always=True)
    ours = run(ELASTIC, collator, faults, models[1])
    assert ours.elastic.stats.ooms > 0
    assert apart(ours, stock) <= NEAR


class Struck(ElasticTrainerMixin, transformers.Trainer):
    inject = InjectOOM()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.inject:
            return super().training_step(*args, **kwargs)


def test_weights_are_exact_wherever_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    args = {"max_steps": 1, "per_device_train_batch_size": 4}
    stock = run(transformers.Trainer, collator, **args)
    elastic = {"micro_batch_size": 2, "verify": False}
    for inject in every_operation(stride=41, least=100):
        monkeypatch.setattr(Struck, "inject", inject)
        assert apart(run(Struck, collator, elastic=elastic, **args), stock) <= NEAR


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 3])
def test_joined_pieces_are_the_batch(form: str, size: int) -> None:
    collator, data = DataCollatorWithFlattening(**FORMS[form]), texts(8)
    elastic = {"micro_batch_size": size}
    made = trainer(ELASTIC, llama(), data, data_collator=collator, elastic=elastic)
    batch, pieces = collator(data), list[Any]()
    rows = made._elastic_rows

    def keep(piece: Any) -> None:
        pieces.append(rows.rows(piece))

    made.elastic.evaluate(keep, rows.samples(batch))
    assert len(pieces) > 1
    start = 0
    for piece in pieces:
        stop = start + rows.number(rows.samples(piece))
        wanted = collator(data[start:stop])
        assert piece.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(torch.as_tensor(piece[key]), torch.as_tensor(value)), key
        start = stop
    assert start == 8


def test_predictions_are_those_of_the_stock_trainer() -> None:
    collator = DataCollatorWithFlattening()
    args = {"per_device_eval_batch_size": 16, "data_collator": collator}
    stock = trainer(transformers.Trainer, llama(), texts(), **args)
    ours = trainer(ELASTIC, llama(), texts(), elastic={"micro_batch_size": 3}, **args)
    wanted, got = stock.predict(texts()), ours.predict(texts())
    assert got.predictions.shape == wanted.predictions.shape
    assert abs(got.predictions - wanted.predictions).max() <= NEAR
    assert (got.label_ids == wanted.label_ids).all()
    assert got.metrics["test_loss"] == pytest.approx(wanted.metrics["test_loss"], rel=1e-6)


@pytest.mark.parametrize(
    "args",
    [
        FREE,
        {**FREE, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"packing": True, "packing_strategy": "bfd", "max_length": 16},
        {**FREE, "pad_to_multiple_of": 8},
    ],
)
@pytest.mark.filterwarnings("ignore:.*flash attention:UserWarning")
def test_sft_trains_and_counts_its_metrics_as_without_errors(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # its fused head is written for float32
    args = {"gradient_checkpointing": False, **args}
    stock = sft(SFTTrainer, **args)
    ours = sft(elastic_trainer(SFTTrainer), RandomFaults(0, "packed", always=True), **args)
    assert ours.elastic.stats.ooms > 0
    assert apart(ours, stock) <= ROUNDED
    names = ("entropy", "mean_token_accuracy", "num_tokens", "eval_loss", "eval_num_tokens")
    logs = [
        [log[name] for log in found.state.log_history for name in names if name in log]
        for found in (ours, stock)
    ]
    assert len(logs[1]) > 4
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)


# ---------------------------------------------------------------------- refused


class Leaky(transformers.LlamaForCausalLM):
    """A model whose mask of ones makes transformers overlook where the samples begin."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)


def leaky() -> Any:
    return Leaky(llama().config).double()


def bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=40, hidden_size=16, n_head=2, n_layer=1)
    return transformers.BloomForCausalLM(config).double()


@pytest.mark.parametrize("build", [leaky, bloom])
def test_a_model_whose_samples_see_each_other_is_refused(build: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"see each other.*padding_free=False"):
        run(ELASTIC, DataCollatorWithFlattening(), model=build())


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return a batch with padding, as the error advises."""
    width = max(len(each["input_ids"]) for each in rows)
    ids, mask, labels = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    labels -= 100
    for number, each in enumerate(rows):
        length = len(each["input_ids"])
        ids[number, :length], mask[number, :length] = torch.tensor(each["input_ids"]), 1
        labels[number, :length] = torch.tensor(each["labels"])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_padding_is_the_way_out_for_such_a_model() -> None:
    models = [bloom(), bloom()]
    models[1].load_state_dict(models[0].state_dict())
    stock = run(transformers.Trainer, padded, model=models[0])
    ours = run(ELASTIC, padded, RandomFaults(0, "padded", always=True), models[1])
    assert ours.elastic.stats.ooms > 0
    assert apart(ours, stock) <= ROUNDED


def more(batch: dict[str, Any]) -> None:
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])


def two_rows(batch: dict[str, Any]) -> None:
    batch["input_ids"] = batch["input_ids"].repeat(2, 1)


def label_at_a_start(batch: dict[str, Any]) -> None:
    batch["labels"][:, :] = 1


def other_samples(batch: dict[str, Any]) -> None:
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_q"][[0, -1]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda batch: batch.pop("position_ids"), "no position_ids.*return_position_ids=True"),
        (more, "'token_type_ids'.*leave them out"),
        (two_rows, r"one row \(1, T\)"),
        (label_at_a_start, "separator_id=-100"),
        (other_samples, "cu_seq_lens_q and position_ids tell of different samples"),
    ],
)
def test_rows_that_do_not_tell_their_samples_are_refused(change: Any, text: str) -> None:
    plain = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def changed(rows: Any) -> Any:
        batch = plain(rows)
        change(batch)
        return batch

    changed.padding_free = True  # type: ignore[attr-defined]  # as trl's collator says it
    with pytest.raises(UnsupportedError, match=text):
        run(ELASTIC, changed)


@pytest.mark.parametrize(
    "option", [{"count": None}, {"pieces": "by_length"}, {"policy": Policy(max_tokens=20)}]
)
def test_options_that_need_padded_rows_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="do not go with batches without padding"):
        run(ELASTIC, DataCollatorWithFlattening(), elastic=option)
