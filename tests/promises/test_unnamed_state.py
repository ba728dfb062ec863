"""Promise 3 for state that nobody named: what a step can reach is put back after a failure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from elastic_mbs import ReplayUnsafeError
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import elastic, mlp, pairs, there
from tests.helpers.strikes import every_operation
from tests.helpers.unnamed import Metric, Step, by_hand, same

F64 = torch.float64
pytestmark = pytest.mark.no_oom_injection


# ---------------------------------------------------------------------- the kinds


def discriminator() -> Step:
    model = mlp()
    judge = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
    return Step(model, lambda b: functional.softplus(-judge(model(b[0]))).mean(), [judge])


class Centred(nn.Module):
    """A loss that moves a centre, as DINO's does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 4, dtype=F64))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        center = self.get_buffer("center")
        target = ((teacher - center) / 0.1).softmax(-1)
        center.mul_(0.9).add_(teacher.mean(0, keepdim=True), alpha=0.1)
        return -(target * student.log_softmax(-1)).sum(-1).mean()


def centre() -> Step:
    model, teacher, loss = mlp(), mlp(seed=3).requires_grad_(False), Centred()
    return Step(model, lambda b: loss(model(b[0]), teacher(b[0]).detach()), [teacher, loss])


class Normaliser(nn.Module):
    """Running statistics of rewards: new tensors each time, and a count beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros((), dtype=F64))
        self.seen = 0

    def forward(self, rewards: Tensor) -> Tensor:
        self.seen += len(rewards)
        self.mean = self.mean + (rewards - self.mean).sum() / self.seen
        return rewards - self.mean


def rewards() -> Step:
    model, normal = mlp(), Normaliser()

    def loss_fn(b: Any) -> Tensor:
        loss = functional.cross_entropy(model(b[0]), b[1], reduction="none")
        weighed: Tensor = (loss * normal(b[0][:, 0])).mean()
        return weighed

    return Step(model, loss_fn, [normal])


class Memory(nn.Module):
    """A cross-batch memory: a ring of embeddings with its place in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(10, 4, dtype=F64))
        self.at = 0

    def forward(self, z: Tensor) -> Tensor:
        rows = self.get_buffer("rows")
        loss = (z @ rows.clone().T).square().mean() + z.square().mean()
        for row in z.detach():
            rows[self.at] = row
            self.at = (self.at + 1) % len(rows)
        return loss


def memory() -> Step:
    model, ring = mlp(), Memory()
    holder = {"losses": [ring]}  # found in containers, too
    return Step(model, lambda b: holder["losses"][0](model(b[0])), [ring])


