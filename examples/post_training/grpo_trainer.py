"""trl's GRPOTrainer with the runtime in it.

A tiny Llama continues lines of Python's own sources and is rewarded for small letters, in less
memory than a batch of its completions needs. It needs `pip install 'elastic-mbs[trl]'`. Run it:
python examples/post_training/grpo_trainer.py
"""

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from elastic_mbs import MemoryBudget
from elastic_mbs.integrations.transformers import elastic_trainer

STEPS, BATCH, BUDGET = 5, 48, "24MiB"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate([*alphabet, "<pad>", "<eos>"])}
    split = Tokenizer(models.BPE(words, []))
    split.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="<eos>")


def prompts() -> Dataset:
    """Return the first halves of lines of the standard library."""
    text = "\n".join(
        path.read_text() for path in sorted(Path(tempfile.__file__).parent.glob("[a-d]*.py"))
    )
    lines = [line.strip() for line in text.splitlines() if 16 <= len(line.strip()) <= 48]
    return Dataset.from_list([{"prompt": line[: len(line) // 2]} for line in lines[:256]])


def small_letters(completions: list[str], **others: object) -> list[float]:
    """Return the share of small letters in each completion."""
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]


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
    args = GRPOConfig(
        output_dir="tiny-grpo",
        use_cpu=True,  # a budget makes memory run out here, in place of a small GPU
        bf16=False,
        per_device_train_batch_size=BATCH,  # completions; the runtime picks how many run at once
        num_generations=8,
        max_completion_length=8,
        max_steps=STEPS,
        learning_rate=2e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    with MemoryBudget(BUDGET):
        trainer = elastic_trainer(GRPOTrainer)(  # was: GRPOTrainer(
            model=model,
            reward_funcs=small_letters,
            args=args,
            train_dataset=prompts(),
            processing_class=tokenizer(),
            elastic={"optimizer_step": True},
        )
        trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    print(
        f"reward {logs[0]['reward']:.2f} → {logs[-1]['reward']:.2f}, in {BUDGET} with batches of "
        f"{BATCH} completions"
    )
    print(
        f"{trainer.elastic.stats.ooms} out-of-memory errors survived, micro-batches of "
        f"{logs[-1]['elastic/micro_batch_size']}"
    )


if __name__ == "__main__":
    main()
