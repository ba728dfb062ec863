"""Promise 1 for gradients of every kind: in half precision, sparse, views, of tied weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ReplayUnsafeError
from elastic_mbs.testing import InjectOOM
from stress.models.layers import Recompute
from tests.helpers.steps import (
    Pair,
    cross_entropy,
    elastic,
    grads,
    mlp,
    off_by,
    pairs,
    through,
    whole_gradient,
)

pytestmark = pytest.mark.injectable

DOORS = [1, 3]
EXACT = 1e-12


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
    assert all(
        torch.equal(p.grad, g) and p.grad.dtype == torch.bfloat16
        for p, g in zip(model.parameters(), once, strict=True)
        if p.grad is not None
    )
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    through(door, elastic(model, micro_batch_size=1), loss_fn, x)
    assert any(
        not torch.equal(p.grad, g)
        for p, g in zip(model.parameters(), once, strict=True)
        if p.grad is not None
    ), "64 roundings cost nothing here"


@pytest.mark.parametrize("replay", ["auto", "isolate"])
@pytest.mark.parametrize("fails", [0, 10, 16, 20, 24])
@pytest.mark.parametrize("door", DOORS)
def test_an_earlier_gradient_is_added_to_as_the_same_object(
    door: int, fails: int, replay: str
) -> None:
    model, batch = mlp(), pairs(8)
    loss_fn = cross_entropy(model)
    mbs = elastic(model, micro_batch_size=4, replay=replay)
    mbs.backward(loss_fn, batch)  # after a clean call the engine knows the step
    before = [torch.randn_like(p) for p in model.parameters()]
    objects = [g.clone() for g in before]
    for parameter, gradient in zip(model.parameters(), objects, strict=True):
        parameter.grad = gradient
    with InjectOOM(at=[fails]) as inject:
        result = through(door, mbs, loss_fn, batch)
    assert result.ooms == len(inject.hits) == (fails > 0)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), objects, strict=True))
    whole = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    assert (
        off_by(model, [b + w for b, w in zip(before, whole, strict=True) if w is not None]) <= EXACT
    )


def test_gradients_are_set_aside_where_the_loss_draws_random_numbers() -> None:
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
                assert (
                    "zero_grad()" in "".join(getattr(error, "__notes__", []))
                    or off_by(model, before) == 0
                )
        model.zero_grad()
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient
    assert seen == [0], (
        "gradients were set aside from the start, because the loss draws random numbers"
    )


@pytest.mark.parametrize("door", DOORS)
def test_parameters_that_no_sample_uses_keep_no_gradient(door: int) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"used": nn.Linear(6, 4), "never": nn.Linear(6, 4), "sometimes": nn.Linear(6, 4)}
    ).double()
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
    weight, prompt = (
        torch.full((), 0.3, dtype=torch.float64, requires_grad=True),
        torch.zeros(6, dtype=torch.float64, requires_grad=True),
    )
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


def test_functions_with_the_same_decorator_are_told_apart() -> None:
    # The leaves of one say nothing about the leaves of the other.
    model, (x, _) = mlp(), pairs(8)
    scale = torch.full((4,), 0.3, dtype=torch.float64, requires_grad=True)
    # Autocast leaves float64 alone.
    autocast = torch.autocast("cpu", torch.bfloat16)
    leaves = [*model.parameters(), scale]
    first, second = (
        autocast(lambda x: model(x).square().mean()),
        autocast(lambda x: (model(x) * scale).square().mean()),
    )
    second(x).backward()
    wanted = grads(leaves)
    for n in range(0, 28, 2):
        mbs = elastic(model)
        mbs.backward(first, x)
        for leaf in leaves:
            leaf.grad = None
        with InjectOOM(at=[n]):
            mbs.backward(second, x)
        assert off_by(leaves, wanted) <= EXACT


@pytest.mark.parametrize("replay", ["auto", "isolate"])
@pytest.mark.parametrize("door", DOORS)
def test_gradients_that_are_views_of_one_buffer_stay_views_of_it(door: int, replay: str) -> None:
    model, batch = mlp(), pairs(8)
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    mbs = elastic(model, micro_batch_size=4, replay=replay)
    mbs.backward(cross_entropy(model), batch)
    for n in range(0, 34, 3):
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        for parameter, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        with InjectOOM(at=[n]):
            through(door, mbs, cross_entropy(model), batch)
        assert off_by(model, wanted) <= EXACT
        assert torch.equal(
            flat, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
        assert all(
            p.grad is not None
            and p.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            for p in model.parameters()
        )


@pytest.mark.parametrize("replay", ["auto", "isolate"])
def test_sparse_gradients_stay_sparse_and_exact(replay: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.EmbeddingBag(12, 4, sparse=True, mode="mean"), nn.Linear(4, 4)
    ).double()
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
    # Second derivatives need the graph behind a saved tensor, also where a table holds the tensor.
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
            (
                cross_entropy(model)((batch[0][start:stop], batch[1][start:stop]))
                * ((stop - start) / 8)
            ).backward()
        assert off_by(model, got) <= EXACT, n
        assert all(
            torch.allclose(a, b, rtol=1e-12)
            for a, b in zip(model.buffers(), statistics, strict=True)
        ), n


def test_recomputation_switched_on_between_two_calls_stays_exact() -> None:
    # The number of commits stays, but some come from leaves that the graph does not show.
    torch.manual_seed(0)
    stem, block, head = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 4)
    model = nn.Sequential(stem, block, head).double()
    batch = pairs(8)
    recompute = [False]

    def loss_fn(b: Pair) -> Tensor:
        h = stem(b[0])
        # torch leaves it untyped
        h = Recompute.apply(block, h) if recompute[0] else block(h)  # type: ignore[no-untyped-call]
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


def test_the_weight_of_a_loss_does_not_become_the_gradient_of_a_leaf() -> None:
    # Where only views lie between a leaf and the loss, autograd makes the weight the `.grad` of the
    # leaf. Clipping then wrote to a weight that later batches used.
    torch.manual_seed(0)
    model, other = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
    shift = model.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    x = torch.randn(8, 3, dtype=torch.float64)

    def loss_fn(piece: Tensor) -> Tensor:
        loss: Tensor = model(piece).pow(2).mean() + shift.squeeze()
        return loss

    mbs, unrelated = (
        elastic(model, micro_batch_size=2, grow=False),
        elastic(other, micro_batch_size=2, grow=False),
    )
    for _ in range(4):
        model.zero_grad()
        mbs.backward(loss_fn, x)
        assert shift.grad is not None
        assert float(shift.grad) == 1.0
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        other.zero_grad()
        unrelated.backward(lambda piece: other(piece).pow(2).mean(), x)
        assert off_by(other, whole_gradient(other, lambda net: net(x).pow(2).mean())) <= 1e-12


def test_a_hook_on_the_loss_that_writes_to_its_gradient_does_so_once() -> None:
    model, batch = mlp(), pairs(8)

    def loss_fn(b: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(model(b[0]), b[1])
        loss.register_hook(lambda gradient: gradient.mul_(2))
        return loss

    mbs = elastic(model, micro_batch_size=2, grow=False)
    for _ in range(4):
        model.zero_grad()
        mbs.backward(loss_fn, batch)
        assert (
            off_by(
                model,
                whole_gradient(
                    model, lambda net: 2 * nn.functional.cross_entropy(net(batch[0]), batch[1])
                ),
            )
            <= 1e-12
        )
