"""Offloaded tensors come back one ahead of backward, in a stream of their own, exactly.

The simulated CUDA lets such a copy arrive no earlier than the streams and events demand, so that a
stream that does not wait computes with something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import Escalated, Event
from elastic_mbs.dispatch import VersionedMode, run
from elastic_mbs.escalation.ladder import Step, steps_of
from elastic_mbs.escalation.offload import OffloadedTensors
from elastic_mbs.testing import InjectOOM
from stress.limits.simcuda import Simulation
from stress.reference.state import error_of
from tests.helpers.room import MEBI, Room
from tests.helpers.steps import elastic, grads, whole_gradient

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
LAYERS, WIDTH, ROWS = 5, 64, 512


def deep(rows: int = ROWS) -> tuple[nn.Module, Tensor, list[Tensor | None]]:
    """Return a model, one sample on the device, and its gradient."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).double()
    x = torch.randn(1, rows, WIDTH, dtype=torch.float64)
    wanted = whole_gradient(model, lambda twin: twin(x).square().mean())
    return (
        model.to(DEVICE),
        x.to(DEVICE),
        [None if grad is None else grad.to(DEVICE) for grad in wanted],
    )


def offloaded(model: nn.Module, x: Tensor, *, ahead: bool) -> OffloadedTensors:
    return OffloadedTensors(lambda: [x, *model.parameters()], ahead=ahead)


class Queued(VersionedMode):
    """A log of the copies from the host ("main" or "side") and of the products ("product")."""

    def __init__(self) -> None:
        super().__init__()
        self.main = torch.cuda.current_stream()
        self.seen = list[str]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name
        if name == "aten::copy_" and args[1].device.type == "cpu":
            side = torch.cuda.current_stream() != self.main
            self.seen.append("side" if side else "main")
        elif name == "aten::mm":
            self.seen.append("product")
        return run(func, args, kwargs)


def see_the_order(line: Callable[[object], None]) -> None:
    model, x, wanted = deep()
    simulation = Simulation()
    with offloaded(model, x, ahead=True):
        loss = model(x).square().mean()
        torch.cuda.synchronize()
        waits = simulation.waits()
        with Queued() as queued:
            loss.backward()
        assert simulation.waits() == waits  # the host never waits
    # Only the first one is asked for before anything was copied ahead.
    assert queued.seen[0] == "main"
    assert set(queued.seen[1:]) == {"side", "product"}
    products = [at for at, kind in enumerate(queued.seen) if kind == "product"]
    copies = [at for at, kind in enumerate(queued.seen) if kind == "side"]
    for product in products[: -LAYERS // 2]:
        assert any(at < product for at in copies)
    assert copies[-1] < products[-2]
    assert error_of(grads(model), wanted) <= 1e-12


def test_the_next_tensor_is_on_its_way_while_backward_computes(
    apart: Callable[..., None],
) -> None:
    apart(see_the_order, SIMCUDA_LAG_US=2000)


def test_the_tensor_ahead_is_the_only_memory_more(simulation: Simulation) -> None:
    peaks = []
    for ahead in (False, True):
        model, x, wanted = deep(rows=MEBI // WIDTH // 8)
        with offloaded(model, x, ahead=ahead):
            loss = model(x).square().mean()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert error_of(grads(model), wanted) <= 1e-12
    assert peaks[0] < peaks[1] <= peaks[0] + MEBI


def test_memory_of_a_dropped_tensor_is_not_used_before_its_copy_is_done(
    simulation: Simulation,
) -> None:
    model, x, _ = deep()
    table = offloaded(model, x, ahead=True)

    def fails(grad: Tensor) -> None:
        raise ValueError

    with table:
        hidden = model[:3](x)  # type: ignore[index]
        hidden.register_hook(fails)
        with pytest.raises(ValueError):
            model[3:](hidden).square().mean().backward()  # type: ignore[index]
    # one of them is where the next tensor was to arrive
    mine = [torch.full_like(hidden, i) for i in range(8)]
    torch.cuda.synchronize()
    assert all(bool((each == i).all()) for i, each in enumerate(mine))


def test_a_graph_that_is_kept_has_its_gradient_twice(simulation: Simulation) -> None:
    model, x, wanted = deep()
    with offloaded(model, x, ahead=True):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    twice = [None if grad is None else 2 * grad for grad in wanted]
    assert error_of(grads(model), twice) <= 1e-12


def test_where_the_tensor_ahead_does_not_fit_none_is_copied_ahead(simulation: Simulation) -> None:
    model, x, wanted = deep(rows=MEBI // WIDTH)
    events: list[Event] = []

    def loss_fn(piece: Tensor) -> Tensor:
        found: Tensor = model(piece).square().mean()
        return found

    def needs(ahead: bool) -> int:
        def once() -> None:
            with offloaded(model, x, ahead=ahead):
                loss_fn(x).backward()

        once()
        return room.need(once)

    with Room(DEVICE, model) as room:
        room.track(x)
        little, more = needs(False), needs(True)
        model.zero_grad(set_to_none=False)
        assert more > little
        room.allow((little + more) // 2)
        mbs = elastic(model, escalate=("offload",), on_event=events.append)
        model.zero_grad()
        mbs.backward(loss_fn, x)
        assert error_of(grads(model), wanted) <= 1e-12
        model.zero_grad()
        assert mbs.backward(loss_fn, x).ooms == 0
    taken = [(each.by, each.part) for each in events if isinstance(each, Escalated)]
    assert taken == [("offload", "one tensor ahead"), ("offload", "")]


def test_out_of_memory_at_any_operation_leaves_the_exact_gradient(simulation: Simulation) -> None:
    model, x, wanted = deep()
    events: list[Event] = []

    def loss_fn(piece: Tensor) -> Tensor:
        if not any(isinstance(event, Escalated) for event in events):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        found: Tensor = model(piece).square().mean()
        return found

    mbs = elastic(model, escalate=("offload",), on_event=events.append)
    mbs.backward(loss_fn, x)
    struck = 0
    for after in range(1, 300):
        model.zero_grad()
        with InjectOOM(at=[after]) as injected:
            mbs.backward(loss_fn, x)
        assert error_of(grads(model), wanted) <= 1e-12, after
        struck += bool(injected.hits)
        if not injected.hits:
            break
    assert 30 < struck < 299
    assert len([event for event in events if isinstance(event, Escalated)]) == 1


def test_only_a_device_that_copies_ahead_has_the_step() -> None:
    assert list(steps_of("offload", lambda: 0)) == [Step("offload")]
    ahead = list(steps_of("offload", lambda: 0, copies_ahead=True))
    assert ahead == [Step("offload", ahead=True), Step("offload")]
