"""`escalate=("logits",)` with language models of transformers: less memory, the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from elastic_mbs import ElasticMBS, Escalated, Event, MemoryBudget, RecoveryOptions
from stress.reference.state import error_of
from tests.helpers.steps import grads

pytestmark = pytest.mark.no_oom_injection

CLASSES, LENGTH = 6000, 256
SMALL = {
    "vocab_size": CLASSES,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {"head_dim": 8}),
    "Gemma2, capped": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 20.0}),
    "GPTNeoX": ("GPTNeoX", {}),
    "Cohere, scaled": ("Cohere", {"logit_scale": 0.25}),
    "Mixtral": ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "GPT2": (
        "GPT2",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": LENGTH,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
}


def made(name: str) -> Any:
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        **{**({"vocab_size": CLASSES} if kind == "GPT2" else SMALL), **options}
    )
    torch.manual_seed(0)
    find = getattr(transformers, f"{kind}LMHeadModel", None)
    model = (find or getattr(transformers, f"{kind}ForCausalLM"))(config)
    if kind == "Mixtral":  # the fused experts know no double precision
        model.set_experts_implementation("eager")
    return model.double().train()


@pytest.mark.parametrize("name", MODELS)
def test_one_sample_trains_in_a_part_of_its_memory(name: str) -> None:
    model = made(name)
    ids = torch.randint(0, CLASSES, (1, LENGTH), generator=torch.Generator().manual_seed(1))

    def loss_fn(piece: Tensor) -> Tensor:
        found: Tensor = model(input_ids=piece, labels=piece, use_cache=False).loss
        return found

    loss_fn(ids).backward()
    wanted = grads(model)
    model.zero_grad()
    events: list[Event] = []
    with MemoryBudget("20GiB", [model]) as budget:
        before = budget.live
        loss_fn(ids).backward()
        model.zero_grad()
        part = 2 if name.startswith("Gemma2") else 3  # its layers take more
        budget.limit = before + (budget.peak - before) // part
        mbs = ElasticMBS(
            model, recovery=RecoveryOptions(escalate=("logits",)), on_event=events.append
        )
        result = mbs.backward(loss_fn, ids)
        assert result.ooms > 0
        found = grads(model)
        mbs.close()
    assert [event.by for event in events if isinstance(event, Escalated)] == ["logits"]
    assert error_of(found, wanted) <= 1e-12
