from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs import ElasticMBS
from elastic_mbs.buffers import BufferCopies
from elastic_mbs.random_streams import RandomStreams, check_generators

F64 = torch.float64

# ---------------------------------------------------------------------- random streams

Draw = Callable[[], Any]


def own_streams() -> list[tuple[str, Any, Draw]]:
    own = torch.Generator().manual_seed(1)
    bits: list[Any] = [np.random.PCG64(1), np.random.MT19937(1), np.random.Philox(1), np.random.SFC64(1)]
    numpies = [(type(b).__name__, np.random.Generator(b)) for b in bits]
    legacy, python = np.random.RandomState(1), random.Random(1)
    return [
        ("torch.Generator", own, lambda: torch.rand(3, generator=own).tolist()),
        ("random.Random", python, lambda: (python.random(), python.gauss())),
        ("RandomState", legacy, lambda: (legacy.rand(), legacy.randn())),
        *((name, generator, lambda g=generator: g.normal(size=3).tolist()) for name, generator in numpies),
    ]


def global_streams() -> list[tuple[str, Draw]]:
    return [
        ("torch", lambda: torch.rand(3).tolist()),
        ("random", lambda: (random.random(), random.gauss(0, 1))),
        ("numpy", lambda: (np.random.rand(), np.random.randn())),
    ]


@pytest.mark.parametrize("which", range(3), ids=[name for name, _ in global_streams()])
def test_a_global_stream_is_put_back(which: int) -> None:
    draw = global_streams()[which][1]
    streams = RandomStreams([], [torch.device("cpu")])
    state = streams.read(slow=True)
    assert not streams.moved(state)
    first = draw()
    assert streams.moved(state)
    draw()
    streams.restore(state)
    assert not streams.moved(state)
    assert draw() == first


@pytest.mark.parametrize("which", range(7), ids=[name for name, _, _ in own_streams()])
def test_a_generator_of_the_users_is_put_back(which: int) -> None:
    _, generator, draw = own_streams()[which]
    streams = RandomStreams([generator], [])
    for _ in range(2):
        state = streams.read(slow=True)
        assert not streams.moved(state)
        first = draw()
        assert streams.moved(state)
        assert streams.moved_on_host(state) is not isinstance(generator, torch.Generator)
        streams.restore(state)
        assert draw() == first


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=12))
def test_any_mixture_of_draws_is_undone(before: list[int], after: list[int]) -> None:
    own = own_streams()
    draws = [draw for _, draw in global_streams()] + [draw for _, _, draw in own]
    streams = RandomStreams([generator for _, generator, _ in own], [])
    for i in before:
        draws[i]()
    state = streams.read(slow=True)
    first = [draws[i]() for i in after]
    assert streams.moved(state) is bool(after)
    streams.restore(state)
    assert [draws[i]() for i in after] == first


def test_a_fast_reading_leaves_the_hosts_streams_alone() -> None:
    python = random.Random(0)
    streams = RandomStreams([python], [])
    state = streams.read(slow=False)
    assert state.slow is None
    drawn, first = python.random(), torch.rand(1).item()
    assert not streams.moved_on_host(state)
    assert streams.moved(state)
    streams.restore(state)
    assert torch.rand(1).item() == first
    assert python.random() != drawn


def test_reading_draws_nothing() -> None:
    states = [random.getstate(), torch.get_rng_state().tolist(), np.random.get_state(legacy=False)["state"]["pos"]]
    streams = RandomStreams([], [])
    streams.moved(streams.read(slow=True))
    assert states == [random.getstate(), torch.get_rng_state().tolist(), np.random.get_state(legacy=False)["state"]["pos"]]


def test_numpy_imported_later_counts_as_drawn_from_and_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = RandomStreams([random.Random(0)], [])
    numpy_random = sys.modules["numpy.random"]
    monkeypatch.delitem(sys.modules, "numpy.random")
    state = streams.read(slow=True)
    assert not streams.moved_on_host(state)
    monkeypatch.setitem(sys.modules, "numpy.random", numpy_random)
    assert streams.moved_on_host(state)
    np.random.rand()
    before = np.random.get_state(legacy=False)["state"]["pos"]
    streams.restore(state)
    assert np.random.get_state(legacy=False)["state"]["pos"] == before


def test_generators_that_can_be_rolled_back_are_accepted() -> None:
    assert check_generators([generator for _, generator, _ in own_streams()]) is None


