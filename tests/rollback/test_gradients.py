import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs.errors import GradientsChangedError
from elastic_mbs.rollback.gradients import Ledger


def leaves(count: int, *, filled: bool = True) -> list[Tensor]:
    made = [torch.zeros(2, requires_grad=True) for _ in range(count)]
    for leaf in made:
        leaf.grad = torch.ones(2) if filled else None
    return made


def noted(model: list[Tensor]) -> Ledger:
    ledger = Ledger()
    ledger.set_leaves(model)
    ledger.note()
    return ledger


def accumulate(leaf: Tensor) -> None:
    (leaf * 2).sum().backward()


EDITS: dict[str, Callable[[Tensor], object]] = {
    "clear": lambda leaf: setattr(leaf, "grad", None),
    "zero": lambda leaf: torch.optim.SGD([leaf]).zero_grad(set_to_none=False),
    "replace": lambda leaf: setattr(leaf, "grad", torch.ones(2)),
    "clip": lambda leaf: nn.utils.clip_grad_norm_([leaf], 0.1),
    "accumulate": accumulate,
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_edit_of_any_gradient_is_noticed(edit: str, which: int) -> None:
    model = leaves(3)
    ledger = noted(model)
    ledger.check_unchanged()
    EDITS[edit](model[which])
    assert not ledger.unchanged()
    assert {id(leaf) for leaf in ledger.changed()} == {id(model[which])}
    said = r"shape \(2,\) was cleared.*zero_grad\(\)" if edit == "clear" else "was changed in the middle of a batch"
    with pytest.raises(GradientsChangedError, match=said):
        ledger.check_unchanged()


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.lists(st.lists(st.integers(0, 4), max_size=8), min_size=1, max_size=3))
def test_each_backward_counts_once_for_each_leaf_that_it_reaches(filled: list[bool], backwards: list[list[int]]) -> None:
    model = [torch.zeros(2, requires_grad=True) for _ in filled]
    for leaf, full in zip(model, filled, strict=True):
        leaf.grad = torch.ones(2) if full else None
    ledger = noted(model)
    assert ledger.with_gradient() == {id(leaf) for leaf, full in zip(model, filled, strict=True) if full}
    had = ledger.with_gradient()
    for reached in backwards:
        once = sorted({place % len(model) for place in reached})
        if once:
            torch.stack([model[place].sum() for place in once for _ in range(2)]).sum().backward()  # twice in a graph is one commit
        seen = ledger.observe()
        assert not ledger.advance(seen, set(range(10)) - {len(once)})
        assert Counter(map(id, ledger.changed())) == Counter(id(model[place]) for place in once)
        known = {id(leaf) for leaf in model if leaf.grad is not None} == had or not had  # else it needs a look at each leaf
        assert ledger.advance(seen, {len(once)}) is known
        ledger.note()
        had = ledger.with_gradient()
        assert ledger.unchanged()
        assert ledger.changed() == []


def test_extra_leaves_are_known_until_the_notes_are_dropped_and_not_kept_alive() -> None:
    model, prompt = leaves(1, filled=False), torch.zeros(2, requires_grad=True)
    ledger = noted(model)
    assert [id(leaf) for leaf in ledger.add_extra([*model, prompt])] == [id(prompt)]
    assert ledger.add_extra([prompt]) == []
    (model[0] * prompt).sum().backward()
    assert not ledger.advance(ledger.observe(), range(10))
    assert Counter(map(id, ledger.changed())) == Counter([id(model[0]), id(prompt)])
    ledger.note()
    assert ledger.unchanged()
    accumulate(prompt)
    assert [id(leaf) for leaf in ledger.changed()] == [id(prompt)]
    assert prompt in ledger
    alive = weakref.ref(prompt)
    del prompt
    assert alive() is None
    assert [id(leaf) for leaf in ledger.leaves()] == [id(model[0])]
    ledger.forget()
    assert ledger.leaves() == model
