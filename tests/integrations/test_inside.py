"""Language models of transformers train on one sample in the share that the benchmark says."""

from __future__ import annotations

import pytest

from benchmarks.inside import measured

pytestmark = pytest.mark.no_oom_injection


@pytest.mark.parametrize("name", ["GPT2, tied", "Qwen3 MoE, experts", "OPT"])
def test_one_sample_trains_in_a_quarter_of_its_activations_and_logits(name: str) -> None:
    row = measured(name, shares=(0.25,))
    assert row.share == 0.25
    assert row.error <= 1e-12