@pytest.mark.parametrize(
    ("generator", "name"), [(42, "int"), (None, "NoneType"), (np.random.PCG64(), "PCG64"), (random.SystemRandom(), "SystemRandom")]
)
def test_what_has_no_state_is_refused_by_name(generator: Any, name: str) -> None:
    trouble = check_generators([random.Random(0), generator])
    assert trouble is not None
    assert f"has a {name}," in trouble
    assert "give torch, random or numpy generators" in trouble


# ---------------------------------------------------------------------- buffers


class Holder(nn.Module):
    """A module with named buffers."""

    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def __getitem__(self, name: str) -> Tensor:
        """The buffer of that name, as a tensor."""
        tensor = self._buffers[name]
        assert tensor is not None
        return tensor


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def learned(*modules: nn.Module) -> BufferCopies:
    """Copies that have seen one clean call in which nothing changed."""
    copies = BufferCopies()
    copies.begin_call(modules)
    copies.end_clean_piece()
    return copies


def clean_piece(copies: BufferCopies, change: Callable[[], object], *, first: bool = False) -> bool:
    if not first:
        copies.begin_piece()
    change()
    return copies.end_clean_piece()


def batch_norm() -> tuple[nn.BatchNorm1d, Callable[[], Tensor]]:
    module = nn.BatchNorm1d(3).double()
    x = torch.randn(8, 3, dtype=F64)
    return module, lambda: module(x)


def values(module: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in module.named_buffers()}


def test_running_statistics_whose_version_does_not_move_are_put_back() -> None:
    module, forward = batch_norm()
    for copies in (BufferCopies(), learned(module.eval())):
        module.train()
        copies.begin_call([module])
        before = values(module)
        assert not copies.moved()
        forward()
        assert values(module) != before
        assert copies.moved()
        assert copies.restore(to_call_start=False) is None
        assert values(module) == before
        assert not copies.moved()
        assert copies.end_clean_piece()


def test_each_start_is_gone_back_to_as_asked() -> None:
    module, forward = batch_norm()
    copies = BufferCopies()
    for _ in range(4):
        copies.begin_call([module])
        call_start = values(module)
        clean_piece(copies, forward, first=True)
        copies.begin_piece()
        piece_start = values(module)
        forward()
        assert copies.restore(to_call_start=False) is None
        assert values(module) == piece_start
        forward()
        assert copies.restore(to_call_start=True) is None
        assert values(module) == call_start
        forward()
        assert copies.restore(to_call_start=False) is None  # the piece that follows starts where the call does
        assert values(module) == call_start
        clean_piece(copies, forward)


def test_a_model_in_eval_mode_changes_no_buffer() -> None:
    module, forward = batch_norm()
    module.eval()
    copies = BufferCopies()
    copies.begin_call([module])
    assert not clean_piece(copies, forward, first=True)
    assert not copies.moved()


def test_a_norm_without_running_statistics_changes_no_buffer() -> None:
    module = nn.InstanceNorm1d(3).double()
    copies = BufferCopies()
    copies.begin_call([module])
    assert not clean_piece(copies, lambda: module(torch.randn(2, 3, 5, dtype=F64)), first=True)


def test_a_buffer_replaced_by_a_new_object_comes_back_as_the_old_object() -> None:
    module = Holder(count=numbers(1))
    for copies in (BufferCopies(), learned(module)):
        old = module["count"]
        copies.begin_call([module])
        module.count = old + 1
        assert copies.moved()
        assert copies.restore(to_call_start=False) is None
        assert module["count"] is old
        assert old.tolist() == [1]
        assert not copies.moved()


def test_a_buffer_that_is_replaced_in_every_piece_is_followed() -> None:
    module = Holder(count=numbers(0))
    copies = learned(module)

    def forward() -> None:
        module.count = module["count"] + 1

    copies.begin_call([module])
    start = module["count"]
    assert clean_piece(copies, forward, first=True)
    assert clean_piece(copies, forward)
    copies.begin_piece()
    middle = module["count"]
    forward()
    assert copies.restore(to_call_start=False) is None
    assert module["count"] is middle
    assert copies.restore(to_call_start=True) is None
    assert module["count"] is start
    assert start.tolist() == [0]


def test_a_buffer_that_was_none_or_was_deleted_is_so_again() -> None:
    module = Holder(cache=None, kept=numbers(1))
    copies = BufferCopies()
    copies.begin_call([module])
    module.cache = numbers(5)
    del module.kept
    assert copies.moved()
    assert copies.restore(to_call_start=False) is None
    assert module._buffers["cache"] is None
    assert module["kept"].tolist() == [1]


def test_a_buffer_registered_by_the_failed_attempt_is_gone_again() -> None:
    module = Holder(kept=numbers(1))
    copies = BufferCopies()
    copies.begin_call([module])
    module.register_buffer("codebook", numbers(3))
    copies.restore(to_call_start=False)
    assert list(module._buffers) == ["kept"]


