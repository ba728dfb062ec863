"""Promise for ample memory: no batch is split, and a run is bit for bit the run without us."""

import pytest
import torch

from elastic_mbs import ElasticMBS
from stress.flat_options import grouped
from stress.models.steps import build
from stress.models.subject import Subject

KINDS = (
    "mlp",
    "conv_batchnorm",
    "gpt_dropout",
    "encoder_decoder",
    "gru",
    "lstm",
    "routed_experts",
    "checkpoint_nonreentrant",
    "sparse_embedding",
    "spectral_norm",
    "host_masks",
)


def train(subject: Subject, mbs: ElasticMBS | None) -> list[torch.Tensor]:
    """Train for three steps; return the losses, the model's state and the random stream."""
    optimizer = subject.optimizer(subject.leaves())
    out = []
    for step in range(3):
        if mbs is None:
            loss = subject.loss_fn(subject.batch(step))
            loss.backward()
        else:
            result = mbs.backward(subject.loss_fn, subject.batch(step))
            assert len(result.partition) == 1
            loss = result.loss
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.detach())
    return [*out, *subject.model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_bit_for_bit_what_it_is_without_the_runtime(kind: str) -> None:
    plain = train(build(kind), None)
    subject = build(kind)
    with ElasticMBS(subject.model, **grouped(subject.options)) as mbs:
        ours = train(subject, mbs)
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
