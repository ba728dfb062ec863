"""`Ledger` notices each change of a gradient; `Isolation` keeps earlier ones as they were."""

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
from elastic_mbs.rollback.isolation import Isolation
from tests.helpers.steps import there
from tests.helpers.strikes import Everywhere


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
    said = (
        r"shape \(2,\) was cleared.*zero_grad\(\)"
        if edit == "clear"
        else "was changed in the middle of a batch"
    )
    with pytest.raises(GradientsChangedError, match=said):
        ledger.check_unchanged()


@given(
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 4), max_size=8), min_size=1, max_size=3),
)
def test_each_backward_counts_once_for_each_leaf_that_it_reaches(
    filled: list[bool], backwards: list[list[int]]
) -> None:
    model = [torch.zeros(2, requires_grad=True) for _ in filled]
    for leaf, full in zip(model, filled, strict=True):
        leaf.grad = torch.ones(2) if full else None
    ledger = noted(model)
    assert ledger.with_gradient() == {
        id(leaf) for leaf, full in zip(model, filled, strict=True) if full
    }
    had = ledger.with_gradient()
    for reached in backwards:
        once = sorted({place % len(model) for place in reached})
        if once:
            # a leaf that is twice in a graph commits once
            torch.stack([model[place].sum() for place in once for _ in range(2)]).sum().backward()
        seen = ledger.observe()
        assert not ledger.advance(seen, set(range(10)) - {len(once)})
        assert Counter(map(id, ledger.changed())) == Counter(id(model[place]) for place in once)
        # otherwise the count is not enough
        known = {id(leaf) for leaf in model if leaf.grad is not None} == had or not had
        assert ledger.advance(seen, {len(once)}) is known
        ledger.note()
        had = ledger.with_gradient()
        assert ledger.unchanged()
        assert ledger.changed() == []


def test_extra_leaves_are_known_until_dropped_and_are_not_kept_alive() -> None:
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


F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
SHAPE = (3, 2)


def leaf(dtype: torch.dtype = F64, grad: Tensor | None = None) -> Tensor:
    w = torch.zeros(SHAPE, dtype=dtype, requires_grad=True)
    w.grad = grad
    return w


def gradient(seed: int, kind: str, dtype: torch.dtype = F64) -> Tensor | None:
    """Return a gradient as a backward leaves it: none, dense, or sparse and uncoalesced."""
    if kind == "none":
        return None
    source = torch.Generator().manual_seed(seed)
    if kind == "dense":
        return torch.randn(SHAPE, generator=source, dtype=F64).to(dtype)
    rows = torch.tensor([[2, 0, 2]])
    values = torch.randn(3, 2, generator=source, dtype=F64).to(dtype)
    return torch.sparse_coo_tensor(rows, values, SHAPE, check_invariants=True)


def value(tensor: Tensor | None) -> Tensor:
    return torch.zeros(SHAPE, dtype=F64) if tensor is None else tensor.detach().double().to_dense()


KINDS = st.sampled_from(["none", "dense", "sparse"])


# torch 2.11 warns although the checks are asked for
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("dtype", [F64, BF16], ids=["own type", "wide"])
@given(
    starts=st.lists(KINDS, min_size=1, max_size=3),
    pieces=st.lists(st.tuples(st.lists(KINDS, min_size=3, max_size=3), st.booleans()), max_size=12),
)
def test_the_sum_is_that_of_the_successful_pieces_and_is_rounded_once(
    dtype: torch.dtype, starts: list[str], pieces: list[tuple[list[str], bool]]
) -> None:
    leaves = [leaf(dtype, gradient(i, kind, dtype)) for i, kind in enumerate(starts)]
    expected = [value(w.grad) for w in leaves]
    empty, users = [w.grad is None for w in leaves], [w.grad for w in leaves]
    isolation = Isolation(F64)  # widens the half-precision ones only
    for number, (kinds, succeeds) in enumerate(pieces):
        isolation.set_aside(leaves)
        for i, w in enumerate(leaves):
            assert w.grad is None
            w.grad = gradient(100 * number + i, kinds[i], dtype)
            if succeeds:
                expected[i] = expected[i] + value(w.grad)
                empty[i] = empty[i] and w.grad is None
        (isolation.fold if succeeds else isolation.discard)()
    isolation.finish()
    for w, sum_, none, own, start in zip(leaves, expected, empty, users, starts, strict=True):
        assert (w.grad is None) is none
        assert start != "dense" or w.grad is own
        assert w.grad is None or w.grad.dtype is dtype
        assert torch.allclose(value(w.grad).to(dtype), sum_.to(dtype), rtol=1e-14, atol=1e-14)