def test_a_buffer_registered_by_an_earlier_piece_is_put_back_to_that_pieces_value() -> None:
    module = Holder(kept=numbers(1))
    copies = BufferCopies()
    copies.begin_call([module])
    clean_piece(copies, lambda: module.register_buffer("codebook", numbers(3)), first=True)
    copies.begin_piece()
    module["codebook"].add_(1)
    assert copies.moved()
    assert copies.restore(to_call_start=False) is None
    assert module["codebook"].tolist() == [3]
    module["codebook"].add_(1)
    assert copies.restore(to_call_start=True) is None
    assert list(module._buffers) == ["kept"]


def test_a_buffer_that_nobody_expected_is_named_when_it_may_be_an_earlier_pieces() -> None:
    module = Holder(kept=numbers(1))
    copies = learned(module)
    copies.begin_call([module])
    module.register_buffer("late", numbers(3))
    assert copies.moved()
    assert copies.restore(to_call_start=False) == "Holder.late"
    copies.begin_call([module])
    module.register_buffer("late", numbers(3))
    assert copies.restore(to_call_start=True) is None
    assert list(module._buffers) == ["kept"]


def test_the_first_call_keeps_every_buffer_on_the_host() -> None:
    module = Holder(table=numbers(1, 2), count=numbers(0))
    copies = BufferCopies()
    copies.begin_call([module])
    module["count"].add_(1)
    assert copies.restore(to_call_start=False) is None
    assert module["count"].tolist() == [0]
    assert clean_piece(copies, lambda: module["count"].add_(1), first=True)
    copies.begin_piece()
    module["count"].add_(1)
    assert copies.restore(to_call_start=False) is None
    assert module["count"].tolist() == [1]
    assert copies.restore(to_call_start=True) is None
    assert module["count"].tolist() == [0]


def test_a_buffer_that_changes_in_place_for_the_first_time_is_named() -> None:
    module = Holder(table=numbers(1), count=numbers(0))
    copies = learned(module)
    copies.begin_call([module])
    module["count"].add_(1)
    assert copies.moved()
    assert copies.restore(to_call_start=False) == "Holder.count"
    copies.begin_call([module])
    assert clean_piece(copies, lambda: module["count"].add_(1), first=True)
    copies.begin_piece()
    start = module["count"].tolist()
    module["count"].add_(1)
    assert copies.restore(to_call_start=False) is None  # from the second piece on there is a copy
    assert module["count"].tolist() == start
    assert copies.restore(to_call_start=True) == "Holder.count"
    copies.begin_call([module])
    module["count"].add_(1)
    assert copies.restore(to_call_start=True) is None  # and from the next call on
    assert module["count"].tolist() == start


def test_a_change_through_data_is_seen_in_the_first_call() -> None:
    module = Holder(codebook=numbers(1))
    copies = BufferCopies()
    copies.begin_call([module])
    assert clean_piece(copies, lambda: module["codebook"].data.add_(1), first=True)
    copies.begin_piece()
    module["codebook"].data.add_(1)
    assert copies.restore(to_call_start=False) is None
    assert module["codebook"].tolist() == [2]


def test_a_change_through_data_is_seen_after_an_eval_in_which_nothing_changed() -> None:
    module = Holder(codebook=numbers(1))
    copies = BufferCopies()
    copies.begin_call([module.eval()], "eval")
    assert not clean_piece(copies, lambda: None, first=True)
    copies.begin_call([module.train()], "train")
    assert clean_piece(copies, lambda: module["codebook"].data.add_(1), first=True)
    copies.begin_piece()
    module["codebook"].data.add_(1)
    assert copies.restore(to_call_start=False) is None
    assert module["codebook"].tolist() == [2]


@pytest.mark.no_oom_injection
def test_a_codebook_that_is_moved_through_data_is_exact_after_an_eval_and_a_failure() -> None:
    class Quantizer(Holder):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self["codebook"].data.add_(1)
            return x * self.get_parameter("weight")

    model = Quantizer(codebook=numbers(0))
    model.register_parameter("weight", nn.Parameter(numbers(1)))
    fail = False

    def loss_fn(x: Tensor) -> Tensor:
        nonlocal fail
        loss: Tensor = model(x).mean()
        if fail:
            fail = False
            raise torch.OutOfMemoryError("out of memory")
        return loss

    x = torch.randn(8, 1, dtype=F64)
    with ElasticMBS(model, micro_batch_size=4, grow=False, monitor_interval=0) as mbs:
        model.eval()
        mbs.eval(model, x)
        model.train()
        fail = True
        result = mbs.backward(loss_fn, x)
    assert result.ooms == 1
    assert model["codebook"].tolist() == [len(result.partition)]


