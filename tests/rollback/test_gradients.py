from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs.errors import GradientsChangedError
from elastic_mbs.rollback.gradients import GradientNotes


def leaves(count: int, *, filled: bool = True) -> list[Tensor]:
    made = [torch.zeros(2, requires_grad=True) for _ in range(count)]
    for leaf in made:
        leaf.grad = torch.ones(2) if filled else None
    return made


def noted(model: list[Tensor]) -> GradientNotes:
    notes = GradientNotes()
    notes.note(model)
    return notes


def clear(leaf: Tensor) -> None:
    leaf.grad = None


def zero(leaf: Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad.zero_()


def replace(leaf: Tensor) -> None:
    leaf.grad = torch.ones(2)


def clip(leaf: Tensor) -> None:
    nn.utils.clip_grad_norm_([leaf], 0.1)


def accumulate(leaf: Tensor) -> None:
    (leaf * 2).sum().backward()


@pytest.mark.parametrize("count", [1, 2, 100, 1000])
def test_clearing_gradients_is_noticed_and_named(count: int) -> None:
    model = leaves(count)
    notes = noted(model)
    assert notes.stayed()
    notes.refuse_touched()
    for leaf in model:
        leaf.grad = None
    assert not notes.stayed()
    with pytest.raises(GradientsChangedError, match=r"shape \(2,\) was cleared.*zero_grad\(\)"):
        notes.refuse_touched()


@pytest.mark.parametrize("edit", [zero, replace, clip, accumulate])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_edit_of_any_gradient_is_noticed(edit: Callable[[Tensor], None], which: int) -> None:
    model = leaves(3)
    notes = noted(model)
    edit(model[which])
    assert not notes.stayed()
    assert {id(leaf) for leaf in notes.moved()} == {id(model[which])}
    with pytest.raises(GradientsChangedError, match="was changed in the middle of a batch"):
        notes.refuse_touched()


def test_a_gradient_that_appears_is_noticed() -> None:
    model = leaves(2, filled=False)
    notes = noted(model)
    model[1].grad = torch.ones(2)
    assert not notes.stayed()
    assert notes.commits() == 1
    with pytest.raises(GradientsChangedError):
        notes.refuse_touched()


@given(
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 4), max_size=8), min_size=1, max_size=3),
)
def test_each_backward_counts_once_for_each_leaf_that_it_reaches(filled: list[bool], backwards: list[list[int]]) -> None:
    model = [torch.zeros(2, requires_grad=True) for _ in filled]
    for leaf, full in zip(model, filled, strict=True):
        leaf.grad = torch.ones(2) if full else None
    notes = noted(model)
    assert notes.filled() == {id(leaf) for leaf, full in zip(model, filled, strict=True) if full}
    for reached in backwards:
        once = sorted({place % len(model) for place in reached})
        if once:
            torch.stack([model[place].sum() for place in once for _ in range(2)]).sum().backward()  # twice in a graph is one commit
        assert notes.commits() == len(once)
        assert Counter(map(id, notes.moved())) == Counter(id(model[place]) for place in once)
        notes.advance()
        assert notes.stayed()
        assert notes.moved() == []


def test_two_backwards_between_two_notes_count_twice_where_a_gradient_was_there() -> None:
    model = leaves(2)
    notes = noted(model)
    for _ in range(2):
        accumulate(model[0])
    assert notes.commits() == 2
    assert [id(leaf) for leaf in notes.moved()] == [id(model[0])] * 2


def test_after_forgetting_gradients_may_change_and_are_not_kept_alive() -> None:
    model = leaves(2)
    notes = noted(model)
    notes.commits()
    assert model[0].grad is not None
    gradient = weakref.ref(model[0].grad)
    notes.forget()
    model[0].grad = None
    assert gradient() is None
    assert notes.stayed()
    notes.refuse_touched()


def views(model: list[Tensor]) -> None:
    flat = torch.zeros(2 * len(model))
    for place, leaf in enumerate(model):
        leaf.grad = flat[2 * place : 2 * place + 2]


def detached(model: list[Tensor]) -> None:
    one = torch.zeros(2)
    for leaf in model:
        leaf.grad = one.detach()


@pytest.mark.parametrize("share", [views, detached])
def test_gradients_in_one_piece_of_memory_are_told_apart_from_others(share: Callable[[list[Tensor]], None]) -> None:
    model = leaves(3)
    notes = noted(model)
    assert not notes.share_memory()
    share(model)
    notes.note(model)
    assert notes.share_memory()
    accumulate(model[0])
    assert notes.commits() == 3  # which is why they have to be told apart
    for leaf in model[:-1]:
        leaf.grad = None
    notes.note(model)
    assert not notes.share_memory()


def test_sparse_gradients_are_counted_whether_autograd_adds_in_place_or_not() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    notes = noted([embedding.weight])
    for _ in range(3):
        embedding(torch.tensor([1, 2])).sum().backward()
        assert notes.commits() == 1
        notes.advance()
    assert not notes.share_memory()
    embedding.weight.grad = torch.zeros(5, 2)
    notes.note([embedding.weight])
    embedding(torch.tensor([1, 2])).sum().backward()  # dense plus sparse
    assert notes.commits() == 1
