"""Promise 1: after the call, `.grad` is the gradient of the whole batch's loss.

Splits, failures and replays do not change it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import MemoryBudget, count_tokens
from elastic_mbs.testing import InjectOOM
from stress.exhaustive import Operations, builtin, run
from tests.helpers.steps import (
    FailOn,
    Pair,
    cross_entropy,
    elastic,
    grads,
    loop,
    mlp,
    off_by,
    pairs,
    through,
    whole_gradient,
)

pytestmark = pytest.mark.injectable

DOORS = [1, 3]
EXACT = 1e-12

# ---------------------------------------------------------------------- splits, counts, limits


@given(
    size=st.integers(1, 20),
    minimum=st.integers(1, 4),
    align=st.integers(1, 4),
    counts=st.lists(
        st.one_of(st.integers(0, 5), st.sampled_from([0.0, 0.25, 1.5, 3.7])),
        min_size=1,
        max_size=17,
    ).filter(any),
    door=st.sampled_from(DOORS),
)
@settings(max_examples=60)
def test_every_split_gives_the_whole_batchs_gradient(
    size: int, minimum: int, align: int, counts: list[float], door: int
) -> None:
    model = mlp()
    x, y = pairs(len(counts))
    batch = {"x": x, "y": y, "w": torch.tensor(counts, dtype=torch.float64)}

    def loss(net: nn.Module, b: dict[str, Tensor]) -> Tensor:
        # a piece without counts gives 0/0
        return (functional.cross_entropy(net(b["x"]), b["y"], reduction="none") * b["w"]).sum() / b[
            "w"
        ].sum()

    mbs = elastic(
        model,
        micro_batch_size=max(size, minimum),
        min_micro_batch_size=minimum,
        align=align,
        count=lambda b: b["w"],
    )
    result = through(door, mbs, lambda b: loss(model, b), batch)
    assert off_by(model, whole_gradient(model, lambda net: loss(net, batch))) <= EXACT
    assert float(result) == pytest.approx(loss(model, batch).item(), rel=1e-12)
    assert sum(stop - start for start, stop in result.partition) == len(counts)


@pytest.mark.no_oom_injection
@given(
    name=st.sampled_from(
        ["mlp", "gpt_tied", "two_losses", "guests", "sparse_embedding", "routed_experts"]
    ),
    at=st.sets(st.integers(1, 120), min_size=1, max_size=3),
    warm=st.booleans(),
    door=st.sampled_from(DOORS),
)
@settings(max_examples=40)
def test_failures_at_any_operations_give_the_whole_batchs_gradient(
    name: str, at: set[int], warm: bool, door: int
) -> None:
    first, *others = sorted(at)
    faults = Operations(first, tuple(n - first for n in others))
    outcome = run(builtin(name), faults, warm=warm, call="backward" if door == 1 else "loop")
    assert not outcome.found, outcome
    # sizes 4 → 2 → 1, and one more attempt
    assert outcome.error is None or (
        outcome.error == "MicroBatchFloorError" and len(outcome.hits) == 3
    )


@pytest.mark.no_oom_injection
@given(
    fractions=st.lists(st.floats(0.02, 1.1), min_size=1, max_size=6), door=st.sampled_from(DOORS)
)
@settings(max_examples=25)
def test_moving_memory_limits_give_the_whole_batchs_gradient(
    fractions: list[float], door: int
) -> None:
    model, batch = mlp(width=64), pairs(32)
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    loss_fn = cross_entropy(model)

    def peak(size: int) -> int:
        with MemoryBudget("1GiB", track=(model, batch)) as unlimited:
            elastic(model, micro_batch_size=size, sensor=unlimited).backward(loss_fn, batch)
            model.zero_grad()
            return unlimited.peak

    least, most = peak(1), peak(32)
    limits = [int(least * 1.1 + fraction * (most - least)) for fraction in fractions]
    with MemoryBudget("1GiB", track=(model, batch)) as budget:
        step = iter(range(10_000))

        def moving(piece: Pair) -> Tensor:
            budget.limit = limits[next(step) % len(limits)]
            loss: Tensor = loss_fn(piece)
            return loss

        result = through(door, elastic(model, micro_batch_size=32, sensor=budget), moving, batch)
        assert result.ooms == budget.ooms
        if limits[0] < most * 0.9:
            assert result.ooms > 0
    assert off_by(model, wanted) <= EXACT


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_token_counts_weigh_labels_and_not_samples(door: int, shift: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()
    tokens = torch.randint(0, 11, (9, 5))
    labels = tokens.clone()
    for row, keep in enumerate((5, 1, 2, 4, 3, 0, 2, 5, 1)):
        labels[row, keep:] = -100

    def loss(net: nn.Module, b: dict[str, Tensor]) -> Tensor:
        logits, wanted = net(b["input_ids"]), b["labels"]
        if shift:
            logits, wanted = logits[:, :-1], wanted[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)

    batch = {"input_ids": tokens, "labels": labels}
    wanted = whole_gradient(model, lambda net: loss(net, batch))
    counted = elastic(model, micro_batch_size=2, count=count_tokens("labels", shift=shift))
    through(door, counted, lambda b: loss(model, b), batch)
    assert off_by(model, wanted) <= EXACT
    counted.close()
    model.zero_grad()
    elastic(model, micro_batch_size=5).backward(lambda b: loss(model, b), batch)
    assert off_by(model, wanted) > 1e-3, "samples of unequal length would not need a count then"


@pytest.mark.parametrize("door", DOORS)
def test_each_of_several_losses_is_weighed_by_its_own_count(door: int) -> None:
    model, (x, y) = mlp(), pairs(10)
    batch = {
        "x": x,
        "y": y,
        "words": torch.tensor([0, 0, 0, 0, 4, 1, 0, 2, 9, 3]),
        "mask": torch.arange(10) % 3 == 0,
    }

    def losses(net: nn.Module, b: dict[str, Tensor]) -> dict[str, Tensor]:
        each = functional.cross_entropy(net(b["x"]), b["y"], reduction="none")
        return {
            "words": (each * b["words"]).sum() / b["words"].sum(),
            "masked": each[b["mask"]].square().mean(),
            "plain": net(b["x"]).pow(2).mean(),
        }

    count = {"words": lambda b: b["words"], "masked": lambda b: b["mask"].long(), "plain": None}
    result = through(
        door, elastic(model, micro_batch_size=2, count=count), lambda b: losses(model, b), batch
    )
    assert (
        off_by(
            model,
            whole_gradient(model, lambda net: torch.stack(list(losses(net, batch).values())).sum()),
        )
        <= EXACT
    )
    assert float(result) == pytest.approx(
        sum(value.item() for value in losses(model, batch).values()), rel=1e-12
    )


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", DOORS)
def test_a_sum_normalised_by_the_batchs_total_is_exact(door: int) -> None:
    model, batch = mlp(), pairs(11)
    mbs = elastic(
        model, micro_batch_size=3, reduction="sum", count=lambda b: torch.arange(len(b[0]))
    )

    def loss(net: nn.Module, b: Pair, first: int, total: Any) -> Tensor:
        weights = torch.arange(first, first + len(b[0]), dtype=torch.float64)
        value: Tensor = (
            functional.cross_entropy(net(b[0]), b[1], reduction="none") * weights
        ).sum() / total
        return value

    if door == 1:
        started = iter([0, 3, 6, 9])  # 11 samples in pieces of 3, 3, 3, 2
        mbs.backward(lambda b: loss(model, b, next(started), mbs.total), batch)
    else:
        for micro in mbs.micro_batches(batch):
            with micro:
                micro.backward(loss(model, micro.data, micro.start, micro.total))
    assert off_by(model, whole_gradient(model, lambda net: loss(net, batch, 0, 55))) <= EXACT


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_piece_without_counts_is_run_and_leaves_no_nan(reduction: str) -> None:
    model, (x, y) = mlp(), pairs(8)
    labels = y.clone()
    labels[2:6] = -100
    seen: list[int] = []

    def loss_fn(b: Pair) -> Tensor:
        seen.append(len(b[0]))
        return functional.cross_entropy(model(b[0]), b[1], ignore_index=-100, reduction=reduction)

    result = elastic(
        model, micro_batch_size=2, reduction=reduction, count=count_tokens(1)
    ).backward(loss_fn, (x, labels))
    assert seen == [2, 2, 2, 2]
    assert result.partition == ((0, 2), (2, 4), (4, 6), (6, 8))
    whole = whole_gradient(
        model,
        lambda net: functional.cross_entropy(
            net(x), labels, ignore_index=-100, reduction=reduction
        ),
    )
    assert off_by(model, whole) <= EXACT


# ---------------------------------------------------------------------- next to the optimizer


def test_clipping_after_the_call_sees_the_whole_gradient() -> None:
    model, batch = mlp(), pairs(8)
    twin = copy.deepcopy(model)
    with InjectOOM(at=[14]):
        elastic(model, micro_batch_size=4).backward(cross_entropy(model), batch)
    cross_entropy(twin)(batch).backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item() == pytest.approx(
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1).item(), rel=1e-12
    )
    assert off_by(model, grads(twin)) <= EXACT


@pytest.mark.parametrize("door", DOORS)
def test_the_gradscaler_loop_equals_the_plain_one(door: int) -> None:
    # One batch overflows, so the scaler skips its step. Every other batch meets a failure.
    model = mlp()
    twin = copy.deepcopy(model)
    batches = [pairs(8, seed) for seed in range(6)]
    batches[3][0][2, 1] = float("inf")

    def train(net: nn.Module, faults: bool) -> tuple[list[float], dict[str, Any]]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        mbs = elastic(net, micro_batch_size=8, scaler=scaler)
        losses = []
        for i, batch in enumerate(batches):
            if faults:
                with InjectOOM(at=[8 + 6 * i] if i % 2 else []):
                    losses.append(float(through(door, mbs, cross_entropy(net), batch)))
            else:
                loss = cross_entropy(net)(batch)
                losses.append(loss.item())
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert mbs.stats.ooms == (3 if faults else 0)
        return losses, scaler.state_dict()

    losses, state = train(model, faults=True)
    plain_losses, plain_state = train(twin, faults=False)
    assert state == plain_state
    assert losses == pytest.approx(plain_losses, rel=1e-12, nan_ok=True)
    assert all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-14)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("n", [0, 6, 18, 30])
def test_autocast_equals_a_plain_accumulation_of_the_same_pieces(n: int) -> None:
    model, (x, y) = mlp().float(), pairs(8)
    batch = (x.float(), y)

    def loss_fn(b: Pair) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.cross_entropy(model(b[0]), b[1])

    with InjectOOM(at=[n]):
        result = elastic(model, micro_batch_size=4).backward(loss_fn, batch)
    got = grads(model)
    model.zero_grad()
    for start, stop in result.partition:
        (loss_fn((batch[0][start:stop], y[start:stop])) * ((stop - start) / 8)).backward()
    assert off_by(model, got) == 0


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("size", [1, 8, 32])
def test_under_autocast_pieces_are_as_near_to_float32_as_the_whole_batch(size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    batch = torch.randn(64, 32), torch.randint(64, (64,))

    def rounded(b: Pair) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(model)(b)

    def flat(found: Any) -> Tensor:
        return torch.cat([each.flatten() for each in found])

    leaves = list(model.parameters())
    exact = flat(torch.autograd.grad(cross_entropy(model)(batch), leaves))
    whole = flat(torch.autograd.grad(rounded(batch), leaves))
    elastic(model, micro_batch_size=size).backward(rounded, batch)
    pieces = flat(grads(model))
    assert (pieces - exact).norm() < 1.2 * (whole - exact).norm()
    assert (pieces - whole).norm() < 5e-3 * exact.norm()
    assert 1e-3 * exact.norm() < (whole - exact).norm() < 1e-2 * exact.norm()  # it does round


@pytest.mark.no_oom_injection
def test_a_trainers_own_backward_is_called_once_per_piece_and_stays_exact() -> None:
    model, batch = mlp(), pairs(8)
    calls: list[float] = []

    def backward(loss: Tensor) -> None:
        calls.append(loss.item())
        loss.backward()

    mbs = elastic(model, micro_batch_size=2, backward=backward)
    result = mbs.backward(cross_entropy(model), batch)
    assert len(calls) == 4
    assert sum(calls) == pytest.approx(float(result), rel=1e-12)
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    assert off_by(model, wanted) <= EXACT
    for n in range(1, 60, 5):
        model.zero_grad()
        with InjectOOM(at=[n]):
            mbs.backward(cross_entropy(model), batch)
        assert off_by(model, wanted) <= EXACT


@pytest.mark.no_oom_injection
def test_the_loss_reported_is_the_whole_batchs_unscaled_and_detached() -> None:
    model, batch = mlp(), pairs(9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    fails = FailOn(2)

    def loss_fn(b: Pair) -> Tensor:
        fails()
        loss: Tensor = cross_entropy(model)(b)
        return loss

    result = loop(elastic(model, micro_batch_size=4, scaler=scaler), loss_fn, batch)
    assert result.ooms == 1
    assert not result.loss.requires_grad
    assert float(result) == pytest.approx(cross_entropy(model)(batch).item(), rel=1e-12)
