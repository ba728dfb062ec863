"""Three ways into one engine, enabled and disabled; a decorated function keeps its identity."""

import copy
import functools
import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, Event, OutOfMemory, UsageError, elastic_step
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import (
    FailOn,
    Pair,
    cross_entropy,
    elastic,
    elsewhere,
    failing,
    grads,
    mlp,
    off_by,
    once,
    pairs,
    quiet,
    through,
    whole_gradient,
)

pytestmark = pytest.mark.injectable

DOORS = [1, 2, 3]


@pytest.mark.parametrize("fault", [0, 3, 9, 13, 17, 21, 27, 33])
def test_all_doors_give_the_same_gradients_losses_and_partitions(fault: int) -> None:
    batch, seen = pairs(), []
    for door in DOORS:
        model = mlp()
        with InjectOOM(at=[fault]):
            result = once(door, model, cross_entropy(model), batch, micro_batch_size=4)
        seen.append(
            (
                grads(model),
                float(result),
                result.partition,
                result.ooms,
                result.replayed_samples,
                result.micro_batch_size,
            )
        )
        assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12
    assert seen[0][1:] == seen[1][1:] == seen[2][1:]
    for others in seen[1:]:
        assert all(
            torch.equal(a, b)
            for a, b in zip(seen[0][0], others[0], strict=True)
            if a is not None and b is not None
        )


def test_works_without_a_with_block_and_after_it(
    model: nn.Sequential, batch: Pair, door: int
) -> None:
    mbs = elastic(model, micro_batch_size=4)
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))

    def step() -> None:
        model.zero_grad()
        with InjectOOM(at=[17]):
            through(door, mbs, cross_entropy(model), batch)
        assert off_by(model, wanted) <= 1e-12

    for _ in range(2):
        step()
        with mbs:
            step()


@pytest.mark.no_oom_injection
def test_learned_state_survives_a_round_trip_through_json(
    model: nn.Sequential, batch: Pair
) -> None:
    mbs = elastic(model, micro_batch_size=8)
    with InjectOOM(at=[3]):
        assert mbs.backward(cross_entropy(model), batch).micro_batch_size == 4
    state = json.loads(json.dumps(mbs.state_dict()))
    fresh = elastic(model, micro_batch_size=8)
    fresh.load_state_dict(state)
    assert (
        _without_clock(fresh.state_dict())
        == _without_clock(mbs.state_dict())
        == _without_clock(state)
    )
    result = fresh.backward(cross_entropy(model), batch)
    assert (result.micro_batch_size, result.ooms) == (4, 0)


def _without_clock(state: dict[str, Any]) -> list[dict[str, Any]]:
    tracks = state["controller"]["tracks"]
    return [
        {**track, "cooldown_left": None, "ceilings": [ceiling[:3] for ceiling in track["ceilings"]]}
        for track in tracks
    ]


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runtime_is_not_copied_and_says_so(take: Callable[[Any], object]) -> None:
    """A shallow copy would share all state; a deep copy would fail at a lock."""
    with (
        elastic(mlp()) as mbs,
        pytest.raises(UsageError, match=r"neither copied nor pickled.*state_dict\(\)"),
    ):
        take(mbs)


@pytest.mark.no_oom_injection
def test_statistics_and_the_last_result_tell_what_happened(
    model: nn.Sequential, batch: Pair
) -> None:
    loss_fn, mbs = failing(model, FailOn(3)), elastic(model, micro_batch_size=4)
    assert mbs.last_result is None
    for door in (1, 3):
        assert through(door, mbs, loss_fn, batch) is mbs.last_result
    stats = mbs.stats
    assert (stats.calls, stats.samples, stats.pieces, stats.ooms, stats.replayed_samples) == (
        2,
        16,
        2 + 4,
        1,
        4,
    )
    assert stats.sizes == {4: 1, 2: 1}
    stats.sizes.clear()
    assert mbs.stats.sizes == {4: 1, 2: 1}, "a copy"


def test_events_of_two_runtimes_are_told_apart_by_name() -> None:
    events = list[Event]()
    for name in ("generator", "critic"):
        model = mlp()
        with InjectOOM(at=[12]):
            elastic(model, micro_batch_size=4, name=name, on_event=events.append).backward(
                cross_entropy(model), pairs()
            )
    assert [event.name for event in events if isinstance(event, OutOfMemory)] == [
        "generator",
        "critic",
    ]


