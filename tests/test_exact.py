"""Promise 1: after the call, `.grad` is the gradient of the whole batch's loss, whatever splits, failures and replays happened."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import MemoryBudget, ReplayUnsafeError, count_tokens
from elastic_mbs.testing import InjectOOM
from stress.exhaustive import builtin, run
from stress.networks import Recompute
from tests.helpers.steps import FailOn, Pair, cross_entropy, elastic, grads, loop, mlp, off_by, pairs, through, whole_gradient

DOORS = [1, 3]
EXACT = 1e-12


# ---------------------------------------------------------------------- splits, counts, limits


@given(
    size=st.integers(1, 20),
    minimum=st.integers(1, 4),
    align=st.integers(1, 4),
    counts=st.lists(st.one_of(st.integers(0, 5), st.sampled_from([0.0, 0.25, 1.5, 3.7])), min_size=1, max_size=17).filter(any),
    door=st.sampled_from(DOORS),
)
@settings(max_examples=60)
def test_every_split_gives_the_whole_batchs_gradient(size: int, minimum: int, align: int, counts: list[float], door: int) -> None:
    model = mlp()
    x, y = pairs(len(counts))
    batch = {"x": x, "y": y, "w": torch.tensor(counts, dtype=torch.float64)}

    def loss(net: nn.Module, b: dict[str, Tensor]) -> Tensor:
        # 0/0 for a piece without counts
        return (functional.cross_entropy(net(b["x"]), b["y"], reduction="none") * b["w"]).sum() / b["w"].sum()

    mbs = elastic(model, micro_batch_size=max(size, minimum), min_micro_batch_size=minimum, align=align, count=lambda b: b["w"])
    result = through(door, mbs, lambda b: loss(model, b), batch)
    assert off_by(model, whole_gradient(model, lambda net: loss(net, batch))) <= EXACT
    assert float(result) == pytest.approx(loss(model, batch).item(), rel=1e-12)
    assert not any(piece in result.partition for piece in result.skipped)


@pytest.mark.no_oom_injection
@given(
    name=st.sampled_from(["mlp", "gpt_tied", "two_losses", "guests", "sparse_embedding", "routed_experts"]),
    at=st.sets(st.integers(1, 120), min_size=1, max_size=3),
    warm=st.booleans(),
    door=st.sampled_from(DOORS),
)
@settings(max_examples=40)
def test_failures_at_any_operations_give_the_whole_batchs_gradient(name: str, at: set[int], warm: bool, door: int) -> None:
    outcome = run(builtin(name), InjectOOM(at=at), warm=warm, door=door)  # which raises where the gradient differs
    assert outcome.error is None or (outcome.error == "MicroBatchFloorError" and outcome.hits == 3)  # 4 → 2 → 1, and once more


@pytest.mark.no_oom_injection
@given(fractions=st.lists(st.floats(0.02, 1.1), min_size=1, max_size=6), door=st.sampled_from(DOORS))
@settings(max_examples=25)
def test_moving_memory_limits_give_the_whole_batchs_gradient(fractions: list[float], door: int) -> None:
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
    batch = {"x": x, "y": y, "words": torch.tensor([0, 0, 0, 0, 4, 1, 0, 2, 9, 3]), "mask": torch.arange(10) % 3 == 0}

    def losses(net: nn.Module, b: dict[str, Tensor]) -> dict[str, Tensor]:
        each = functional.cross_entropy(net(b["x"]), b["y"], reduction="none")
        return {"words": (each * b["words"]).sum() / b["words"].sum(), "masked": each[b["mask"]].square().mean(), "plain": net(b["x"]).pow(2).mean()}

    count = {"words": lambda b: b["words"], "masked": lambda b: b["mask"].long(), "plain": None}
    result = through(door, elastic(model, micro_batch_size=2, count=count), lambda b: losses(model, b), batch)
    assert off_by(model, whole_gradient(model, lambda net: torch.stack(list(losses(net, batch).values())).sum())) <= EXACT
    assert float(result) == pytest.approx(sum(value.item() for value in losses(model, batch).values()), rel=1e-12)


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", DOORS)
def test_a_sum_normalised_by_the_batchs_total_is_exact(door: int) -> None:
    model, batch = mlp(), pairs(11)
    mbs = elastic(model, micro_batch_size=3, reduction="sum", count=lambda b: torch.arange(len(b[0])))

    def loss(net: nn.Module, b: Pair, first: int, total: Any) -> Tensor:
        weights = torch.arange(first, first + len(b[0]), dtype=torch.float64)
        value: Tensor = (functional.cross_entropy(net(b[0]), b[1], reduction="none") * weights).sum() / total
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
def test_a_piece_without_counts_is_skipped_and_leaves_no_nan(reduction: str) -> None:
    model, (x, y) = mlp(), pairs(8)
    labels = y.clone()
    labels[2:6] = -100
    seen: list[int] = []

    def loss_fn(b: Pair) -> Tensor:
        seen.append(len(b[0]))
        return functional.cross_entropy(model(b[0]), b[1], ignore_index=-100, reduction=reduction)

    result = elastic(model, micro_batch_size=2, reduction=reduction, count=count_tokens(1)).backward(loss_fn, (x, labels))
    assert seen == [2, 2]
    assert result.partition == ((0, 2), (6, 8))
    assert result.skipped == ((2, 4), (4, 6))
    whole = whole_gradient(model, lambda net: functional.cross_entropy(net(x), labels, ignore_index=-100, reduction=reduction))
    assert off_by(model, whole) <= EXACT


# ---------------------------------------------------------------------- gradients of every kind


@pytest.mark.parametrize("door", DOORS)
def test_accumulating_half_precision_in_float32_rounds_once(door: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8).bfloat16()
    x = torch.randn(64, 16).bfloat16()

    def loss_fn(b: Tensor) -> Tensor:
        loss: Tensor = model(b).float().square().mean()
        return loss

    exact: list[Tensor] = [torch.zeros(p.shape) for p in model.parameters()]
    for i in range(64):
        (loss_fn(x[i : i + 1]) * (1 / 64)).backward()
        for total, parameter in zip(exact, model.parameters(), strict=True):
            assert parameter.grad is not None
            total.add_(parameter.grad.float())
            parameter.grad = None
    once = [total.bfloat16() for total in exact]
    through(door, elastic(model, micro_batch_size=1, accumulate_dtype=torch.float32), loss_fn, x)
    assert all(torch.equal(p.grad, g) and p.grad.dtype == torch.bfloat16 for p, g in zip(model.parameters(), once, strict=True) if p.grad is not None)
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    through(door, elastic(model, micro_batch_size=1), loss_fn, x)
    assert any(not torch.equal(p.grad, g) for p, g in zip(model.parameters(), once, strict=True) if p.grad is not None), (
        "64 roundings cost nothing here"
    )


@pytest.mark.parametrize("replay", ["auto", "isolate"])
@pytest.mark.parametrize("fails", [0, 10, 16, 20, 24])
@pytest.mark.parametrize("door", DOORS)
def test_a_gradient_that_is_there_is_added_to_as_the_same_object(door: int, fails: int, replay: str) -> None:
    model, batch = mlp(), pairs(8)
    loss_fn = cross_entropy(model)
    mbs = elastic(model, micro_batch_size=4, replay=replay)
    mbs.backward(loss_fn, batch)  # a clean call: what can be replayed is known
    before = [torch.randn_like(p) for p in model.parameters()]
    objects = [g.clone() for g in before]
    for parameter, gradient in zip(model.parameters(), objects, strict=True):
        parameter.grad = gradient
    with InjectOOM(at=[fails]) as inject:
        result = through(door, mbs, loss_fn, batch)
    assert result.ooms == len(inject.hits) == (fails > 0)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), objects, strict=True))
    whole = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    assert off_by(model, [b + w for b, w in zip(before, whole, strict=True) if w is not None]) <= EXACT


def test_what_cannot_be_told_apart_from_an_earlier_gradient_is_refused_not_guessed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    batch = pairs(8)
    mbs = elastic(model, micro_batch_size=4, backward=lambda loss: loss.backward())
    mbs.backward(cross_entropy(model), batch)
    seen = [0]
    for n in range(1, 40, 4):
        before = grads(model)
        with InjectOOM(at=[n]):
            try:
                mbs.backward(cross_entropy(model), batch)
            except ReplayUnsafeError as error:
                seen[0] += 1
                assert "zero_grad()" in "".join(getattr(error, "__notes__", [])) or off_by(model, before) == 0
        model.zero_grad()
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient
    assert seen == [0], "gradients were set aside from the start, because the loss draws random numbers"


@pytest.mark.parametrize("door", DOORS)
def test_parameters_that_no_sample_uses_keep_no_gradient(door: int) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(6, 4), "never": nn.Linear(6, 4), "sometimes": nn.Linear(6, 4)}).double()
    x, y = pairs(8)

    def loss(net: Any, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        out = net["used"](b[0])
        if bool(b[2].any()):
            out = out + net["sometimes"](b[0]) * b[2][:, None]
        return functional.cross_entropy(out, b[1])

    batch = (x, y, torch.tensor([0, 0, 0, 0, 0, 1, 1, 0]))
    wanted = whole_gradient(model, lambda net: loss(net, batch))
    for n in (0, 9, 15, 21, 27, 33, 39, 45):
        model.zero_grad()
        with InjectOOM(at=[n]):
            through(door, elastic(model, micro_batch_size=2), lambda b: loss(model, b), batch)
        assert off_by(model, wanted) <= EXACT
        assert model["never"].weight.grad is None


@pytest.mark.parametrize("door", DOORS)
def test_tied_weights_get_both_contributions_once(door: int) -> None:
    torch.manual_seed(0)
    embed, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, nn.Linear(6, 6), head).double()
    tokens = torch.randint(0, 11, (8, 3))

    def loss(net: nn.Module, b: Tensor) -> Tensor:
        return functional.cross_entropy(net(b)[:, :-1].flatten(0, 1), b[:, 1:].flatten())

    wanted = whole_gradient(model, lambda net: loss(net, tokens))
    for n in range(0, 60, 4):
        model.zero_grad()
        with InjectOOM(at=[n]):
            through(door, elastic(model, micro_batch_size=4), lambda b: loss(model, b), tokens)
        assert off_by(model, wanted) <= EXACT


@pytest.mark.parametrize("door", DOORS)
def test_leaves_outside_the_model_are_replayed_like_parameters(door: int) -> None:
    model, (x, y) = mlp(), pairs(8)
    weight, prompt = torch.full((), 0.3, dtype=torch.float64, requires_grad=True), torch.zeros(6, dtype=torch.float64, requires_grad=True)
    x.requires_grad_()
    leaves = [*model.parameters(), weight, prompt, x]

    def loss_fn(b: Pair) -> Tensor:
        return functional.cross_entropy(model(b[0] + prompt), b[1]) * weight.exp()

    loss_fn((x, y)).backward()
    wanted = grads(leaves)
    for warm in (False, True):
        mbs = elastic(model, micro_batch_size=4)
        for n in range(0, 56, 7):
            for leaf in leaves:
                leaf.grad = None
            with InjectOOM(at=[n]):
                through(door, mbs, loss_fn, (x, y))
            assert off_by(leaves, wanted) <= EXACT
            if not warm:
                mbs.close()
                mbs = elastic(model, micro_batch_size=4)
        mbs.close()


@pytest.mark.parametrize("replay", ["auto", "isolate"])
@pytest.mark.parametrize("door", DOORS)
def test_gradients_that_are_views_of_one_buffer_stay_views_of_it(door: int, replay: str) -> None:
    model, batch = mlp(), pairs(8)
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    mbs = elastic(model, micro_batch_size=4, replay=replay)
    mbs.backward(cross_entropy(model), batch)
    for n in range(0, 34, 3):
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            parameter.grad = part.view_as(parameter)
        with InjectOOM(at=[n]):
            through(door, mbs, cross_entropy(model), batch)
        assert off_by(model, wanted) <= EXACT
        assert torch.equal(flat, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert all(p.grad is not None and p.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for p in model.parameters())


@pytest.mark.parametrize("replay", ["auto", "isolate"])
def test_sparse_gradients_stay_sparse_and_exact(replay: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(12, 4, sparse=True, mode="mean"), nn.Linear(4, 4)).double()
    batch = (torch.randint(0, 12, (8, 5)), torch.randint(0, 4, (8,)))
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    for n in range(0, 40, 3):
        model.zero_grad()
        with InjectOOM(at=[n]):
            elastic(model, micro_batch_size=4, replay=replay).backward(cross_entropy(model), batch)
        gradient = next(model.parameters()).grad
        assert gradient is not None
        assert gradient.is_sparse
        assert off_by(model, wanted) <= EXACT


@pytest.mark.parametrize("door", DOORS)
def test_a_gradient_penalty_is_exact(door: int) -> None:
    """Second derivatives: what the table of door 3 saves has to lead on to the graph that it came from."""
    model, (x, _) = mlp(), pairs(8)

    def loss(net: nn.Module, b: Tensor) -> Tensor:
        b = b.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net(b).pow(2).sum(), b, create_graph=True)
        penalty: Tensor = (slope.norm(dim=1) - 1).pow(2).mean()
        return penalty

    wanted = whole_gradient(model, lambda net: loss(net, x))
    for n in (0, 20, 40, 60):
        model.zero_grad()
        with InjectOOM(at=[n]):
            through(door, elastic(model, micro_batch_size=4), lambda b: loss(model, b), x)
        assert off_by(model, wanted) <= EXACT


@pytest.mark.parametrize("door", DOORS)
def test_a_module_put_in_place_of_another_between_calls_is_found(door: int) -> None:
    batch = pairs(8)
    for n in range(0, 48, 4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
        through(door, mbs, cross_entropy(model), batch)
        model[1], model[2] = nn.BatchNorm1d(8).double(), nn.Linear(8, 4).double()
        fresh = copy.deepcopy(model.state_dict())
        model.zero_grad()
        with InjectOOM(at=[n]):
            result = through(door, mbs, cross_entropy(model), batch)
        mbs.close()
        got, statistics = grads(model), [buffer.clone() for buffer in model.buffers()]
        model.zero_grad()
        model.load_state_dict(fresh)
        for start, stop in result.partition:
            (cross_entropy(model)((batch[0][start:stop], batch[1][start:stop])) * ((stop - start) / 8)).backward()
        assert off_by(model, got) <= EXACT, n
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(model.buffers(), statistics, strict=True)), n


def test_recomputation_switched_on_between_two_calls_stays_exact() -> None:
    """The same number of commits as before, but some of them come from leaves that the graph does not show."""
    torch.manual_seed(0)
    stem, block, head = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 4)
    model = nn.Sequential(stem, block, head).double()
    batch = pairs(8)
    recompute = [False]

    def loss_fn(b: Pair) -> Tensor:
        h = stem(b[0])
        h = Recompute.apply(block, h) if recompute[0] else block(h)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return functional.cross_entropy(head(h), b[1])

    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    for n in range(1, 46):
        mbs = elastic(model, micro_batch_size=4)
        recompute[0] = False
        mbs.backward(loss_fn, batch)
        model.zero_grad()
        recompute[0] = True
        try:
            with InjectOOM(at=[n]):
                mbs.backward(loss_fn, batch)
        except ReplayUnsafeError:
            assert all(p.grad is None for p in model.parameters())
        else:
            assert off_by(model, wanted) <= EXACT, n
        mbs.close()
        model.zero_grad()


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
    """Accumulate, unscale, clip, step, update: with overflows that make the scaler skip a step, and failures."""
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
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
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
    assert off_by(model, got) <= 1e-6  # float32: a piece that had half committed is split on, so the order of the sums may differ


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
