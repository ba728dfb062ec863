"""trl's RewardTrainer with the runtime in it.

A tiny Llama learns to score lines of Python's own sources above the same lines with their ends
backwards, in less memory than its batch needs. It needs `pip install 'elastic-mbs[trl]'`. Run it:
python examples/post_training/reward_trainer.py
"""

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer

from elastic_mbs import MemoryBudget
from elastic_mbs.integrations.transformers import elastic_trainer

STEPS, BATCH, BUDGET = 8, 32, "16MiB"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate([*alphabet, "<pad>", "<eos>"])}
    split = Tokenizer(models.BPE(words, []))
    split.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="<eos>")


def preferences() -> Dataset:
    """Return lines of the standard library, each cut in two, with a wrong second half."""
    text = "\n".join(
        path.read_text() for path in sorted(Path(tempfile.__file__).parent.glob("[a-d]*.py"))
    )
    lines = [line.strip() for line in text.splitlines() if 16 <= len(line.strip()) <= 48]
    halves = [(line[: len(line) // 2], line[len(line) // 2 :]) for line in lines]
    wrong = [second[::-1] for _, second in halves]
    rows = [
        {"prompt": first, "chosen": second, "rejected": other}
        for (first, second), other in zip(halves, wrong, strict=True)
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
    config = LlamaConfig(
        vocab_size=258, max_position_embeddings=64, num_labels=1, pad_token_id=256, **sizes
    )
    args = RewardConfig(
        output_dir="tiny-reward",
        use_cpu=True,  # a budget makes memory run out here, in place of a small GPU
        bf16=False,
        per_device_train_batch_size=BATCH,  # pairs; the runtime picks how many run at once
        max_steps=STEPS,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    with MemoryBudget(BUDGET):
        trainer = elastic_trainer(RewardTrainer)(  # was: RewardTrainer(
            model=LlamaForSequenceClassification(config),
            args=args,
            train_dataset=preferences(),
            processing_class=tokenizer(),
            elastic={"optimizer_step": True},
        )
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    print(
        f"loss {logs[0]['loss']:.2f} → {logs[-1]['loss']:.2f}, scored higher "
        f"{logs[-1]['accuracy']:.0%}, in {BUDGET} with batches of {BATCH} pairs"
    )
    print(
        f"{trainer.elastic.stats.ooms} out-of-memory errors survived, micro-batches of "
        f"{logs[-1]['elastic/micro_batch_size']}"
    )


if __name__ == "__main__":
    main()
