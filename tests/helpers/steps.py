"""Small training steps in float64, and references to compare them with."""

import copy
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, StepResult, elastic_step
from elastic_mbs.doors.calls import Calls
from elastic_mbs.engine.shared.running import running_call
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.memory import NoSensor
from elastic_mbs.testing import InjectOOM
from stress.flat_options import grouped
from stress.reference.state import error_of

Pair = tuple[Tensor, Tensor]
LossFn = Callable[..., Any]
T = TypeVar("T")


def there(value: T | None) -> T:
    """Return a value that is not None, also in the view of mypy."""
    assert value is not None
    return value


def quiet(**options: Any) -> dict[str, Any]:
    """Return options of a runtime without thread, readings, waits, chance and growth.

    `options` come on top.
    """
    return grouped(
        {
            "monitor_interval": 0,
            "sensor": NoSensor("not in this test"),
            "wait_for_memory": 0,
            "seed": 0,
            "grow": False,
            **options,
        }
    )


def elastic(model: nn.Module, **options: Any) -> ElasticMBS:
    return ElasticMBS(model, **quiet(**options))


def calls_of(mbs: ElasticMBS) -> Calls:
    """Return the calls of an enabled runtime."""
    calls = mbs._calls
    assert isinstance(calls, Calls)
    return calls


def mlp(width: int = 8, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4)).double()


def pairs(n: int = 8, seed: int = 1) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, dtype=torch.float64, generator=generator), torch.randint(
        0, 4, (n,), generator=generator
    )


def cross_entropy(model: nn.Module) -> Callable[..., Tensor]:
    def loss_fn(batch: Pair) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    return loss_fn


def grads(leaves: nn.Module | Iterable[Tensor]) -> list[Tensor | None]:
    """Return copies of the gradients."""
    tensors = leaves.parameters() if isinstance(leaves, nn.Module) else leaves
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in tensors]


def whole_gradient(
    model: nn.Module, make_loss: Callable[[nn.Module], Tensor]
) -> list[Tensor | None]:
    """Return the gradient of a plain backward on a copy of the model."""
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.grad = None
    make_loss(twin).backward()
    return grads(twin)


def off_by(leaves: nn.Module | Iterable[Tensor], wanted: list[Tensor | None]) -> float:
    """Return the largest relative difference from `wanted`; infinite where one side has none."""
    return error_of(grads(leaves), wanted)


def loop(mbs: ElasticMBS, loss_fn: LossFn, batch: Any) -> StepResult:
    """Run a loop as a user writes it: the frame holds the loss when the next piece begins."""
    for micro in mbs.micro_batches(batch):
        with micro:
            loss = loss_fn(micro.data)
            micro.backward(loss)
    return there(mbs.last_result)


def through(door: int, mbs: ElasticMBS, loss_fn: LossFn, batch: Any) -> StepResult:
    """Run one call by `backward` (door 1) or by a loop (door 3)."""
    return mbs.backward(loss_fn, batch) if door == 1 else loop(mbs, loss_fn, batch)


def once(door: int, model: nn.Module, loss_fn: LossFn, batch: Any, **options: Any) -> StepResult:
    """Run one call of a new runtime by `backward` (1), the decorator (2) or a loop (3)."""
    return (
        elastic_step(model, **quiet(**options))(loss_fn)(batch)
        if door == 2
        else through(door, elastic(model, **options), loss_fn, batch)
    )


def settled(door: int, model: nn.Module, loss_fn: LossFn, batch: Any, **options: Any) -> ElasticMBS:
    """Return a runtime that knows the loss function from two clean calls."""
    mbs = elastic(model, **{"micro_batch_size": 3, **options})
    for _ in range(2):
        through(door, mbs, loss_fn, batch)
    model.zero_grad()
    return mbs


class FailOn:
    """A function that raises an error in chosen calls, counted from 1."""

    def __init__(self, *calls: int, error: Callable[[], BaseException] | None = None) -> None:
        self.calls = frozenset(calls)
        self.count = 0
        self.error = error or (
            lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        )

    def __call__(self) -> None:
        self.count += 1
        if self.count in self.calls:
            raise self.error()


def failing(model: nn.Module, fail: Callable[[], object]) -> Callable[..., Tensor]:
    """Return `cross_entropy` with a failure before its forward."""

    def loss_fn(batch: Pair) -> Tensor:
        fail()
        return cross_entropy(model)(batch)

    return loss_fn


def still_works(mbs: ElasticMBS, model: nn.Module) -> bool:
    """Return whether the next call recovers from an error and gives the right gradient."""
    batch = pairs(8, seed=77)
    model.zero_grad()
    with InjectOOM(at=[13]):
        mbs.backward(cross_entropy(model), batch)
    return off_by(model, whole_gradient(model, lambda twin: cross_entropy(twin)(batch))) <= 1e-12


def assert_as_by_hand(model: nn.Module, twin: nn.Module, result: StepResult, x: Tensor) -> None:
    """Check that the buffers are those of `twin` after a run of the committed pieces.

    `twin` is the model as it was before the call.
    """
    for start, stop in result.partition:
        twin(x[start:stop])
    for (name, buffer), wanted in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.allclose(buffer, wanted, rtol=1e-12), name


def elsewhere(model: nn.Module) -> nn.Module:
    """Move the model to "meta", as the device that its values are brought to, and return it.

    It stands for a device that is not the CPU.
    """
    model.to("meta")
    vars(model)["_hf_hook"] = types.SimpleNamespace(execution_device="meta")
    return model


def rungs_in_use() -> tuple[Step, ...] | None:
    """Return the steps of `escalate` in the call that runs; None where none does, as in a plan."""
    call = running_call()
    if call is None:
        return None
    turn, ladder = call.parts.turn, call.parts.profile.ladder
    steps: tuple[Step, ...] = ladder.steps if turn is None else turn.steps
    return steps
