"""transformers' Trainer with the runtime in it.

A tiny Llama learns Python's own sources in less memory than its batch needs. It needs the extra
`hf`. Run it: python examples/transformers_trainer.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from elastic_mbs import MemoryBudget
from elastic_mbs.integrations.transformers import elastic_trainer

STEPS, BATCH, LENGTH, BUDGET = 20, 64, 64, "24MiB"


def sources() -> list[dict[str, torch.Tensor]]:
    """Return rows of bytes of the standard library."""
    text = b"".join(
        path.read_bytes() for path in sorted(Path(tempfile.__file__).parent.glob("[a-d]*.py"))
    )
    bytes_ = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = bytes_[: len(bytes_) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    args = TrainingArguments(
        output_dir="tiny-llama",
        use_cpu=True,  # a budget makes memory run out here, in place of a small GPU
        per_device_train_batch_size=BATCH,  # the batch wanted; the runtime picks the micro-batch
        max_steps=STEPS,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=20,  # the learned sizes are in the checkpoint
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = sources()
    with MemoryBudget(BUDGET):
        trainer = elastic_trainer(
            Trainer
        )(  # was: Trainer(
            model=model,
            args=args,
            train_dataset=rows[:-64],
            eval_dataset=rows[-64:],
            elastic={"optimizer_step": True},
        )
        trainer.train()
        found = trainer.evaluate()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    print(
        f"loss {logs[0]['loss']:.2f} → {logs[-1]['loss']:.2f}, {found['eval_loss']:.2f} in "
        f"evaluation, in {BUDGET} with batches of {BATCH}"
    )
    print(
        f"{trainer.elastic.stats.ooms} out-of-memory errors survived, micro-batches of "
        f"{logs[-1]['elastic/micro_batch_size']}"
    )


if __name__ == "__main__":
    main()
