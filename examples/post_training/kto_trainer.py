"""trl's KTOTrainer with the runtime in it.

A tiny Llama is shown ends of lines of Python's own sources, half of them backwards and marked as
not wanted, in less memory than its batch needs. It needs `pip install 'elastic-mbs[trl]'`. Run it:
python examples/post_training/kto_trainer.py
"""

import copy
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import KTOConfig, KTOTrainer

from elastic_mbs import MemoryBudget
from elastic_mbs.integrations.transformers import elastic_trainer

STEPS, BATCH, BUDGET = 6, 32, "144MiB"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate([*alphabet, "<pad>", "<eos>"])}
    split = Tokenizer(models.BPE(words, []))
    split.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="<eos>")


def judged() -> Dataset:
    """Return lines of the standard library, each cut in two, every other one with a wrong end."""
    text = "\n".join(
        path.read_text() for path in sorted(Path(tempfile.__file__).parent.glob("[a-d]*.py"))
    )
    lines = [line.strip() for line in text.splitlines() if 16 <= len(line.strip()) <= 48]
    halves = [(line[: len(line) // 2], line[len(line) // 2 :]) for line in lines]
    rows = [
        {"prompt": first, "completion": second[:: -1 if i % 2 else 1], "label": i % 2 == 0}
        for i, (first, second) in enumerate(halves)
    ]
    return Dataset.from_list(rows[: (STEPS + 2) * BATCH])


def main() -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=64, **sizes))
    args = KTOConfig(
        output_dir="tiny-kto",
        use_cpu=True,  # a budget makes memory run out here, in place of a small GPU
        bf16=False,
        per_device_train_batch_size=BATCH,  # texts; the runtime picks how many run at once
        max_steps=STEPS,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    with MemoryBudget(BUDGET):
        trainer = elastic_trainer(KTOTrainer)(  # was: KTOTrainer(
            model=model,
            ref_model=copy.deepcopy(model),
            args=args,
            train_dataset=judged(),
            processing_class=tokenizer(),
            elastic={"optimizer_step": True},
        )
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    print(
        f"loss {logs[0]['loss']:.2f} → {logs[-1]['loss']:.2f}, wanted texts ahead by "
        f"{logs[-1]['rewards/margins']:.2f}, in {BUDGET} with batches of {BATCH} texts"
    )
    print(
        f"{trainer.elastic.stats.ooms} out-of-memory errors survived, micro-batches of "
        f"{logs[-1]['elastic/micro_batch_size']}"
    )


if __name__ == "__main__":
    main()
