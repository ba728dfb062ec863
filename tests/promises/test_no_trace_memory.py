"""Promise 3 for memory: nothing of a failed attempt stays alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elastic_mbs import ElasticMBS, Event, MemoryBudget, MemoryOptions, MicroBatch, OutOfMemory
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import Pair, calls_of, cross_entropy, elastic, loop, mlp, pairs
from tests.helpers.strikes import drawn

DOORS = [1, 3]


# ---------------------------------------------------------------------- at the failure

SLACK = 24 * 1024
"""Bytes besides activations: states of random streams (5 KiB each), scalars, a few indices.

One activation here has 256 KiB.
"""


class _Wide(nn.Module):
    def __init__(self, reentrant: bool | None = None, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(depth)
        )
        self.head = nn.Linear(128, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        out: Tensor = self.head(x)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": _Wide,
    "checkpoint, non-reentrant": lambda: _Wide(reentrant=False),
    "checkpoint, reentrant": lambda: _Wide(reentrant=True),
    "in place": lambda: nn.Sequential(
        nn.Linear(128, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, 4),
    ),
}


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)


@dataclass
class _Watch:
    """A sink that looks at live memory when a failure is announced."""

    budget: MemoryBudget
    model: nn.Module
    rest: int
    named: Callable[[], int] = lambda: 0
    worst: int = 0
    seen: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, OutOfMemory):
            self.seen += 1
            owed = self.rest + _nbytes(*(p.grad for p in self.model.parameters())) + self.named()
            self.worst = max(self.worst, self.budget.live - owed)


def _prepared(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    batch = (torch.randn(256, 128, dtype=torch.float64), torch.randint(0, 4, (256,)))
    if name == "checkpoint, reentrant":
        batch[0].requires_grad_()
    return model, batch


def _rest(model: nn.Module, batch: tuple[Tensor, Tensor], budget: MemoryBudget) -> int:
    model.zero_grad()
    batch[0].grad = None
    gc.collect()
    return budget.live


def _operations(run: Callable[[], object]) -> int:
    with InjectOOM() as count:
        run()
    return int(count.count)


@pytest.mark.parametrize("outputs", ["none", "device", "cpu"])
@pytest.mark.parametrize("name", list(MODELS))
def test_memory_is_back_at_rest_when_a_failure_is_announced_door_1(name: str, outputs: str) -> None:
    model, batch = _prepared(name)
    model.requires_grad_()

    def loss_fn(b: Pair) -> Any:
        hidden = model(b[0])
        loss = functional.cross_entropy(hidden, b[1])
        # the output has as many bytes as an activation
        return loss if outputs == "none" else (loss, hidden.detach().repeat(1, 32))

    with MemoryBudget("1GiB", track=(model, batch)) as budget:
        watch = _Watch(budget, model, 0)
        mbs = elastic(
            model,
            micro_batch_size=256,
            on_event=watch,
            outputs="cpu" if outputs == "cpu" else "device",
        )
        total = _operations(lambda: mbs.backward(loss_fn, batch))
        calls_of(mbs).last_result = None
        for n in range(drawn(7), total + 1, 7):
            # the batch's own gradient may exist, where it requires one
            watch.rest = _rest(model, batch, budget) + _nbytes(batch[0])
            if not batch[0].requires_grad:
                watch.rest -= _nbytes(batch[0])
            mbs_n = elastic(
                model,
                micro_batch_size=256,
                on_event=watch,
                outputs="cpu" if outputs == "cpu" else "device",
            )
            with InjectOOM(at=[n]):
                mbs_n.backward(loss_fn, batch)
            mbs_n.close()
            del mbs_n
        assert watch.seen >= total // 9
        assert watch.worst <= SLACK, f"{watch.worst} bytes of the failed attempt were alive"


def test_memory_is_back_at_rest_when_a_failure_is_announced_door_2() -> None:
    from elastic_mbs import elastic_step
    from elastic_mbs.memory import NoSensor

    model, batch = _prepared("plain")
    with MemoryBudget("1GiB", track=(model, batch)) as budget:
        watch = _Watch(budget, model, 0)

        @elastic_step(
            model,
            micro_batch_size=256,
            on_event=watch,
            memory=MemoryOptions(sensor=NoSensor("no"), monitor_interval=0),
        )
        def step(b: Pair) -> Any:
            hidden = model(b[0])
            loss = functional.cross_entropy(hidden, b[1])
            return loss, hidden

        total = _operations(lambda: step(batch))
        calls_of(step.mbs).last_result = None
        for n in range(drawn(11), total + 1, 11):
            watch.rest = _rest(model, batch, budget)
            with InjectOOM(at=[n]):
                step(batch)
            calls_of(step.mbs).last_result = None
        assert watch.seen >= total // 11
        assert watch.worst <= SLACK, f"{watch.worst} bytes of the failed attempt were alive"


@pytest.mark.parametrize("name", list(MODELS))
def test_memory_is_back_at_rest_although_the_loop_holds_its_output_door_3(
    name: str,
) -> None:
    model, batch = _prepared(name)
    with MemoryBudget("1GiB", track=(model, batch)) as budget:
        held: dict[str, Tensor] = {}
        watch = _Watch(budget, model, 0, named=lambda: _nbytes(*held.values()))

        def run(faults: InjectOOM, mbs: ElasticMBS) -> None:
            out = loss = None
            with faults:
                for micro in mbs.micro_batches(batch):
                    held.clear()
                    with micro:
                        held["out"] = out = model(micro.data[0])
                        held["loss"] = loss = functional.cross_entropy(out, micro.data[1])
                        micro.backward(loss)
            held.clear()
            del out, loss

        def fresh() -> ElasticMBS:
            return elastic(model, micro_batch_size=256, on_event=watch)

        count = InjectOOM()
        run(count, fresh())
        for n in range(drawn(7), count.count + 1, 7):
            watch.rest = _rest(model, batch, budget) + (
                _nbytes(batch[0]) if batch[0].requires_grad else 0
            )
            mbs = fresh()
            run(InjectOOM(at=[n]), mbs)
            mbs.close()
            del mbs
        assert watch.seen >= count.count // 9
        # Non-reentrant checkpointing keeps the recomputed tensors of one block in a frame. The
        # graph behind `out` holds that frame.
        block = 256 * 1024 if name == "checkpoint, non-reentrant" else 0
        assert watch.worst <= SLACK + block, (
            f"{watch.worst} bytes of the failed attempt were alive, besides what the loop itself "
            "has named"
        )


def test_outputs_and_callbacks_of_a_failed_attempt_are_gone_at_its_event() -> None:
    model, batch = mlp(), pairs(8)
    alive: list[bool] = []
    kept: list[weakref.ref[Tensor]] = []

    def announced(event: Event) -> None:
        if isinstance(event, OutOfMemory):
            alive.extend(reference() is not None for reference in kept)

    def loss_fn(micro: MicroBatch) -> tuple[Tensor, Tensor]:
        output, captured = torch.zeros(len(micro), 3), torch.zeros(5)
        kept.extend([weakref.ref(captured)])
        micro.on_commit(lambda: captured.sum())
        loss: Tensor = cross_entropy(model)(micro.data)
        return loss, output

    mbs = elastic(model, micro_batch_size=8, on_event=announced)
    with InjectOOM(at=[14]):
        for micro in mbs.micro_batches(batch):
            with micro:
                micro.backward(loss_fn(micro))
    assert alive == [False]


# ---------------------------------------------------------------------- after many failures


class _Marked(nn.Module):
    """A model with weak references to the tensors and the nodes of its graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(width=16)
        self.marks: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[1](self.net[0](x))
        out: Tensor = self.net[2](hidden)
        mark = _Anything()
        assert out.grad_fn is not None
        # The mark lives as long as the node.
        out.grad_fn.metadata["mark"] = mark  # type: ignore[index]  # torch types it as a method
        self.marks += [weakref.ref(hidden), weakref.ref(out), weakref.ref(mark)]
        return out


