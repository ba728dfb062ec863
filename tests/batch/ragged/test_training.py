"""Losses over ragged batches: gradients of pieces are those of the batch, whatever fails."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, Policy
from tests.batch.ragged.test_ragged import KINDS
from tests.helpers.ragged import LENGTHS, Sample, samples_of
from tests.helpers.strikes import every_operation


class Reader(nn.Module):
    """Tables and layers for rows, tokens and bags."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(200, 3)
        self.bag = nn.EmbeddingBag(200, 3, mode="sum")
        self.last_bag = nn.EmbeddingBag(200, 3, mode="sum", include_last_offset=True)
        self.row = nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)
        self.double()
        for leaf in self.parameters():
            with torch.no_grad():
                leaf.copy_(torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype))


def _summed(values: Tensor, index: Tensor, samples: int) -> Tensor:
    return values.new_zeros(samples, values.shape[1]).index_add(0, index.long(), values)


def _squared(errors: Tensor) -> Tensor:
    return errors.square().mean()


def detect(model: Reader, piece: dict[str, Tensor]) -> Tensor:
    rows = model.row(piece["bboxes"]).tanh() * model.table(piece["cls"][:, 0])
    per_sample = _summed(rows, piece["batch_idx"], len(piece["img"]))
    return _squared(model.head(per_sample)[:, 0] - piece["img"])


def transcribe(model: Reader, piece: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    offset, targets, lengths = piece
    steps = model.table.weight[:20][:, None] + offset[:, None] / 9
    steps = functional.pad(steps, (0, 60)).log_softmax(2)
    samples = len(lengths)
    return functional.ctc_loss(
        steps, targets, torch.full((samples,), 20), lengths, reduction="none"
    ).mean()


def bag(model: Reader, piece: dict[str, Tensor]) -> Tensor:
    last = len(piece["offsets"]) > len(piece["y"])
    layer = model.last_bag if last else model.bag
    bags = layer(piece["input"], piece["offsets"], per_sample_weights=piece["per_sample_weights"])
    return _squared(model.head(bags.tanh())[:, 0] - piece["y"])


def attend(model: Reader, piece: dict[str, Any]) -> Tensor:
    index = piece["seq_idx"][0].long()
    hidden = model.table(piece["input_ids"][0]) + model.row(piece["hidden"][0])
    mask = index[:, None] == index
    mixed = functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)
    pooled = _summed(mixed, index, len(piece["cu_seq_lens_q"]) - 1)
    return _squared(model.head(pooled.tanh()))


def convolve(model: Reader, piece: dict[str, Tensor]) -> Tensor:
    nodes = model.row(piece["x"]).tanh()
    source, target = piece["edge_index"]
    messages = nodes[source] * model.table(piece["edge_attr"] % 200)
    nodes = nodes.index_add(0, target, messages)
    graphs = _summed(nodes, piece["batch"], len(piece["y"]))
    return _squared(model.head(graphs)[:, 0] - piece["y"])


LOSSES: dict[str, Callable[[Reader, Any], Tensor]] = {
    "index": detect,
    "index by key": detect,
    "lengths": transcribe,
    "bags": bag,
    "bags with the last offset by key": bag,
    "packed": attend,
    "packed by key": attend,
    "graphs by key": convolve,
}
LENGTHS_OF_ALL = [2, 0, 4, 1, 3, 1]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: leaf.grad.clone() for name, leaf in model.named_parameters() if leaf.grad is not None
    }


def whole(kind: str, samples: list[Sample]) -> dict[str, Tensor]:
    model = Reader()
    LOSSES[kind](model, KINDS[kind][0](samples)).backward()
    return gradients(model)


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(
        float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-9))
        for name in wanted
    )


@pytest.mark.parametrize("kind", LOSSES)
@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS.filter(lambda each: len(each) != sum(each) > 2), size=st.integers(1, 4))
def test_the_gradient_of_pieces_is_that_of_the_batch(
    kind: str, lengths: list[int], size: int
) -> None:
    samples, (make, dims) = samples_of(lengths), KINDS[kind]
    model = Reader()
    mbs = ElasticMBS(model, micro_batch_size=size, dims=dims, policy=Policy(grow=False))
    result = mbs.backward(partial(LOSSES[kind], model), make(samples))
    assert difference(gradients(model), whole(kind, samples)) <= 1e-12
    assert sum(stop - start for start, stop in result.partition) == len(samples)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_failure_at_any_operation_leaves_the_gradient_of_the_batch(kind: str) -> None:
    make, dims = KINDS[kind]
    samples = samples_of(LENGTHS_OF_ALL)
    wanted = whole(kind, samples)
    for injected in every_operation(stride=3, least=10):
        model, batch = Reader(), make(samples)
        loss_fn = partial(LOSSES[kind], model)
        mbs = ElasticMBS(model, dims=dims)
        with injected:
            mbs.backward(loss_fn, batch)
        assert difference(gradients(model), wanted) <= 1e-12, injected.hits
