"""Rollback of buffers: the same objects, with the same values, are in the same places."""

import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs.rollback.buffers import BufferCopies
from tests.helpers.steps import there

F64 = torch.float64


class Holder(nn.Module):
    """A module with named buffers."""

    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def __getitem__(self, name: str) -> Tensor:
        """Return the buffer of that name, as a tensor."""
        return there(self._buffers[name])


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def learned(*modules: nn.Module) -> BufferCopies:
    """Return copies that have seen one clean call in which nothing changed."""
    copies = BufferCopies()
    copies.begin_call(modules)
    copies.end_clean_piece()
    return copies


def clean_piece(copies: BufferCopies, change: Callable[[], object], *, first: bool = False) -> bool:
    if not first:
        copies.begin_piece()
    change()
    return copies.end_clean_piece()


def values(module: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in module.named_buffers()}


def test_buffers_that_were_replaced_deleted_or_registered_are_put_back() -> None:
    module = Holder(count=numbers(1), kept=numbers(2), cache=None)
    for copies in (BufferCopies(), learned(module)):
        before = dict(module._buffers)
        copies.begin_call([module])
        module.count = module["count"] + 1
        module.cache = numbers(5)
        del module.kept
        assert copies.restore(to_call_start=False) is None
        module.register_buffer("codebook", numbers(3))
        copies.restore(to_call_start=False)
        assert {name: id(buffer) for name, buffer in module._buffers.items()} == {
            name: id(buffer) for name, buffer in before.items()
        }
        assert values(module) == {"count": [1], "kept": [2]}


def test_a_buffer_of_an_earlier_piece_is_put_back_to_that_pieces_value() -> None:
    module = Holder(kept=numbers(1))
    copies = BufferCopies()
    copies.begin_call([module])
    clean_piece(copies, lambda: module.register_buffer("codebook", numbers(3)), first=True)
    copies.begin_piece()
    module["codebook"].add_(1)
    assert copies.restore(to_call_start=False) is None
    assert module["codebook"].tolist() == [3]
    module["codebook"].add_(1)
    assert copies.restore(to_call_start=True) is None
    assert list(module._buffers) == ["kept"]


def test_an_unexpected_buffer_is_named_if_an_earlier_piece_may_own_it() -> None:
    module = Holder(kept=numbers(1))
    copies = learned(module)
    copies.begin_call([module])
    module.register_buffer("late", numbers(3))
    assert copies.restore(to_call_start=False) == "the buffer Holder.late"
    copies.begin_call([module])
    module.register_buffer("late", numbers(3))
    assert copies.restore(to_call_start=True) is None
    assert list(module._buffers) == ["kept"]


def test_a_buffer_that_changes_in_place_for_the_first_time_is_named() -> None:
    module = Holder(table=numbers(1), count=numbers(0))
    copies = learned(module)
    copies.begin_call([module])
    module["count"].add_(1)
    assert copies.restore(to_call_start=False) == "the buffer Holder.count"
    copies.begin_call([module])
    assert clean_piece(copies, lambda: module["count"].add_(1), first=True)
    copies.begin_piece()
    start = module["count"].tolist()
    module["count"].add_(1)
    assert copies.restore(to_call_start=False) is None  # from the second piece on there is a copy
    assert module["count"].tolist() == start
    assert copies.restore(to_call_start=True) == "the buffer Holder.count"
    copies.begin_call([module])
    module["count"].add_(1)
    assert copies.restore(to_call_start=True) is None  # and from the next call on
    assert module["count"].tolist() == start


@given(
    st.lists(
        st.tuples(st.sampled_from(["ok", "fail", "step"]), st.sets(st.integers(0, 3))), max_size=8
    ),
    st.booleans(),
)
def test_after_any_history_buffers_are_those_of_a_run_without_failures(
    attempts: list[tuple[str, set[int]]], second_call: bool
) -> None:
    # Buffers 0 and 1 change in place, 2 is replaced, 3 is replaced by None and back.
    module = Holder(a=numbers(0), b=numbers(0), c=numbers(0), d=None)

    def forward(which: set[int]) -> None:
        for i in which & {0, 1}:
            module["ab"[i]].add_(1)
        if 2 in which:
            module.c = module["c"] + 1
        if 3 in which:
            # as `module.d = ...` does, which mypy refuses
            setattr(module, "d", numbers(0) if module._buffers["d"] is None else None)  # noqa: B010

    def state() -> list[Any]:
        return [None if tensor is None else tensor.tolist() for tensor in module._buffers.values()]

    copies = BufferCopies()
    if second_call:  # every buffer is known to change
        copies.begin_call([module])
        clean_piece(copies, lambda: forward({0, 1, 2, 3}), first=True)
    copies.begin_call([module])
    objects = list(module._buffers.values())
    start = done = state()
    at_call = True
    for outcome, which in attempts:
        if not at_call:
            copies.begin_piece()
        at_call = outcome == "step"  # after a restart the piece begins where the call did
        forward(which)
        if outcome == "ok":
            copies.end_clean_piece()
            done = state()
        else:
            to_start = outcome == "step"
            assert copies.restore(to_call_start=to_start) is None
            done = start if to_start else done
            assert state() == done
            if to_start:
                assert all(a is b for a, b in zip(module._buffers.values(), objects, strict=True))


