"""Buffers of every kind: what is not changed is left alone, and what is changed in an unusual way is put back all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs.rollback.buffers import BufferCopies
from tests.helpers.buffers import F64, Holder, numbers


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return numbers(1, 2)


KINDS: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.tensor(1.0),
    "integers": lambda: torch.arange(3),
    "booleans": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1j]),
    "empty": lambda: torch.zeros(0),
    "infinite": lambda: torch.full((2, 2), float("-inf")).triu(1),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "inference": inference_tensor,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_of_any_kind_that_stays_as_it_is_does_no_harm(kind: str) -> None:
    module = Holder(table=KINDS[kind]())
    before = module["table"].to_dense().tolist()
    copies = BufferCopies()
    for _ in range(2):
        copies.begin_call([module])
        assert not copies.changed()
        assert copies.restore(to_call_start=False) is None
        assert not copies.end_clean_piece()
        copies.begin_piece()
        assert copies.restore(to_call_start=True) is None
        assert module["table"].to_dense().tolist() == before


def test_a_buffer_that_holds_nan_is_not_taken_to_change() -> None:
    module = Holder(scale=numbers(float("nan")))
    copies = BufferCopies()
    copies.begin_call([module])
    assert not copies.changed()
    assert not copies.end_clean_piece()


def grow_by_data(buffer: Tensor) -> None:
    buffer.data = torch.ones(4, dtype=F64)


@pytest.mark.parametrize("grow", [grow_by_data, lambda buffer: buffer.resize_(5)], ids=["data", "resize"])
def test_a_buffer_that_changed_its_shape_has_the_old_shape_and_value_again(grow: Callable[[Tensor], object]) -> None:
    module = Holder(cache=torch.tensor(1.0, dtype=F64))
    copies = BufferCopies()
    copies.begin_call([module])
    grow(module["cache"])
    assert copies.restore(to_call_start=False) is None
    assert torch.equal(module["cache"], torch.tensor(1.0, dtype=F64))


def test_restoring_buffers_that_did_not_change_leaves_other_graphs_valid() -> None:
    module = Holder(table=numbers(1, 2))
    w = torch.ones(2, dtype=F64, requires_grad=True)
    other = (w * module["table"]).sum()  # a loss of the user's, made before the call
    copies = BufferCopies()
    copies.begin_call([module])
    copies.restore(to_call_start=False)
    other.backward()
    assert w.grad is not None
    assert w.grad.tolist() == [1, 2]


def test_modules_without_buffers_cost_nothing() -> None:
    modules: Sequence[nn.Module] = [nn.Linear(2, 2), nn.Tanh()]
    copies = BufferCopies()
    copies.begin_call(modules)
    copies.begin_piece()
    assert not copies.changed()
    assert not copies.end_clean_piece()
    assert copies.restore(to_call_start=True) is None