@pytest.mark.parametrize("first", [True, False], ids=["first-call", "later-call"])
def test_the_vectors_of_spectral_norm_are_put_back(first: bool) -> None:
    torch.manual_seed(0)  # singular values far enough apart would have the vectors settled before the test
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16).double())
    modules = list(module.modules())
    x = torch.randn(2, 16, dtype=F64)
    copies = BufferCopies()
    if not first:
        copies.begin_call(modules)
        assert clean_piece(copies, lambda: module(x), first=True)
    copies.begin_call(modules)
    before = values(module)
    out = module(x)
    assert values(module) != before
    assert copies.moved()
    assert copies.restore(to_call_start=False) is None
    assert values(module) == before
    assert torch.equal(module(x), out)


@given(st.lists(st.tuples(st.sampled_from(["ok", "fail", "step"]), st.sets(st.integers(0, 3))), max_size=8), st.booleans())
def test_after_any_history_buffers_are_those_of_a_run_without_failures(attempts: list[tuple[str, set[int]]], second_call: bool) -> None:
    """Buffers 0 and 1 change in place, 2 is replaced, 3 is replaced by None and back; a model of plain numbers runs beside them."""
    module = Holder(a=numbers(0), b=numbers(0), c=numbers(0), d=None)

    def forward(which: set[int]) -> None:
        for i in which & {0, 1}:
            module["ab"[i]].add_(1)
        if 2 in which:
            module.c = module["c"] + 1
        if 3 in which:
            setattr(module, "d", numbers(0) if module._buffers["d"] is None else None)  # noqa: B010  # what `module.d = ...` does, for mypy

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
        at_call = False
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
    "other memory": lambda norm: setattr(norm.get_buffer("running_var"), "data", norm.get_buffer("running_var").clone()),
    "replaced": lambda norm: setattr(norm, "running_mean", norm.get_buffer("running_mean").clone()),
    "mode": lambda norm: norm.train(not norm.training),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(BETWEEN)), st.lists(st.sampled_from(["ok", "fail", "step"]), min_size=1, max_size=5)), max_size=6))
def test_statistics_follow_a_run_without_failures_from_call_to_call(calls: list[tuple[str, list[str]]]) -> None:
    """What is kept from one call to the next must not outlive what happens to the buffers between them."""
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


def test_the_copies_of_one_start_are_not_overwritten_by_the_other() -> None:
    module, forward = batch_norm()
    copies = BufferCopies()
    copies.begin_call([module])
    call_start = values(module)
    for _ in range(3):
        clean_piece(copies, forward)
    copies.restore(to_call_start=True)
    assert values(module) == call_start


def test_a_model_that_grows_between_calls_is_followed() -> None:
    first, forward = batch_norm()
    second, forward_second = batch_norm()
    copies = BufferCopies()
    copies.begin_call([first])
    clean_piece(copies, forward, first=True)
    copies.begin_call([first, second])
    before = [values(first), values(second)]
    forward()
    forward_second()
    assert copies.restore(to_call_start=False) is None
    assert [values(first), values(second)] == before


def test_what_the_failed_attempt_hung_up_is_freed() -> None:
    module = Holder(cache=numbers(0))
    copies = BufferCopies()
    copies.begin_call([module])
    module.cache = numbers(1)
    failed = weakref.ref(module["cache"])
    gc.disable()
    try:
        copies.restore(to_call_start=False)
        assert failed() is None
    finally:
        gc.enable()


def test_buffers_of_earlier_calls_are_freed() -> None:
    module = Holder(cache=numbers(0))
    copies = BufferCopies()
    copies.begin_call([module])
    old = weakref.ref(module["cache"])
    module.cache = numbers(1)
    copies.end_clean_piece()
    gc.disable()
    try:
        copies.begin_call([module])
        assert old() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------- kinds of buffers


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
        assert not copies.moved()
        assert copies.restore(to_call_start=False) is None
        assert not copies.end_clean_piece()
        copies.begin_piece()
        assert copies.restore(to_call_start=True) is None
        assert module["table"].to_dense().tolist() == before


def test_a_buffer_that_holds_nan_is_not_taken_to_change() -> None:
    module = Holder(scale=numbers(float("nan")))
    copies = BufferCopies()
    copies.begin_call([module])
    assert not copies.moved()
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
    assert not copies.moved()
    assert not copies.end_clean_piece()
    assert copies.restore(to_call_start=True) is None