def test_a_leaf_may_join_late_and_its_first_contribution_is_not_copied() -> None:
    first, late = leaf(), leaf(grad=torch.ones(SHAPE, dtype=F64))
    isolation, new = Isolation(), torch.ones(SHAPE, dtype=F64)
    for leaves in ([first], [first, late]):
        isolation.set_aside(leaves)
        for w in leaves:
            w.grad = new if len(leaves) == 1 else torch.ones(SHAPE, dtype=F64)
        isolation.fold()
    isolation.finish()
    assert first.grad is new
    assert [value(w.grad)[0, 0].item() for w in (first, late)] == [2.0, 2.0]


def test_rewind_puts_the_original_objects_back_with_their_values() -> None:
    narrow, wide, empty, stranger = (
        leaf(grad=torch.ones(SHAPE, dtype=F64)),
        leaf(BF16, torch.ones(SHAPE, dtype=BF16)),
        leaf(BF16),
        leaf(),
    )
    originals = [narrow.grad, wide.grad]
    isolation = Isolation(F32)
    isolation.set_aside([narrow, wide, empty])
    assert [isolation.intact(w) for w in (narrow, wide, stranger)] == [False, True, False]
    narrow.grad, wide.grad, empty.grad = (
        torch.ones(SHAPE, dtype=F64),
        torch.ones(SHAPE, dtype=BF16),
        torch.ones(SHAPE, dtype=BF16),
    )
    isolation.fold()
    assert isolation.intact(wide)
    assert wide.grad is None
    isolation.rewind()
    isolation.fold()  # nothing is held any more
    assert narrow.grad is originals[0]
    assert wide.grad is originals[1]
    assert empty.grad is None
    assert torch.equal(there(wide.grad), torch.ones(SHAPE, dtype=BF16))
    isolation.set_aside([wide])
    isolation.finish()
    assert not isolation.intact(wide)


def every_kind() -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Return leaves of every kind, and the gradients of two pieces."""
    plans: list[tuple[torch.dtype, str, str, str]] = [
        (F64, "none", "dense", "dense"),
        (F64, "dense", "dense", "sparse"),
        (F64, "none", "sparse", "sparse"),
        (F64, "none", "sparse", "dense"),
        (F64, "sparse", "dense", "none"),
        (BF16, "none", "dense", "dense"),
        (BF16, "dense", "dense", "dense"),
        (BF16, "dense", "none", "none"),
        (BF16, "none", "none", "dense"),
    ]
    leaves = [
        leaf(dtype, gradient(i, start, dtype)) for i, (dtype, start, _, _) in enumerate(plans)
    ]
    pieces = [
        [gradient(100 * p + i, (plan[2], plan[3])[p], plan[0]) for i, plan in enumerate(plans)]
        for p in (0, 1)
    ]
    return leaves, pieces


def fold(
    isolation: Isolation,
    leaves: list[Tensor],
    piece: list[Tensor | None],
    again: Callable[[Callable[[], None]], None],
) -> None:
    isolation.set_aside(leaves)
    for w, new in zip(leaves, piece, strict=True):
        w.grad = new
    again(isolation.fold)


def accumulated(at: set[int]) -> tuple[list[Tensor], list[str], int]:
    """Run two pieces in one isolation, fail at the given operations, and repeat each failure."""
    (leaves, pieces), isolation = every_kind(), Isolation(F32)
    failures: list[str] = []

    def until_done(operation: Callable[[], None]) -> None:
        try:
            operation()
        except torch.OutOfMemoryError as error:
            failures.append(str(error))
            until_done(operation)

    with Everywhere(at=at) as oom:
        for piece in pieces:
            fold(isolation, leaves, piece, until_done)
        until_done(isolation.finish)
    return leaves, failures, oom.count


def test_fold_and_finish_go_on_after_failures_at_any_operations() -> None:
    reference, _, operations = accumulated(set())
    assert operations >= 12
    for at in range(1, operations + 1):
        for faults in ({at}, {at, at + 3}, set(range(at, at + 8))):
            leaves, failures, _ = accumulated(faults)
            assert len(failures) == 1 or len(faults) > 1
            for w, expected in zip(leaves, reference, strict=True):
                assert torch.equal(value(w.grad), value(expected.grad)), failures
                assert (w.grad is None) is (expected.grad is None)


def test_a_failed_fold_or_finish_can_be_rewound() -> None:
    _, _, operations = accumulated(set())
    for at in range(1, operations + 1):
        (leaves, pieces), isolation = every_kind(), Isolation(F32)
        originals = [w.grad for w in leaves]
        values = [value(w.grad) for w in leaves]
        with Everywhere(at=[at]), pytest.raises(torch.OutOfMemoryError):
            for piece in pieces:
                fold(isolation, leaves, piece, lambda operation: operation())
            isolation.finish()
        intact = [isolation.intact(w) for w in leaves]
        isolation.rewind()
        for w, original, before, untouched in zip(leaves, originals, values, intact, strict=True):
            assert w.grad is original
            assert not untouched or torch.equal(value(w.grad), before)
