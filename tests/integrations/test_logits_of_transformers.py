"""Rungs of escalation with language models of transformers: less memory, the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from elastic_mbs import Escalated, Event, MemoryBudget
from stress.reference.state import error_of
from tests.helpers.steps import elastic, grads

pytestmark = pytest.mark.no_oom_injection

CLASSES, LENGTH = 6000, 256
LONG = 512  # positions of a sample whose MLPs take more than its logits
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


def made(name: str, **more: Any) -> Any:
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        **{**({"vocab_size": CLASSES} if kind == "GPT2" else SMALL), **options, **more}
    )
    torch.manual_seed(0)
    find = getattr(transformers, f"{kind}LMHeadModel", None)
    model = (find or getattr(transformers, f"{kind}ForCausalLM"))(config)
    if kind == "Mixtral":  # the fused experts know no double precision
        model.set_experts_implementation("eager")
    return model.double().train()


def loss_of(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return found


@pytest.mark.parametrize("name", MODELS)
def test_one_sample_trains_in_a_part_of_its_memory(name: str) -> None:
    part = 2 if name.startswith("Gemma2") else 3  # its layers take more
    check(made(name), LENGTH, part, ["logits"])


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("Gemma2")])
def test_one_sample_trains_in_a_fifth_of_its_activations_and_logits(name: str) -> None:
    if name == "GPT2":
        model = made(name, n_positions=LONG, n_inner=512)
    else:
        model = made(name, max_position_embeddings=LONG, intermediate_size=512)
    check(model, LONG, 5, ["logits", "tile"])


def check(model: Any, length: int, part: int, rungs: list[str]) -> None:
    """Train on one sample in a part of the memory that it takes beside the gradients."""
    ids = torch.randint(0, CLASSES, (1, length), generator=torch.Generator().manual_seed(1))
    loss_of(model, ids).backward()
    wanted = grads(model)
    model.zero_grad()
    events: list[Event] = []
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    with MemoryBudget("20GiB", [model]) as budget:
        before = budget.live
        loss_of(model, ids).backward()
        model.zero_grad()
        budget.limit = before + gradients + (budget.peak - before - gradients) // part
        mbs = elastic(model, escalate=tuple(rungs), on_event=events.append, sensor=None)
        result = mbs.backward(lambda piece: loss_of(model, piece), ids)
        assert result.ooms > 0
        found = grads(model)
        mbs.close()
    assert [event.by for event in events if isinstance(event, Escalated)] == rungs
    assert error_of(found, wanted) <= 1e-12
