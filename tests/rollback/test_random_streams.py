"""Every random stream is put back to where a failed attempt found it: torch's, Python's, numpy's and generators of the user's."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_mbs import ElasticMBS, MemoryOptions
from elastic_mbs.rollback.random_streams import RandomStreams, StreamState, check_generators
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import mlp, off_by, pairs, whole_gradient

pytestmark = pytest.mark.injectable

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


@pytest.mark.parametrize("at", [1, 2, 3])
def test_looking_at_the_random_streams_may_run_out_of_memory_as_well(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of torch's takes 5 KiB of the host's memory: refused those, a raw error left the call, one even after the gradient was whole."""
    model, batch = mlp(), pairs(8)
    reference = whole_gradient(model, lambda twin: nn.functional.cross_entropy(twin(batch[0]), batch[1]))
    looks, look = 0, RandomStreams.moved_on_devices

    def refused(self: RandomStreams, since: StreamState) -> bool:
        nonlocal looks
        looks += 1
        if looks == at:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5056 bytes. Error code 12")
        return look(self, since)

    monkeypatch.setattr(RandomStreams, "moved_on_devices", refused)
    mbs = ElasticMBS(model, micro_batch_size=4, memory=MemoryOptions(monitor_interval=0))
    with InjectOOM(at=(25,)):
        assert mbs.backward(lambda piece: nn.functional.cross_entropy(model(piece[0]), piece[1]), batch).ooms == 1
    assert off_by(model, reference) <= 1e-12
    assert looks >= at