@pytest.mark.parametrize("door", DOORS)
def test_disabled_runs_the_batch_whole_and_catches_nothing(
    model: nn.Sequential, batch: Pair, door: int
) -> None:
    result = once(door, model, cross_entropy(model), batch, micro_batch_size=2, enabled=False)
    assert result.partition == ((0, 8),)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) == 0
    assert float(result) == cross_entropy(model)(batch).item()
    oom = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        once(door, model, failing(model, FailOn(1, error=lambda: oom)), batch, enabled=False)
    assert caught.value is oom
    assert getattr(oom, "__notes__", []) == []


def test_disabled_starts_no_thread_and_watches_nothing() -> None:
    model, threads = mlp(), threading.active_count()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(b: Pair) -> Tensor:
        optimizer.step()
        cross_entropy(model)(b).backward()
        return cross_entropy(model)(b)

    with ElasticMBS(model, enabled=False) as mbs:
        assert threading.active_count() == threads
        mbs.backward(loss_fn, pairs())


def test_disabled_has_outputs_totals_callbacks_scaler_and_backward() -> None:
    model, batch, log = mlp(), pairs(), list[Any]()
    mbs = elastic(
        model, enabled=False, scaler=torch.amp.GradScaler("cpu", init_scale=4.0), reduction="sum"
    )
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.on_commit(lambda: log.append("committed"))
            assert (micro.total, micro.start, micro.stop, len(micro)) == (8, 0, 8, 8)
            assert micro.data is batch
            micro.backward((cross_entropy(model)(micro.data), batch[0]))
    assert log == ["committed"]
    assert mbs.last_result is not None
    assert torch.equal(mbs.last_result.outputs, batch[0])
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch) * 4)) <= 1e-12
    elastic(model, enabled=False, backward=log.append).backward(cross_entropy(model), batch)
    assert len(log) == 2
    assert torch.equal(
        elastic(model, enabled=False).evaluate(model, batch[0]), model(batch[0]).detach()
    )


def test_a_backward_of_ones_own_is_called_even_if_it_counts_as_false(
    model: nn.Sequential, batch: Pair
) -> None:
    class Backward(list[float]):  # an empty list counts as false
        def __call__(self, loss: Tensor) -> None:
            loss.sum().backward(torch.tensor(2.0))

    elastic(model, micro_batch_size=4, backward=Backward()).backward(cross_entropy(model), batch)
    assert off_by(model, whole_gradient(model, lambda net: 2 * cross_entropy(net)(batch))) <= 1e-12


def test_disabled_knows_the_total_and_takes_batches_that_could_not_be_cut(
    model: nn.Sequential, batch: Pair
) -> None:
    """A `loss_fn` that divides by `mbs.total` works with the runtime disabled, too."""
    mbs = elastic(model, enabled=False, reduction="sum")
    mbs.backward(lambda b: 8 * cross_entropy(model)(b) / mbs.total, batch)
    elastic(model, enabled=False).backward(lambda b: cross_entropy(model)(b()), lambda: batch)
    assert off_by(model, whole_gradient(model, lambda net: 2 * cross_entropy(net)(batch))) <= 1e-12


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("door", [*DOORS, "evaluate"])
def test_the_batch_is_brought_to_the_model_either_way(door: Any, enabled: bool) -> None:
    """A loader on the host goes with a model on a device, also with the runtime disabled."""
    model, batch, seen = elsewhere(nn.Linear(6, 4)), torch.zeros(4, 6), list[str]()

    def loss_fn(x: Tensor) -> Tensor:
        seen.append(x.device.type)
        loss: Tensor = model(x).sum()
        return loss

    if door == "evaluate":
        elastic(model, micro_batch_size=4, enabled=enabled).evaluate(
            loss_fn, batch, outputs="device"
        )
    else:
        once(door, model, loss_fn, batch, micro_batch_size=4, enabled=enabled)
    assert set(seen) == {"meta"}


# ---------------------------------------------------------------------- door 2, the decorator


