"""A ghost BatchNorm is BatchNorm over fixed groups, whatever the split."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, Policy, UsageError
from elastic_mbs.recipes import (
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    convert_ghost_batchnorm,
)
from tests.helpers.steps import elastic, grads, off_by

KINDS = [
    (nn.BatchNorm1d, GhostBatchNorm1d, (3,)),
    (nn.BatchNorm2d, GhostBatchNorm2d, (2, 3)),
    (nn.BatchNorm3d, GhostBatchNorm3d, (2, 1, 3)),
]


def close(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def same_buffers(a: nn.Module, b: nn.Module) -> bool:
    return all(close(x.double(), y.double()) for x, y in zip(a.buffers(), b.buffers(), strict=True))


@pytest.mark.parametrize(("plain", "ghost", "shape"), KINDS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_each_group_is_normalised_as_batchnorm_does_in_turn(
    plain: Any, ghost: Any, shape: tuple[int, ...], momentum: float | None
) -> None:
    torch.manual_seed(0)
    x = torch.randn(11, 4, *shape, dtype=torch.float64)
    one, other = ghost(4, 4, momentum=momentum).double(), plain(4, momentum=momentum).double()
    assert close(one(x), torch.cat([other(x[:4]), other(x[4:8]), other(x[8:])]))
    assert same_buffers(one, other)
    assert int(one.num_batches_tracked) == 3
    assert close(one.eval()(x), other.eval()(x))
    other.load_state_dict(one.state_dict())


def test_without_running_statistics_an_evaluation_has_groups_too() -> None:
    x = torch.randn(8, 3, dtype=torch.float64)
    ghost = GhostBatchNorm1d(3, 4, track_running_stats=False).double().eval()
    assert close(ghost(x), torch.cat([ghost(x[:4]), ghost(x[4:])]))


def net() -> nn.Module:
    torch.manual_seed(3)
    layers = [
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, bias=False),
        nn.BatchNorm2d(3),
    ]
    return nn.Sequential(
        *layers, nn.Tanh(), nn.Flatten(), nn.Linear(12, 2, bias=False), nn.BatchNorm1d(2)
    ).double()


@given(samples=st.integers(1, 20), group=st.integers(2, 6), pieces=st.integers(1, 4))
def test_gradients_and_buffers_are_those_of_the_whole_batch_for_every_split(
    samples: int, group: int, pieces: int
) -> None:
    samples += samples % group == 1  # the last BatchNorm has one value for a sample
    x, wanted = (
        torch.randn(samples, 2, 4, 4, dtype=torch.float64),
        torch.randn(samples, 2, dtype=torch.float64),
    )
    model = convert_ghost_batchnorm(net(), group)
    twin = copy.deepcopy(model)
    (twin(x) - wanted).square().mean().backward()
    result = elastic(model, micro_batch_size=pieces * group).backward(
        lambda b: (model(b[0]) - b[1]).square().mean(), (x, wanted)
    )
    assert len(result.partition) >= samples // (pieces * group)
    assert off_by(model, grads(twin)) <= 1e-12
    assert same_buffers(model, twin)


def test_conversion_keeps_parameters_statistics_mode_and_hooks_and_finds_every_place() -> None:
    shared = nn.BatchNorm1d(3)
    frozen = nn.BatchNorm2d(3).eval()
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Identity()), "c": frozen})
    seen: list[int] = []
    shared.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    parameters, state = list(model.parameters()), model.state_dict()
    assert convert_ghost_batchnorm(model, 4) is model
    assert model["a"] is model["b"][0]  # type: ignore[index]  # a Sequential
    assert [type(model["a"]), type(model["c"])] == [GhostBatchNorm1d, GhostBatchNorm2d]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.state_dict().keys() == state.keys()
    model["a"](torch.randn(8, 3))
    assert seen == [8]
    assert (model["a"].training, model["c"].training) == (True, False)
    assert convert_ghost_batchnorm(model, 8)["a"].batch_group == 8  # type: ignore[index]  # it is the same
    alone = convert_ghost_batchnorm(nn.BatchNorm3d(2), 2)
    assert isinstance(alone, GhostBatchNorm3d)
    assert "group=2" in repr(alone)


LAZY: Any = nn.LazyBatchNorm1d


class Own(nn.BatchNorm1d):
    """One of the user's."""


