"""Vision-language models: pictures go with their samples, without a line of the user's."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor
from trl import SFTConfig, SFTTrainer

from elastic_mbs import BatchError, ElasticMBS, count_tokens
from elastic_mbs.integrations.accelerate import elastic
from elastic_mbs.integrations.transformers import elastic_trainer
from elastic_mbs.testing import InjectOOM
from elastic_mbs.testing.faults import RandomFaults
from stress.reference.state import error_of
from tests.helpers.steps import quiet
from tests.integrations.trainer_runs import EXACT, MARKS, ROUNDED, apart, flat, trained
from tests.integrations.vision_models import IMAGE, MODELS, made

pytestmark = MARKS


def gradients(model: Any) -> list[Tensor | None]:
    return flat(leaf.grad for leaf in model.parameters() if leaf.grad is not None)


def batch_of(name: str) -> dict[str, Any]:
    return MODELS[name].collate(MODELS[name].samples())


def piece_loss(model: Any) -> Any:
    return lambda piece: model(**piece).loss


EVERY = 45  # an operation in so many fails; with 5 it takes four minutes


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_loop_is_exact_wherever_memory_runs_out(name: str) -> None:
    model, batch = made(name), batch_of(name)
    model(**batch).loss.backward()
    wanted, place, struck = gradients(model), EVERY, 0
    while True:
        model.zero_grad(set_to_none=True)
        mbs = ElasticMBS(model, count=count_tokens(shift=True), **quiet())
        with InjectOOM(at=[place]) as injected:
            result = mbs.backward(piece_loss(model), batch)
        if not injected.hits:
            break
        assert error_of(gradients(model), wanted) <= EXACT
        # the reading of the batch is tried again and counted nowhere
        place, struck = place + EVERY, struck + result.ooms
    assert struck > 150 // EVERY


@pytest.mark.parametrize("name", MODELS)
def test_every_split_of_a_batch_has_the_pictures_of_its_samples(name: str) -> None:
    model, batch = made(name), batch_of(name)
    model(**batch).loss.backward()
    wanted = gradients(model)
    for size in (1, 2, 4):
        model.zero_grad(set_to_none=True)
        mbs = ElasticMBS(model, micro_batch_size=size, count=count_tokens(shift=True), **quiet())
        mbs.backward(piece_loss(model), batch)
        assert error_of(gradients(model), wanted) <= EXACT


@pytest.mark.parametrize("name", MODELS)
def test_a_text_that_was_cut_off_within_a_picture_is_named_and_leaves_no_gradient(
    name: str,
) -> None:
    model, whole = made(name), batch_of(name)
    places = (whole["input_ids"] == IMAGE).nonzero()
    width = int(places[:, 1].max())  # the last token of the pictures of samples 1 and 5
    batch = {
        key: value[:, :width] if value.shape[:2] == whole["input_ids"].shape else value
        for key, value in whole.items()
    }
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        model(**batch)
    mbs = ElasticMBS(model, micro_batch_size=1, count=count_tokens(shift=True), **quiet())
    # tokens of tiles, and of pictures padded to a row, tell nothing before the model has run
    late = ("LLaVA-OneVision", "Idefics3", "Idefics2")
    with pytest.raises(ValueError if name in late else BatchError) as refused:
        mbs.backward(piece_loss(model), batch)
    if name in late:
        assert "a piece of 1 of 6 samples (number 1)" in "".join(refused.value.__notes__)
    else:
        assert "texts that end with one: sample 1, 5\n" in str(refused.value)
        assert "a longer max_length" in str(refused.value)
    assert all(leaf.grad is None for leaf in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_trainer_trains_as_without_errors(name: str) -> None:
    vision = MODELS[name]
    data = [*vision.samples(), *vision.samples()[::-1]]
    args = {
        "remove_unused_columns": False,
        "data_collator": vision.collate,
        "per_device_train_batch_size": 6,
        "learning_rate": 0.01,
    }
    stock = trained(transformers.Trainer, made(name), data, **args)
    ours = trained(
        elastic_trainer(transformers.Trainer),
        made(name),
        data,
        RandomFaults(0, name, always=True),
        elastic={},
        **args,
    )
    assert ours.elastic.stats.ooms > 0
    assert apart(ours, stock) <= EXACT


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "LLaVA"])
def test_a_prepared_model_tells_its_placeholders_too(name: str) -> None:
    model, batch = made(name), batch_of(name)
    model(**batch).loss.backward()
    wanted = gradients(model)
    model.zero_grad(set_to_none=True)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    mbs = elastic(accelerator, prepared, count=count_tokens(shift=True), **quiet())
    with InjectOOM(at=[60]) as injected:
        result = mbs.backward(lambda piece: prepared(**piece).loss, batch)
    assert injected.hits
    assert result.ooms == 1
    assert error_of(gradients(model), wanted) <= EXACT


def sft(kind: Any, name: str, faults: Any = None) -> Any:
    words = {f"w{i}": i for i in range(38)} | {"<pad>": 38, "<eos>": 39}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    vision = MODELS[name]
    samples = [*vision.samples(), *vision.samples()[::-1]]
    args = SFTConfig(
        output_dir=".",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=6,
        num_train_epochs=1,
        report_to=[],
        optim="sgd",
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    found = kind(
        model=made(name),
        args=args,
        train_dataset=datasets.Dataset.from_list([{"number": i} for i in range(12)]),
        data_collator=lambda rows: vision.collate([samples[each["number"]] for each in rows]),
        processing_class=tokenizer,
        **({} if kind is SFTTrainer else {"elastic": quiet()}),
    )
    if faults is None:
        found.train()
    else:
        with faults:
            found.train()
    return found


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL", "Gemma3", "LLaVA-OneVision"])
def test_sft_trains_as_without_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # its fused head is written for float32
    stock = sft(SFTTrainer, name)
    ours = sft(elastic_trainer(SFTTrainer), name, RandomFaults(0, name, always=True))
    assert ours.elastic.stats.ooms > 0
    assert apart(ours, stock) <= ROUNDED
    assert torch.isfinite(torch.tensor(stock.state.log_history[0]["loss"]))