@pytest.mark.no_oom_injection
def test_the_decorator_passes_other_arguments_and_keeps_the_functions_name() -> None:
    model, seen = mlp(), []

    @elastic_step(model, micro_batch_size=4, **quiet())
    def train_step(
        batch: Pair, factor: float, *rest: object, flag: bool = False, **more: object
    ) -> Tensor:
        """Its own words."""
        seen.append((len(batch[0]), factor, rest, flag, more))
        return cross_entropy(model)(batch) * factor

    result = train_step(pairs(), 2.0, "a", flag=True, other=3)
    assert seen == [(4, 2.0, ("a",), True, {"other": 3})] * 2
    assert float(result) == pytest.approx(2 * cross_entropy(model)(pairs()).item())
    assert (train_step.__name__, train_step.__doc__) == ("train_step", "Its own words.")  # type: ignore[attr-defined]  # functools.wraps
    assert isinstance(train_step.mbs, ElasticMBS)
    assert train_step.mbs.last_result is result


@pytest.mark.parametrize("door", [1, 2])
def test_arguments_of_any_name_reach_the_step_function(model: nn.Sequential, door: int) -> None:
    """The names of the engine's own parameters are free for the arguments of a step function."""

    def step(piece: Pair, loss_fn: int, batch: int, self: int, fn: int, loss: Any) -> Tensor:
        assert (loss_fn, batch, self, fn) == (1, 2, 3, 4)
        scores: Tensor = loss(model(piece[0]), piece[1])
        return scores

    own: dict[str, Any] = {"loss_fn": 1, "self": 3, "fn": 4, "loss": nn.CrossEntropyLoss()}
    if door == 1:
        elastic(model, micro_batch_size=4).backward(step, pairs(), batch=2, **own)
    else:
        elastic_step(model, micro_batch_size=4, **quiet())(functools.partial(step, batch=2))(
            pairs(), **own
        )
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(pairs()))) <= 1e-12


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("door", "functions", "name"),
    [
        ("evaluate", 1, "to"),
        ("verify", 1, "loss"),
        ("plan", 1, "size"),
        ("backward_embeddings", 2, "loss"),
        ("micro_batches", 0, "size"),
    ],
)
def test_a_door_that_passes_nothing_on_says_where_arguments_go(
    model: nn.Sequential, door: str, functions: int, name: str, enabled: bool
) -> None:
    call = functools.partial(getattr(elastic(model, enabled=enabled), door), *[model] * functions)
    with pytest.raises(UsageError, match=rf"{door}\(\): .*'{name}'.* lambda or functools.partial"):
        call(pairs(), **{name: 3})
    with pytest.raises(UsageError, match=rf"{door}\(\): too many .* lambda or functools.partial"):
        call(pairs(), 3)


@dataclass
class _Trainer:
    """A trainer without a hash."""

    model: nn.Module
    fail: FailOn = field(default_factory=lambda: FailOn(1), compare=False)

    @elastic_step(lambda self: self.model, micro_batch_size=4, **quiet())
    def train_step(self, batch: Pair, factor: float = 1.0) -> Tensor:
        """Its own words."""
        self.fail()
        return cross_entropy(self.model)(batch) * factor


@pytest.mark.no_oom_injection
def test_the_decorator_on_a_method_gives_each_instance_its_own_runtime() -> None:
    batch = pairs()
    first, second = _Trainer(mlp(seed=1)), _Trainer(mlp(seed=2))
    for trainer in (first, second):
        result = trainer.train_step(batch, factor=3.0)
        assert result.ooms == 1
        assert (
            off_by(
                trainer.model,
                whole_gradient(trainer.model, lambda net: cross_entropy(net)(batch) * 3.0),
            )
            <= 1e-12
        )
    assert _Trainer.train_step.mbs(first) is not _Trainer.train_step.mbs(second)
    assert _Trainer.train_step.mbs(first) is _Trainer.train_step.mbs(first)
    assert _Trainer.train_step.mbs(first).stats.ooms == 1
    assert _Trainer.train_step.__doc__ == "Its own words."