class _Anything:
    pass


def _door_1(mbs: ElasticMBS, model: nn.Module, batch: Pair) -> None:
    mbs.backward(lambda b: (cross_entropy(model)(b), b[0].sum(1)), batch)


def _door_2(mbs: ElasticMBS, model: nn.Module, batch: Pair) -> None:
    step = getattr(model, "step", None)
    if step is None:
        from elastic_mbs import elastic_step
        from elastic_mbs.memory import NoSensor

        step = elastic_step(
            model,
            micro_batch_size=8,
            memory=MemoryOptions(sensor=NoSensor("no"), monitor_interval=0),
        )(lambda b: cross_entropy(model)(b))
        object.__setattr__(model, "step", step)
    step(batch)


def _door_3(mbs: ElasticMBS, model: nn.Module, batch: Pair) -> None:
    for micro in mbs.micro_batches(batch):
        with micro:
            out = model(micro.data[0])
            loss = functional.cross_entropy(out, micro.data[1])
            micro.backward((loss, out))
            micro.on_commit(lambda: None)


def _evaluate(mbs: ElasticMBS, model: nn.Module, batch: Pair) -> None:
    def fn(b: Pair) -> Tensor:
        hidden = torch.tanh(b[0] * 2)
        return hidden.sum(1)

    mbs.evaluate(fn, batch)


def _faults(door: Callable[..., None]) -> Iterator[int]:
    """Yield one operation after another, of forward and backward."""
    while True:
        yield from [1, 2] if door is _evaluate else range(1, 14)


@pytest.mark.parametrize("door", [_door_1, _door_2, _door_3, _evaluate])
def test_memory_after_200_recovered_failures_is_that_after_the_first(
    door: Callable[..., None],
) -> None:
    model, batch = _Marked(), pairs(8)
    with MemoryBudget("1GiB", track=(model, batch)) as budget:
        mbs = ElasticMBS(
            model, micro_batch_size=8, memory=MemoryOptions(monitor_interval=0, wait_for_memory=0)
        )
        live, objects, faults = [], [], _faults(door)
        start = mbs.state_dict()
        for i in range(200):
            for runtime in (mbs, getattr(vars(model).get("step"), "mbs", None)):
                if runtime is not None:
                    runtime.load_state_dict(start)  # the size can shrink again
            before = budget.ooms
            inject = InjectOOM(at=[next(faults)])
            with inject:
                door(mbs, model, batch)
            assert len(inject.hits) == 1
            assert budget.ooms == before
            model.zero_grad()
            if i in (0, 99, 199):
                gc.collect()
                live.append(budget.live)
                objects.append(len(gc.get_objects()))
            if i % 50 == 49:
                calls_of(mbs).last_result = None
                assert not any(mark() is not None for mark in model.marks), (
                    "a graph of a failed attempt, or of a finished one, is alive"
                )
                model.marks.clear()
    assert live[1] == live[2] <= live[0] + SLACK
    assert objects[2] - objects[1] < 300, "Python objects pile up"


def test_a_runtime_that_is_dropped_without_close_frees_the_model() -> None:
    model, batch = mlp(), pairs(8)
    mbs = elastic(model, micro_batch_size=4)
    loop(mbs, cross_entropy(model), batch)
    gone: list[weakref.ref[Any]] = [
        weakref.ref(model),
        weakref.ref(mbs),
        *(weakref.ref(p) for p in model.parameters()),
    ]
    del mbs, model
    gc.collect()
    assert not any(reference() is not None for reference in gone)