@pytest.mark.parametrize(
    ("module", "named"),
    [(nn.SyncBatchNorm(2), "1 is a SyncBatchNorm"), (LAZY(), "Lazy"), (Own(2), "1 is a Own")],
)
def test_a_batchnorm_without_a_ghost_is_refused_by_name_before_anything_is_changed(
    module: nn.Module, named: str
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), module)
    with pytest.raises(UsageError, match=named):
        convert_ghost_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize("group", [0, -1, 2.0, True, "8"])
def test_a_group_that_is_no_number_of_samples_is_refused(group: Any) -> None:
    for make in (GhostBatchNorm1d, lambda _, size: convert_ghost_batchnorm(nn.Identity(), size)):
        with pytest.raises(UsageError, match=f"group={group!r}"):
            make(2, group)


def test_a_last_group_of_one_value_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"9 rows leave one for the last group of 4.*drop_last"):
        GhostBatchNorm1d(2, 4)(torch.zeros(9, 2))
    assert GhostBatchNorm2d(2, 4)(torch.randn(9, 2, 2, 2)).shape == (9, 2, 2, 2)


# ---------------------------------------------------------------------- with the runtime


def ghosts(*groups: int) -> nn.Module:
    return nn.Sequential(*(GhostBatchNorm1d(2, group) for group in groups))


@pytest.mark.parametrize(
    ("groups", "align", "expected"), [((4,), 1, 4), ((4, 6), 1, 12), ((4,), 6, 12), ((), 3, 3)]
)
def test_sizes_are_multiples_of_every_group_and_of_align(
    groups: tuple[int, ...], align: int, expected: int
) -> None:
    model = ghosts(*groups).append(nn.Linear(2, 1))  # type: ignore[operator]
    limits = ElasticMBS(model, policy=Policy(align=align))._resources.settings.limits
    assert (limits.align, limits.minimum) == (expected, 1)


@pytest.mark.parametrize(
    "options", [{"micro_batch_size": 6}, {"policy": Policy(max_micro_batch_size=10)}]
)
def test_a_size_that_would_take_groups_apart_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=r"micro_batch_size=(6|10) is no multiple of 4: .*GhostBatchNorm"
    ):
        ElasticMBS(ghosts(4), **options)


def test_a_model_that_is_converted_too_late_is_refused_in_every_call() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    mbs = elastic(model)
    convert_ghost_batchnorm(model, 4)
    for _ in range(2):
        with pytest.raises(
            UsageError,
            match="groups of 4 samples came into the model after its ElasticMBS was made",
        ):
            mbs.backward(lambda b: model(b).mean(), torch.randn(8, 2, dtype=torch.float64))
    elastic(model).backward(lambda b: model(b).mean(), torch.randn(8, 2, dtype=torch.float64))


def test_verify_says_what_makes_batchnorm_exact_and_nothing_once_it_is() -> None:
    model, batch = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.randn(8, 2)
    assert "convert_ghost_batchnorm" in str(
        elastic(model).verify(lambda b: model(b).square().mean(), batch)
    )
    convert_ghost_batchnorm(model, 2)
    assert elastic(model).verify(lambda b: model(b).square().mean(), batch).findings == ()


def test_it_compiles() -> None:
    model = convert_ghost_batchnorm(net(), 4)
    twin = copy.deepcopy(model)
    x = torch.randn(8, 2, 4, 4, dtype=torch.float64)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert close(compiled(x), twin(x))
    assert same_buffers(model, twin)