class _OwnModel(nn.Module):
    """A trainer that is its own model, as a LightningModule is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    @elastic_step(lambda self: self, micro_batch_size=4, **quiet())
    def train_step(self, batch: Pair) -> Tensor:
        return cross_entropy(self.net)(batch)


@pytest.mark.parametrize("make", [lambda: _Trainer(mlp()), _OwnModel])
def test_instances_with_a_decorated_method_are_freed(make: Any) -> None:
    trainer = make()
    trainer.train_step(pairs())
    gone = (
        weakref.ref(trainer),
        weakref.ref(
            next(trainer.train_step.__func__.mbs(trainer)._resources.model.modules[0].parameters())
        ),
    )
    del trainer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_sequence_of_modules_is_one_step() -> None:
    encoder, decoder = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
    batch = pairs()
    both = nn.Sequential(encoder, decoder)
    wanted = whole_gradient(both, lambda net: cross_entropy(net)(batch))
    for n in (0, 4, 9, 13, 19):
        both.zero_grad()
        step = elastic_step([encoder, decoder], micro_batch_size=4, **quiet())(cross_entropy(both))
        with InjectOOM(at=[n]):
            step(batch)
        assert off_by(both, wanted) <= 1e-12


class _BatchNormTrainer:
    def __init__(self) -> None:
        self.model = self.net(0)

    @staticmethod
    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)
        ).double()

    @elastic_step(lambda self: self.model, **quiet(micro_batch_size=4, min_micro_batch_size=4))
    def step(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.model(x).square().mean())


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(
    "copied", [None, copy.copy, copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))]
)
def test_another_model_or_a_copy_gets_another_runtime(copied: Any) -> None:
    """A runtime of the old model would not put back the buffers of the new one."""
    x, runtime_of = torch.randn(8, 4, dtype=torch.float64), _BatchNormTrainer.step.mbs

    def run(at: int) -> tuple[nn.Module, int]:
        first = _BatchNormTrainer()
        first.step(x)
        old = runtime_of(first)
        other = copied(first) if copied else first
        other.model = first.net(1)
        other.step(x)
        with InjectOOM(at=[at]):
            ooms = other.step(x).ooms
        assert runtime_of(other) is runtime_of(other) is not old
        assert (runtime_of(first) is old) is (copied is not None)
        return other.model, ooms

    expected, _ = run(0)
    ooms = 0
    for at in range(1, 40, 3):
        found, failed = run(at)
        ooms += failed
        for a, b in zip(found.buffers(), expected.buffers(), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)
        assert off_by(found, grads(expected)) <= 1e-12
    assert ooms


def test_a_list_of_networks_made_for_each_call_has_one_runtime() -> None:
    class Trainer:
        net = mlp()

        @elastic_step(lambda self: nn.ModuleList([self.net]), micro_batch_size=4, **quiet())
        def train_step(self, batch: Pair) -> Tensor:
            return cross_entropy(self.net)(batch)

    trainer = Trainer()
    for _ in range(2):
        trainer.train_step(pairs())
    assert Trainer.train_step.mbs(trainer).stats.calls == 2


def test_an_instance_with_nowhere_to_keep_its_runtime_is_refused() -> None:
    class Slots:
        __slots__ = ("model",)

        @elastic_step(lambda self: self.model)
        def train_step(self, batch: Pair) -> Tensor:
            raise AssertionError("never called")

    with pytest.raises(UsageError, match="Slots has no __dict__ to keep its runtime in"):
        Slots().train_step(pairs())


class Trains:
    """A trainer with a decorated step, in float64."""

    def __init__(self) -> None:
        self.model = mlp().double()

    @elastic_step(lambda self: self.model, micro_batch_size=4, **quiet())
    def step(self, b: Pair, scale: float = 1.0) -> Tensor:
        return cross_entropy(self.model)(b) * scale


def test_a_decorated_step_takes_its_batch_by_its_own_name() -> None:
    trainer, batch = Trains(), pairs(8)
    wanted = whole_gradient(trainer.model, lambda model: cross_entropy(model)(batch) * 2)

    @elastic_step(trainer.model, micro_batch_size=4, **quiet())
    def function(b: Pair, scale: float = 1.0) -> Tensor:
        return cross_entropy(trainer.model)(b) * scale

    for step in (trainer.step, function):
        trainer.model.zero_grad()
        step(scale=2.0, b=batch)
        assert off_by(trainer.model, wanted) <= 1e-12
        with pytest.raises(UsageError, match="give b by position, or by its name"):
            step(scale=2.0)