class Accumulating(nn.Module):
    """A codebook that sums up in the gradients of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4, dtype=F64))
        self.inner = nn.Linear(6, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        sums, new = self.get_buffer("sums"), out.detach().sum(0)
        if sums.grad is None:
            sums.grad = new.clone()
        else:
            sums.grad.add_(new)
        return out


def codebook() -> Step:
    torch.manual_seed(0)
    model = Accumulating()
    return Step(model, lambda b: functional.cross_entropy(model(b[0]), b[1]))


def metric(*, given: bool, in_place: bool) -> Step:
    model, measure = mlp(), Metric(in_place=in_place)

    def loss_fn(b: Any) -> Tensor:
        scores = model[:3](b[0]) if given else model(b[0])
        measure(scores, b[1])
        return functional.cross_entropy(scores, b[1])

    if given:
        model.append(measure)
    return Step(model, loss_fn, [measure])


def generators(make: Callable[[], Any], draw: Callable[[Any], float]) -> Step:
    """Return a step that draws from a generator of its own from the second call on."""
    model, own = mlp(), make()
    step = Step(model, lambda b: functional.cross_entropy(model(b[0]), b[1]), [own])

    def loss_fn(b: Any) -> Tensor:
        scale = 1.0 + draw(own) if step.call > 1 else 1.0
        return functional.cross_entropy(model(b[0] * scale), b[1])

    step.loss_fn = loss_fn
    return step


DRAWS = torch.Generator()


class Noisy(nn.Module):
    """A layer inside another one that draws from a generator of its own or from a global one."""

    def __init__(self, own: torch.Generator | None) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        generator = DRAWS if self.own is None else self.own
        return x + torch.rand(x.shape, generator=generator, dtype=x.dtype)


def noise_inside(own: torch.Generator | None) -> Step:
    model = nn.Sequential(nn.Sequential(Noisy(own)), *mlp())
    DRAWS.manual_seed(3)
    draws = DRAWS if own is None else own
    return Step(model, lambda b: functional.cross_entropy(model(b[0]), b[1]), [draws])


def climb() -> Step:
    """Return a step that climbs inside the block, as SAM does, and goes back."""
    model = mlp()

    def loss_fn(b: Any) -> Tensor:
        leaves = list(model.parameters())
        with torch.no_grad():
            for leaf in leaves:
                leaf.add_(0.25)
        loss = functional.cross_entropy(model(b[0]), b[1])
        (towards,) = torch.autograd.grad(loss, leaves[0])
        with torch.no_grad():
            for leaf in leaves:
                leaf.sub_(0.25)
        return functional.cross_entropy(model(b[0] + towards.detach().mean()), b[1])

    return Step(model, loss_fn)


KINDS: dict[str, Callable[[], Step]] = {
    "a discriminator with BatchNorm": discriminator,
    "a centre": centre,
    "a normaliser of rewards": rewards,
    "a cross-batch memory": memory,
    "gradients of buffers": codebook,
    "a metric in the model": lambda: metric(given=True, in_place=True),
    "a metric beside it": lambda: metric(given=False, in_place=False),
    "a generator of a layer": lambda: noise_inside(torch.Generator().manual_seed(3)),
    "a generator of torch": lambda: generators(
        lambda: torch.Generator().manual_seed(3),
        lambda own: torch.rand((), generator=own).item(),
    ),
    "a generator of numpy": lambda: generators(
        lambda: np.random.default_rng(3), lambda own: float(own.random())
    ),
}


def run(step: Step, mbs: Any, door: int, batch: Any) -> Any:
    step.call += 1
    if door == 1:
        return mbs.backward(step.loss_fn, batch)
    loss_fn = step.loss_fn
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.backward(loss_fn(micro.data))
    return there(mbs.last_result)


@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_as_if_the_failed_attempt_had_not_been_made(
    kind: str, call: int, door: int
) -> None:
    batch = pairs(8)
    for inject in every_operation(stride=7, least=10):
        step, twin = KINDS[kind](), KINDS[kind]()
        mbs = elastic(step.model, micro_batch_size=4, min_micro_batch_size=2)
        for _ in range(call - 1):
            by_hand(twin, run(step, mbs, door, batch).partition, batch)
            for each in (step, twin):
                each.zero_grad()
        with inject:
            result = run(step, mbs, door, batch)
        by_hand(twin, result.partition, batch)
        assert same(step.state(), twin.state()), (inject.hits, result.partition)


@pytest.mark.parametrize("call", [1, 2])
def test_a_global_generator_of_a_layer_is_put_back(call: int) -> None:
    batch = pairs(8)
    for inject in every_operation(stride=2, least=10):
        step = noise_inside(None)
        mbs = elastic(step.model, micro_batch_size=4, min_micro_batch_size=2)
        partitions = [run(step, mbs, 1, batch).partition for _ in range(call - 1)]
        with inject:
            partitions.append(run(step, mbs, 1, batch).partition)
        ours = step.state()
        twin = noise_inside(None)  # the generator is the same one, so one runs after the other
        for partition in partitions:
            by_hand(twin, partition, batch)
        assert same(ours, twin.state()), (inject.hits, partitions)


# ---------------------------------------------------------------------- parameters


@pytest.mark.parametrize("call", [1, 2])
def test_parameters_that_a_step_edits_are_put_back_or_the_error_says_which(call: int) -> None:
    batch, refused = pairs(8), 0
    for inject in every_operation(stride=2, least=30):
        step, twin = climb(), climb()
        mbs = elastic(step.model, micro_batch_size=4, min_micro_batch_size=2)
        for _ in range(call - 1):
            by_hand(twin, run(step, mbs, 1, batch).partition, batch)
            for each in (step, twin):
                each.zero_grad()
        try:
            with inject:
                result = run(step, mbs, 1, batch)
        except ReplayUnsafeError as error:
            assert call == 1
            assert "the parameter Linear." in str(error)
            refused += 1
            continue
        by_hand(twin, result.partition, batch)
        assert same(step.state(), twin.state()), (inject.hits, result.partition)
    assert bool(refused) == (call == 1)


class FromData(nn.Module):
    """A layer that is set up by the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.ready = nn.Parameter(torch.zeros(6, dtype=F64)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            with torch.no_grad():
                self.shift.sub_(x.mean(0))
        return x + self.shift


def test_a_layer_set_up_by_its_first_batch_is_right_where_the_error_sends_it() -> None:
    batch, refused = pairs(8), 0
    for inject in every_operation(stride=2, least=10):
        model = nn.Sequential(FromData(), *mlp())

        def loss_fn(b: Any, model: nn.Module = model) -> Tensor:
            return functional.cross_entropy(model(b[0]), b[1])

        mbs = elastic(model, micro_batch_size=8)
        try:
            with inject:
                mbs.backward(loss_fn, batch)
            continue
        except ReplayUnsafeError as error:
            assert "the parameter FromData.shift" in str(error)
            assert "torch.no_grad()" in str(error)
            refused += 1
        model = nn.Sequential(FromData(), *mlp())
        with torch.no_grad():  # what it says
            model(batch[0])
        with InjectOOM(at=[5]):
            elastic(model).backward(
                lambda b, model=model: functional.cross_entropy(model(b[0]), b[1]), batch
            )
        assert torch.allclose(model.get_parameter("0.shift"), -batch[0].mean(0), rtol=1e-12)
    assert refused


def test_an_embedding_that_limits_its_norms_is_not_taken_for_an_edited_parameter() -> None:
    ids = torch.randint(0, 9, (8, 3), generator=torch.Generator().manual_seed(0))
    for inject in every_operation(least=8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Linear(4, 1)).double()
        with inject:
            result = elastic(model, micro_batch_size=4).backward(
                lambda b, model=model: model(b).square().mean(), ids
            )
        assert result.ooms == len(inject.hits)


# ---------------------------------------------------------------------- how it is found


class Owner:
    """An object that keeps a module in an attribute and uses it in a method."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.parts = model, [{"normal": Normaliser()}]

    def step(self, b: Any) -> Tensor:
        loss: Tensor = self.model(b[0]).square().mean(1) * self.parts[0]["normal"](b[0][:, 0])
        return loss.mean()

    def __call__(self, b: Any) -> Tensor:
        return self.step(b)


GLOBAL = Normaliser()


def by_global(b: Any) -> Tensor:
    moved: Tensor = GLOBAL(b[0][:, 0])
    return moved.mean()


def ways_to(owner: Owner) -> dict[str, Callable[[Any], Tensor]]:
    normal = owner.parts[0]["normal"]

    def default(b: Any, *, normal: nn.Module = normal) -> Tensor:
        loss: Tensor = owner.model(b[0]).square().mean(1) * normal(b[0][:, 0])
        return loss.mean()

    def through_a_global(b: Any) -> Tensor:
        loss: Tensor = owner.model(b[0]).square().mean() * by_global(b)
        return loss

    @wraps(default)
    def wrapped(*args: Any) -> Tensor:
        return default(*args)

    return {
        "method": owner.step,
        "object": owner,
        "default": default,
        "global": through_a_global,
        "wrapped": wrapped,
        "partial": partial(default, normal=normal),
    }


@pytest.mark.parametrize("way", ways_to(Owner(mlp())))
def test_state_is_found_by_whatever_way_the_step_reaches_it(way: str) -> None:
    batch, found = pairs(8), 0
    for inject in every_operation(stride=3, least=8):
        owner = Owner(mlp())
        GLOBAL.mean, GLOBAL.seen = torch.zeros((), dtype=F64), 0
        normal = GLOBAL if way == "global" else owner.parts[0]["normal"]
        with inject:
            result = elastic(owner.model, micro_batch_size=4, min_micro_batch_size=2).backward(
                ways_to(owner)[way], batch
            )
        found += result.ooms
        wanted = Normaliser()
        for start, stop in result.partition:
            wanted(batch[0][start:stop, 0])
        assert normal.seen == 8
        assert torch.allclose(normal.mean, wanted.mean, rtol=1e-12)
    assert found > 4


def test_only_those_that_change_are_followed_after_the_first_call() -> None:
    step = centre()
    teacher, loss = step.others
    mbs = elastic(step.model, micro_batch_size=4)
    frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double().eval()
    with_more: Callable[[Any], Tensor] = lambda b: step.loss_fn(b) + frozen(teacher(b[0])).mean()  # noqa: E731
    for _ in range(2):
        mbs.backward(with_more, pairs(8))
    assert mbs._resources.model.companions == [loss]


def test_a_model_that_is_compiled_is_compiled_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    inner = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    beside, head = torch.compile(inner, backend=counter), nn.Linear(4, 4).double()
    mbs = elastic(head, micro_batch_size=4)
    for _ in range(3):
        mbs.backward(lambda b: functional.cross_entropy(head(beside(b[0])), b[1]), pairs(8))
    assert counter.frame_count == 1
    assert mbs._resources.model.companions == [inner[1]]


def test_a_generator_that_is_not_the_steps_is_left_where_it_is() -> None:
    # A loop's frame holds the generator that shuffles: between two batches it goes on.
    model, shuffles, batch = mlp(), np.random.default_rng(0), pairs(8)
    mbs = elastic(model, micro_batch_size=4)
    for at in (3, 6, 9):
        drawn = shuffles.random()
        after = shuffles.bit_generator.state
        with InjectOOM(at=[at]):
            for micro in mbs.micro_batches(batch):
                with micro:
                    micro.backward(functional.cross_entropy(model(micro.data[0]), micro.data[1]))
        assert shuffles.bit_generator.state == after
        assert drawn != shuffles.random()
        model.zero_grad()