BETWEEN: dict[str, Callable[[nn.BatchNorm1d], object]] = {
    "nothing": lambda norm: None,
    "edited": lambda norm: norm.get_buffer("running_mean").add_(1),
    "edited through data": lambda norm: norm.get_buffer("running_mean").data.add_(1),
    "other memory": lambda norm: setattr(
        norm.get_buffer("running_var"), "data", norm.get_buffer("running_var").clone()
    ),
    "replaced": lambda norm: setattr(norm, "running_mean", norm.get_buffer("running_mean").clone()),
    "mode": lambda norm: norm.train(not norm.training),
}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(BETWEEN)),
            st.lists(st.sampled_from(["ok", "fail", "step"]), min_size=1, max_size=5),
        ),
        max_size=6,
    )
)
# a module that settled in eval mode and then trains
@example([("mode", ["ok"]), ("nothing", ["ok"]), ("mode", ["fail"])])
def test_statistics_follow_a_run_without_failures_from_call_to_call(
    calls: list[tuple[str, list[str]]],
) -> None:
    # Facts that are kept from call to call must not outlive a change of the buffers in between.
    norm, twin = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    draw = torch.Generator().manual_seed(0)
    copies = BufferCopies()
    for between, attempts in calls:
        for each in (norm, twin):
            BETWEEN[between](each)
        copies.begin_call([norm])
        start = {name: buffer.clone() for name, buffer in twin.named_buffers()}
        for attempt, outcome in enumerate(attempts):
            if attempt:
                copies.begin_piece()
            piece = torch.randn(8, 3, dtype=F64, generator=draw)
            norm(piece)
            if outcome == "ok":
                copies.end_clean_piece()
                twin(piece)
            else:
                assert copies.restore(to_call_start=outcome == "step") is None
                if outcome == "step":
                    for name, buffer in twin.named_buffers():
                        buffer.copy_(start[name])
            assert values(norm) == values(twin)


CHANGES: dict[str, Callable[[list[nn.Module]], object]] = {
    "a module more": lambda modules: modules.append(nn.BatchNorm1d(3).double()),
    "another module": lambda modules: modules.__setitem__(0, nn.BatchNorm1d(3).double()),
    "a buffer more": lambda modules: modules[0].register_buffer("late", numbers(3)),
    "other places": lambda modules: vars(modules[0]).update(_buffers=dict(modules[0]._buffers)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_changes_between_calls_is_followed(
    change: Callable[[list[nn.Module]], object],
) -> None:
    modules = list[nn.Module]([nn.BatchNorm1d(3).double()])
    x, copies = torch.randn(8, 3, dtype=F64), BufferCopies()
    for _ in range(2):
        copies.begin_call(modules)
        clean_piece(copies, lambda: modules[0](x), first=True)
    change(modules)
    copies.begin_call(modules)
    before = [values(module) for module in modules]
    for module in modules:
        module(x)
    assert copies.restore(to_call_start=False) is None
    assert [values(module) for module in modules] == before


class Lazy(nn.Module):
    """A module that makes its buffer in its first forward, and notes that in an attribute."""

    ready = False

    def forward(self, x: Tensor) -> None:
        if not self.ready:
            self.register_buffer("scale", x.mean(0))
            self.ready = True


def test_a_modules_note_of_a_buffer_goes_away_with_the_buffer() -> None:
    module, copies = Lazy(), BufferCopies()
    copies.begin_call([module])
    module(numbers(1, 2))
    assert copies.restore(to_call_start=False) is None
    assert (module.ready, list(module._buffers)) == (False, [])


def test_buffers_of_a_failed_attempt_or_an_earlier_call_are_freed() -> None:
    module = Holder(cache=numbers(0))
    copies = BufferCopies()
    copies.begin_call([module])
    first = weakref.ref(module["cache"])
    module.cache = numbers(1)
    failed = weakref.ref(module["cache"])
    gc.disable()
    try:
        copies.restore(to_call_start=False)
        assert failed() is None
        module.cache = numbers(1)
        copies.end_clean_piece()
        copies.begin_call([module])
        assert first() is None
    finally:
        gc.enable()


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return numbers(1, 2)


KINDS: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.tensor(1.0),
    "integers": lambda: torch.arange(3),
    "booleans": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1j]),
    "empty": lambda: torch.zeros(0),
    "nan": lambda: numbers(float("nan")),
    "infinite": lambda: torch.full((2, 2), float("-inf")).triu(1),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "inference": inference_tensor,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_of_any_kind_that_stays_as_it_is_does_no_harm(kind: str) -> None:
    module = Holder(table=KINDS[kind]())
    before = str(module["table"].to_dense().tolist())  # NaN is not equal to itself
    copies = BufferCopies()
    for _ in range(2):
        copies.begin_call([module])
        assert copies.restore(to_call_start=False) is None
        assert not copies.end_clean_piece()
        copies.begin_piece()
        assert copies.restore(to_call_start=True) is None
        assert str(module["table"].to_dense().tolist()) == before


