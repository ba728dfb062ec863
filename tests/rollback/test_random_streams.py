"""Random streams go back to where a failed attempt found them, whoever they belong to."""

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_mbs.rollback.random_streams import RandomStreams, check_generators
from tests.helpers.steps import (
    FailOn,
    cross_entropy,
    elastic,
    failing,
    mlp,
    off_by,
    pairs,
    there,
    whole_gradient,
)

pytestmark = pytest.mark.injectable

Draw = Callable[[], Any]


def own_streams() -> list[tuple[str, Any, Draw]]:
    own = torch.Generator().manual_seed(1)
    bits: list[Any] = [
        np.random.PCG64(1),
        np.random.MT19937(1),
        np.random.Philox(1),
        np.random.SFC64(1),
    ]
    numpies = [(type(b).__name__, np.random.Generator(b)) for b in bits]
    legacy, python = np.random.RandomState(1), random.Random(1)
    return [
        ("torch.Generator", own, lambda: torch.rand(3, generator=own).tolist()),
        ("random.Random", python, lambda: (python.random(), python.gauss())),
        ("RandomState", legacy, lambda: (legacy.rand(), legacy.randn())),
        *(
            (name, generator, lambda g=generator: g.normal(size=3).tolist())
            for name, generator in numpies
        ),
    ]


def global_streams() -> list[tuple[str, Draw]]:
    return [
        ("torch", lambda: torch.rand(3).tolist()),
        ("random", lambda: (random.random(), random.gauss(0, 1))),
        ("numpy", lambda: (np.random.rand(), np.random.randn())),
    ]


EVERY: list[tuple[str, Any, Draw]] = [
    *((name, None, draw) for name, draw in global_streams()),
    *own_streams(),
]


@pytest.mark.parametrize("which", range(len(EVERY)), ids=[name for name, _, _ in EVERY])
def test_a_stream_is_put_back(which: int) -> None:
    name, generator, draw = EVERY[which]
    streams = RandomStreams([] if generator is None else [generator], [torch.device("cpu")])
    for _ in range(2):
        state = streams.read(hosts=True)
        assert not streams.moved(state)
        first = draw()
        assert streams.learn(state)
        assert streams.draws_on_host is not name.startswith("torch")
        draw()
        streams.restore(state)
        assert draw() == first


def test_host_streams_are_read_for_each_piece_once_they_have_moved() -> None:
    python = random.Random(0)
    streams = RandomStreams([python], [])
    start = streams.read(hosts=True)
    piece = streams.read()
    assert piece.hosts is None
    drawn, first = python.random(), torch.rand(1).item()
    assert not streams.hosts_moved(piece)
    streams.restore(piece)  # puts back torch's stream alone
    assert torch.rand(1).item() == first
    assert python.random() != drawn
    assert streams.learn(start)
    piece = streams.read()
    assert piece.hosts is not None
    drawn = python.random()
    streams.restore(piece)
    assert python.random() == drawn


def test_numpys_stream_is_read_before_numpy_has_loaded_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # numpy loads it when a step first draws.
    streams = RandomStreams([random.Random(0)], [])
    monkeypatch.delitem(sys.modules, "numpy.random")
    state = streams.read(hosts=True)
    assert not streams.hosts_moved(state)
    sys.modules["numpy.random"].rand()
    assert streams.hosts_moved(state)
    streams.restore(state)
    assert not streams.hosts_moved(state)


@pytest.mark.parametrize(
    ("generator", "name"),
    [
        (42, "int"),
        (None, "NoneType"),
        (np.random.PCG64(), "PCG64"),
        (random.SystemRandom(), "SystemRandom"),
    ],
)
def test_a_generator_without_state_is_refused_by_name(generator: Any, name: str) -> None:
    accepted = [own for _, own, _ in own_streams()]
    assert check_generators(accepted) is None
    assert f"has a {name}," in there(check_generators([*accepted, generator]))


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(()).item(), random.random, np.random.rand],
    ids=["torch", "python", "numpy"],
)
def test_a_step_that_begins_to_draw_is_replayed_with_the_same_numbers(
    draw: Callable[[], float],
) -> None:
    # The end of every call looks for draws. Without it, a failure would need a restart, and thus
    # empty gradients at the start of the call.
    model, batch = mlp(), pairs(8)
    drawn, draws, fail = list[float](), False, FailOn(11)  # the third piece of the third call

    def loss_fn(piece: Any) -> torch.Tensor:
        drawn.append(draw() if draws else 0.0)
        fail()
        return cross_entropy(model)(piece)

    mbs = elastic(model, micro_batch_size=2, min_micro_batch_size=2)
    for call in range(3):
        drawn.clear()
        draws = call > 0
        mbs.backward(loss_fn, batch)
    assert mbs.stats.ooms == 1
    assert drawn[2] == drawn[3]


@pytest.mark.no_oom_injection
def test_a_first_batch_that_draws_can_run_out_twice() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 4)).double()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert (
        elastic(model, micro_batch_size=8).backward(failing(model, FailOn(1, 2)), pairs(8)).ooms
        == 2
    )


@pytest.mark.parametrize(("method", "at"), [("read", 1), ("read", 2), ("moved", 1)])
def test_looking_at_the_random_streams_can_run_out_of_memory_as_well(
    method: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A state of torch's stream takes 5 KiB on the host. Without them a raw error left the call, in
    # one case after the gradient was whole.
    model, batch = mlp(), pairs(8)
    reference = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
    looks, look = 0, getattr(RandomStreams, method)

    def refused(self: RandomStreams, *args: Any, **options: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == at:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 5056 bytes. "
                "Error code 12"
            )
        return look(self, *args, **options)

    monkeypatch.setattr(RandomStreams, method, refused)
    elastic(model, micro_batch_size=4).backward(cross_entropy(model), batch)
    assert off_by(model, reference) <= 1e-12
    assert looks > at
