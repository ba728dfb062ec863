"""The gradient noise scale follows from the pieces' own gradients, without bias.

Failures leave no trace in it. It costs nothing where it is not asked for.
"""

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import GradientOptions, NoiseScale, UsageError, count_tokens
from elastic_mbs.noise_scale import Smoothed, estimate
from tests.helpers.steps import (
    cross_entropy,
    elastic,
    mlp,
    off_by,
    pairs,
    there,
    through,
    whole_gradient,
)
from tests.helpers.strikes import every_operation

# ---------------------------------------------------------------------- one batch


@pytest.mark.parametrize("lengths", [(1, 2), (1, 1, 1), (2, 1)])
def test_the_mean_over_every_batch_that_can_be_drawn_is_the_truth(lengths: Sequence[int]) -> None:
    """The estimate has no bias, also with pieces of unequal length.

    The mean is over all 64 batches of three samples that can be drawn from four values.
    """
    values = torch.tensor([[1.0, 2.0], [-3.0, 0.5], [0.25, 4.0], [2.0, -1.0]], dtype=torch.float64)
    found = []
    for batch in itertools.product(range(4), repeat=3):
        parts = [part.sum(0) / 3 for part in values[list(batch)].split(list(lengths))]
        found.append(
            estimate(
                [(n, float(part.square().sum())) for n, part in zip(lengths, parts, strict=True)],
                float(sum(parts).square().sum()),
            )
        )
    trace, squared_norm = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
    assert trace == pytest.approx(values.var(0, correction=0).sum().item(), rel=1e-12)
    assert squared_norm == pytest.approx(values.mean(0).square().sum().item(), rel=1e-12)


# ---------------------------------------------------------------------- averaged over calls


def averaged(estimates: Sequence[tuple[float, float]], calls: int) -> NoiseScale:
    smoothed = Smoothed(calls)
    for each in estimates:
        smoothed.add(*each)
    return there(smoothed.latest)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=12),
    st.integers(1, 20),
)
def test_numerator_and_denominator_are_averaged_apart_and_decay(
    estimates: list[tuple[float, float]], calls: int
) -> None:
    keep = 1 - 1 / calls
    weights = [keep ** (len(estimates) - 1 - i) for i in range(len(estimates))]
    trace, squared_norm = (
        sum(w * each[k] for w, each in zip(weights, estimates, strict=True)) / sum(weights)
        for k in (0, 1)
    )
    found = averaged(estimates, calls)
    assert [found.trace, found.squared_norm] == pytest.approx([trace, squared_norm], rel=1e-12)
    assert found.value == pytest.approx(trace / squared_norm, rel=1e-12)
    assert found.calls == len(estimates)


def test_the_error_is_that_of_a_quotient_of_means() -> None:
    """95 % of runs should be within two standard errors of the truth.

    There are two hundred runs of forty estimates each.
    """
    draw = random.Random(0)
    runs = [
        averaged([(draw.gauss(20, 4), draw.gauss(2, 0.3)) for _ in range(40)], 10**9)
        for _ in range(200)
    ]
    assert 180 <= sum(abs(run.value - 10) <= 2 * run.error for run in runs) <= 199
    assert averaged([(20.0, 2.0)] * 5, 10).error == pytest.approx(0, abs=1e-6)


def test_unknown_figures_are_infinite_and_overflows_are_left_out() -> None:
    assert averaged([(20.0, 2.0)], 10).error == math.inf
    noisy = averaged([(20.0, -1.0), (21.0, 0.5)], 10)
    assert (noisy.value, noisy.error) == (math.inf, math.inf)
    assert averaged([(20.0, 2.0), (math.inf, math.nan)], 10) == averaged([(20.0, 2.0)], 10)
    assert averaged([(1.0, 1.0), (8.0, 2.0)], 1).value == 4.0


# ---------------------------------------------------------------------- a call


def by_hand(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int, int], Tensor],
    partition: Sequence[tuple[int, int]],
) -> tuple[float, float]:
    """Return the estimate from the contributions of the pieces, each computed by itself."""

    def contribution(piece: tuple[int, int]) -> Tensor:
        gradients = whole_gradient(model, lambda net: loss_of(net, *piece))
        return torch.cat([there(gradient).flatten() for gradient in gradients])

    parts = [contribution(piece) for piece in partition]
    norms = [
        (stop - start, float(part.double().square().sum()))
        for (start, stop), part in zip(partition, parts, strict=True)
    ]
    return estimate(norms, float(torch.stack(parts).double().sum(0).square().sum()))


def check(found: NoiseScale | None, wanted: tuple[float, float], rel: float = 1e-10) -> None:
    assert found is not None
    assert [found.trace, found.squared_norm] == pytest.approx(wanted, rel=rel)


