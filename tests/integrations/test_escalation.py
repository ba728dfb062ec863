"""A model of transformers is as before once escalation has used its own checkpointing."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import transformers

from elastic_mbs import ElasticMBS, Escalated, Event, RecoveryOptions
from tests.helpers.steps import off_by

pytestmark = pytest.mark.no_oom_injection


def tiny(layers: int = 2) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": layers, "n_head": 2, "n_positions": 16}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **ids, **rates, use_cache=False)
    return transformers.GPT2LMHeadModel(config).double()


def test_nothing_of_its_checkpointing_is_left_behind() -> None:
    model, plain = tiny(), tiny()
    ids = torch.randint(0, 40, (4, 7))
    batch = {"input_ids": ids, "labels": ids}
    ElasticMBS.of(model)  # the place of the runtime stays
    before = [set(vars(module)) for module in model.modules()]
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    events: list[Event] = []

    def loss_fn(piece: Any) -> Any:
        if not any(isinstance(event, Escalated) for event in events):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        assert model.transformer.h[0].gradient_checkpointing
        return model(**piece).loss

    recovery = RecoveryOptions(escalate=("checkpoint",))
    with ElasticMBS(model, recovery=recovery, on_event=events.append) as mbs:
        result = mbs.backward(loss_fn, batch)
    assert len(result.partition) == 4
    plain(**batch).loss.backward()
    assert off_by(model, [parameter.grad for parameter in plain.parameters()]) <= 1e-12
    assert [set(vars(module)) for module in model.modules()] == before
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    pickle.dumps(model)


def test_its_layers_are_checkpointed_one_after_the_other() -> None:
    model, plain = tiny(4), tiny(4)
    ids = torch.randint(0, 40, (2, 7))
    batch = {"input_ids": ids, "labels": ids}
    events: list[Event] = []
    seen: list[list[bool]] = []

    def loss_fn(piece: Any) -> Any:
        seen.append([layer.gradient_checkpointing for layer in model.transformer.h])
        if sum(isinstance(event, Escalated) for event in events) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return model(**piece).loss

    recovery = RecoveryOptions(escalate=("checkpoint",))
    with ElasticMBS(model, recovery=recovery, on_event=events.append) as mbs:
        mbs.backward(loss_fn, batch)
    counts = sorted({sum(flags) for flags in seen})
    assert counts == [0, 1, 2, 3]
    assert all(flags == sorted(flags, reverse=True) for flags in seen)
    plain(**batch).loss.backward()
    assert off_by(model, [parameter.grad for parameter in plain.parameters()]) <= 1e-12
    assert not any(layer.gradient_checkpointing for layer in model.transformer.h)