@pytest.mark.parametrize(
    "grow",
    [
        lambda buffer: setattr(buffer, "data", torch.ones(4, dtype=F64)),
        lambda buffer: buffer.resize_(5),
    ],
)
def test_a_buffer_that_changed_its_shape_has_the_old_shape_and_value_again(
    grow: Callable[[Tensor], object],
) -> None:
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
    assert there(w.grad).tolist() == [1, 2]


@pytest.mark.parametrize("known", [False, True])
def test_containers_of_a_module_are_put_back_with_their_items(known: bool) -> None:
    module: Any = Holder(kept=numbers(1))
    was: dict[str, Any] = {
        "rows": [1, 2], "last": deque([1, 2], maxlen=2), "names": {"a"}, "by": {"x": [0]}
    }  # fmt: skip
    vars(module).update(was)

    def change() -> None:
        module.rows.append(3)
        module.last.append(3)
        module.names.add("b")
        module.by.clear()
        module.by["y"] = module.by

    copies = BufferCopies()
    copies.begin_call([module])
    if known:
        change()
        copies.end_clean_piece()
        copies.restore(to_call_start=True)
        copies.begin_call([module])
    change()
    module.rows = []
    assert copies.restore(to_call_start=False) is None
    assert {name: vars(module)[name] for name in was} == {
        "rows": [1, 2], "last": deque([1, 2]), "names": {"a"}, "by": {"x": [0]}
    }  # fmt: skip
    assert all(vars(module)[name] is value for name, value in was.items())
    assert module.last.maxlen == 2


@pytest.mark.parametrize("start", [numbers(), numbers(1, 2)])
@pytest.mark.parametrize("first", [False, True])
def test_a_bank_that_grows_in_an_attribute_is_put_back(start: Tensor, first: bool) -> None:
    module = Holder(kept=numbers(1))
    copies, known = BufferCopies(), start

    def grow(*new: float) -> Tensor:
        both = [numbers(*new), vars(module)["bank"]]
        vars(module)["bank"] = torch.cat(both if first else both[::-1])
        grown: Tensor = vars(module)["bank"]
        return grown

    vars(module)["bank"] = start
    copies.begin_call([module])
    known = grow(3, 4)
    copies.end_clean_piece()
    for _ in range(2):  # in the first call, and in a later one
        copies.begin_piece()
        grow(5, 6)
        assert copies.restore(to_call_start=False) is None
        assert torch.equal(vars(module)["bank"], known)
        copies.begin_call([module])


def test_features_that_a_module_stores_are_not_copied() -> None:
    module = Holder(kept=numbers(1))
    vars(module)["features"] = numbers(1, 2)
    copies = BufferCopies()
    copies.begin_call([module])
    vars(module)["features"] = numbers(4, 5, 6)  # of the piece: of another length
    copies.end_clean_piece()
    copies.begin_call([module])
    vars(module)["features"] = latest = numbers(4)
    copies.restore(to_call_start=False)
    assert vars(module)["features"] is latest


def test_what_is_learned_of_a_module_goes_with_it() -> None:
    copies, model = BufferCopies(), Holder(count=numbers(0))
    for _ in range(3):
        beside = Holder(count=numbers(0))
        copies.begin_call([model], key=object(), companions=[beside])
        clean_piece(copies, lambda beside=beside: beside["count"].add_(1), first=True)  # type: ignore[misc]
        assert copies.changes(beside)
        del beside
        copies.end_call()
    copies.begin_call([model])
    copies.end_call()
    gc.collect()
    assert not copies.changes(model)
    assert len(copies._changing._keys) == 0