@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}, {"backward": Tensor.backward}],
)
def test_a_call_estimates_the_scale_from_unequal_pieces(door: int, options: dict[str, Any]) -> None:
    model, (x, y) = mlp(), pairs(11)
    result = through(
        door,
        elastic(model, micro_batch_size=3, noise_scale=10, **options),
        cross_entropy(model),
        (x, y),
    )
    assert len({stop - start for start, stop in result.partition}) == 2
    model.zero_grad()
    wanted = by_hand(
        model,
        lambda net, a, b: functional.cross_entropy(net(x[a:b]), y[a:b]) * (b - a) / 11,
        result.partition,
    )
    check(result.noise_scale, wanted)
    assert there(result.noise_scale).calls == 1


def test_pieces_that_count_nothing_are_pieces_all_the_same() -> None:
    model, (x, y) = mlp(), pairs(9)
    y[3:6] = -100
    result = elastic(model, micro_batch_size=3, noise_scale=10, count=count_tokens(1)).backward(
        cross_entropy(model), (x, y)
    )
    assert result.partition == ((0, 3), (3, 6), (6, 9))
    model.zero_grad()
    wanted = by_hand(
        model,
        lambda net, a, b: functional.cross_entropy(net(x[a:b]), y[a:b], reduction="sum") / 6,
        ((0, 3), (3, 6), (6, 9)),
    )
    check(result.noise_scale, wanted)


def test_half_precision_and_sparse_gradients_are_measured_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2))
    batch = torch.randint(0, 5, (8, 3))
    result = elastic(model, micro_batch_size=4, noise_scale=10).backward(
        lambda b: model(b).square().mean(), batch
    )
    dense = copy.deepcopy(model)
    dense[0].sparse = False  # type: ignore[assignment]  # an Embedding
    model.zero_grad()
    wanted = by_hand(
        dense, lambda net, a, b: net(batch[a:b]).square().mean() * (b - a) / 8, result.partition
    )
    check(result.noise_scale, wanted, rel=1e-4)
    half, x = nn.Linear(4, 2, bias=False).bfloat16(), torch.randn(8, 4).bfloat16()
    result = elastic(
        half, micro_batch_size=2, noise_scale=10, accumulate_dtype=torch.float32
    ).backward(lambda b: half(b).square().mean(), x)
    half.zero_grad()
    wanted = by_hand(
        half, lambda net, a, b: net(x[a:b]).square().mean() * (b - a) / 8, result.partition
    )
    check(result.noise_scale, wanted, rel=0.05)


@pytest.mark.parametrize("door", [1, 3])
def test_a_failure_at_any_operation_leaves_no_trace_in_the_scale(door: int) -> None:
    model, (x, y) = mlp(), pairs(8)
    whole = whole_gradient(model, lambda net: cross_entropy(net)((x, y)))
    for strike in every_operation(stride=3):
        model.zero_grad()
        with strike:
            result = through(
                door,
                elastic(model, micro_batch_size=4, noise_scale=10),
                cross_entropy(model),
                (x, y),
            )
        assert off_by(model, whole) <= 1e-12
        model.zero_grad()
        check(
            result.noise_scale,
            by_hand(
                model,
                lambda net, a, b: functional.cross_entropy(net(x[a:b]), y[a:b]) * (b - a) / 8,
                result.partition,
            ),
        )


def test_a_call_of_one_piece_and_one_that_finds_gradients_add_nothing() -> None:
    model, batch = mlp(), pairs(8)
    mbs = elastic(model, noise_scale=10)
    assert mbs.backward(cross_entropy(model), batch).noise_scale is None
    model.zero_grad()
    mbs = elastic(model, micro_batch_size=4, noise_scale=10)
    first = there(mbs.backward(cross_entropy(model), batch).noise_scale)
    again = there(mbs.backward(cross_entropy(model), batch).noise_scale)
    assert (first.calls, again) == (1, first)
    model.zero_grad()
    assert there(mbs.backward(cross_entropy(model), batch).noise_scale).calls == 2
    assert mbs.evaluate(lambda b: model(b[0]), batch).shape == (8, 4)


def test_a_call_that_ends_by_an_error_adds_nothing() -> None:
    model, batch = mlp(), pairs(8)
    mbs = elastic(model, micro_batch_size=4, noise_scale=10)
    mbs.backward(cross_entropy(model), batch)
    model.zero_grad()
    with pytest.raises(KeyError):
        for micro in mbs.micro_batches(batch):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
                if micro.start:
                    raise KeyError
    assert there(mbs.backward(cross_entropy(model), batch).noise_scale).calls == 2


def test_an_unwanted_noise_scale_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("elastic_mbs.engine.gradients.squared_norm", never)
    monkeypatch.setattr("elastic_mbs.engine.gradients.Isolation", never)
    model = mlp()
    result = elastic(model, micro_batch_size=4).backward(cross_entropy(model), pairs(8))
    assert result.noise_scale is None


@pytest.mark.parametrize("calls", [0, -1, 2.5, True, "50"])
def test_a_number_of_calls_that_makes_no_sense_is_refused(calls: Any) -> None:
    with pytest.raises(UsageError, match=f"noise_scale={calls!r}"):
        GradientOptions(noise_scale=calls)


def test_pieces_of_sorted_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="pieces='by_length' sorts them"):
        elastic(mlp(), noise_scale=10, pieces="by_length", length="mask")
