"""Each gradient gets every sample once, with custom functions, hooks, routes, shared memory."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic_mbs import OptimizerInBackwardError, OutOfMemory
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.errors import GradientsChangedError, ReplayUnsafeError
from elastic_mbs.events import Event
from elastic_mbs.testing import InjectOOM
from tests.helpers.step_kinds import (
    Meeting,
    Routed,
    Step,
    becoming,
    gradients_there,
    hidden_leaves_outside,
    hook_on,
    leaves_outside,
    no_gradient_for_a_leaf,
    plain,
    routed_by_sample,
    unwritable_gradient,
)
from tests.helpers.steps import (
    FailOn,
    Pair,
    cross_entropy,
    elastic,
    failing,
    grads,
    mlp,
    off_by,
    pairs,
    settled,
    through,
    whole_gradient,
)
from tests.helpers.strikes import every_operation

ROUTES = [[0, 1, 1], [1, 1, 1], [0, 0, 1]]
# Each row has the maker, the number of clean calls before memory runs out, and the replays of a
# piece that had partly committed.
STEPS = {
    "plain": (plain, 2, {"step"}),
    "gradients there": (gradients_there, 2, {"isolate"}),
    "no gradient for a leaf": (no_gradient_for_a_leaf, 0, {"step"}),
    "no gradient for a leaf, known": (no_gradient_for_a_leaf, 1, {"step"}),
    "unwritable gradient": (unwritable_gradient, 1, {"isolate"}),
    "hook on each": (hook_on, 1, {"step"}),
    "hook on another": (lambda: hook_on(0), 0, {"step"}),
    "hook on another, known": (lambda: hook_on(0), 1, {"step"}),
    "hook on another, late": (lambda: hook_on(0, late=True), 1, {"step"}),
    **{
        f"routes {used}": (becoming(Routed, used=used), 1, {"step"} if used[1] else set())
        for used in ROUTES
    },
    "routes by sample": (routed_by_sample, 1, {"step"}),
    "one place": (becoming(Meeting), 0, {"step"}),
    "one place, known": (becoming(Meeting), 1, {"step"}),
    "one place, isolated": (becoming(Meeting, replay="isolate"), 0, {"isolate"}),
    "one place, wide": (becoming(Meeting, accumulate_dtype=torch.float32), 0, {"isolate"}),
    "coming into one place": (
        becoming(lambda: Meeting(apart=True), apart=False),
        1,
        {"step"},
    ),
    "coming into one seed": (
        becoming(lambda: Meeting(1, apart=True), apart=False),
        1,
        {"step"},
    ),
    "hidden leaves outside": (hidden_leaves_outside, 0, {"step"}),
    "hidden leaves outside, known": (hidden_leaves_outside, 1, {"step"}),
    "leaves outside": (leaves_outside, 0, {"step"}),
    "leaves outside, known": (leaves_outside, 1, {"step"}),
}


@pytest.mark.parametrize(("make", "calls", "modes"), STEPS.values(), ids=STEPS)
def test_gradients_are_exact_wherever_memory_runs_out(
    make: Callable[..., Step], calls: int, modes: set[str], door: int
) -> None:
    events: list[Event] = []
    for inject in every_operation(stride=4, least=8, first=1 if door == 1 else 3):
        step = make()
        mbs = elastic(step.model, micro_batch_size=3, on_event=events.append, **step.options)
        for _ in range(calls):
            through(door, mbs, step.loss_fn, step.batch)
        step.model.zero_grad()
        step.begin()
        with inject:
            through(door, mbs, step.loss_fn, step.batch)
        assert off_by(step.leaves or step.model, step.wanted) <= 1e-12
    assert {
        event.mode for event in events if isinstance(event, OutOfMemory) and event.committed
    } == modes


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has none")
@pytest.mark.parametrize("there", [False, True])
def test_gradients_wider_than_their_leaves_keep_their_type(there: bool) -> None:
    model, (x, y) = mlp().bfloat16(), pairs()
    batch = x.bfloat16(), y
    for leaf in model.parameters():
        leaf.grad_dtype = torch.float32
        leaf.grad = torch.ones(leaf.shape) if there else None
    before = [leaf.grad for leaf in model.parameters()]
    mbs = elastic(model, micro_batch_size=4, accumulate_dtype=torch.float32)
    mbs.backward(cross_entropy(model), batch)
    for leaf, grad in zip(model.parameters(), before, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype is torch.float32
        assert leaf.grad is grad or not there
    fail = FailOn(2, error=lambda: ValueError("a mistake"))
    with pytest.raises(ValueError, match="a mistake") as caught:
        mbs.backward(failing(model, fail), batch)
    assert any("may hold a part of it" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("start", ["empty", "zeros", "isolated"])
def test_a_hidden_leaf_outside_that_appears_late_is_refused_or_exact(start: str) -> None:
    """Nobody looked for it where the call is not the first, so its commits are not known."""
    for inject in every_operation(stride=7):
        model, outside, batch = mlp(), nn.Linear(4, 4).double(), pairs()
        tails = list[nn.Module]()

        def loss_fn(
            piece: Pair, model: nn.Module = model, tails: list[nn.Module] = tails
        ) -> Tensor:
            out: Any = model(piece[0])
            for tail in tails:
                out = checkpoint(tail, out, use_reentrant=True)
            return nn.functional.cross_entropy(out, piece[1])

        both = nn.Sequential(model, outside)
        cross_entropy(both)(batch).backward()
        wanted = grads(both)
        both.zero_grad()
        replay = "isolate" if start == "isolated" else "auto"
        mbs = elastic(model, micro_batch_size=4, replay=replay)
        for _ in range(2):
            mbs.backward(loss_fn, batch)
        model.zero_grad(set_to_none=start != "zeros")
        tails.append(outside)
        with suppress(ReplayUnsafeError):
            with inject:
                mbs.backward(loss_fn, batch)
            assert off_by(both, wanted) <= 1e-12


@pytest.mark.no_oom_injection
def test_a_function_that_appears_late_is_refused_once_where_gradients_are_there() -> None:
    model, batch, late = mlp(), pairs(), list[bool]()
    wanted = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))

    def loss_fn(piece: Pair) -> Tensor:
        hidden: Any = model[:2](piece[0])
        out: Any = checkpoint(model[2], hidden, use_reentrant=True) if late else model[2](hidden)
        return nn.functional.cross_entropy(out, piece[1])

    mbs = elastic(model, micro_batch_size=4)
    for _ in range(2):
        mbs.backward(loss_fn, batch)
    late.append(True)
    model.zero_grad(set_to_none=False)
    with pytest.raises(ReplayUnsafeError, match="came into the graph"), InjectOOM(at=[12]):
        mbs.backward(loss_fn, batch)
    model.zero_grad(set_to_none=False)
    with InjectOOM(at=[12]) as inject:
        mbs.backward(loss_fn, batch)
    assert inject.hits
    assert off_by(model, wanted) <= 1e-12


def test_no_hook_is_ever_on_the_users_model(model: nn.Sequential, batch: Pair, door: int) -> None:
    hooks: list[int] = []

    def loss_fn(piece: Pair) -> Tensor:
        hooks.extend(
            len(leaf._post_accumulate_grad_hooks or ()) + len(leaf._backward_hooks or ())
            for leaf in model.parameters()
        )
        return cross_entropy(model)(piece)

    mbs = elastic(model, micro_batch_size=3)
    for at in (0, 12, 0):
        with InjectOOM(at=[at]) as inject:
            through(door, mbs, loss_fn, batch)
        assert len(inject.hits) == (at > 0)
    assert set(hooks) == {0}


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("size", [3, 8])
def test_a_late_hook_that_clears_gradients_is_noticed_at_once(
    door: int, filled: bool, size: int
) -> None:
    step = gradients_there() if filled else plain()
    mbs = settled(door, step.model, step.loss_fn, step.batch, micro_batch_size=size)
    step.begin()

    for leaf in step.model.parameters():
        leaf.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
    with pytest.raises(OptimizerInBackwardError):
        through(door, mbs, step.loss_fn, step.batch)


def test_gradients_are_the_users_until_the_first_piece_has_committed(door: int) -> None:
    """A backward between batches is allowed, and so is clearing gradients in the first piece."""
    step = plain()

    def loss_fn(piece: Pair) -> Tensor:
        step.model.zero_grad()
        return step.loss_fn(piece)

    mbs = settled(door, step.model, loss_fn, step.batch, micro_batch_size=8)
    step.loss_fn(step.batch).backward()
    through(door, mbs, loss_fn, step.batch)
    assert off_by(step.model, step.wanted) <= 1e-12


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_with_graphs_of_its_own_may_run_under_no_grad(
    door: int, mode: Callable[[], Any]
) -> None:
    step = plain()

    def loss_fn(piece: Pair) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            loss = step.loss_fn(tuple(part.clone() for part in piece))
        torch.set_grad_enabled(False)  # gradients may be off behind the step
        return loss

    mbs = elastic(step.model, micro_batch_size=3)
    for closed in (True, False, True, True):
        step.model.zero_grad()
        with mode() if closed else torch.enable_grad():
            through(door, mbs, loss_fn, step.batch)
        assert off_by(step.model, step.wanted) <= 1e-12


def _replace(model: nn.Module) -> None:
    for leaf in model.parameters():
        leaf.grad = None if leaf.grad is None else 2 * leaf.grad


def _replace_one(model: nn.Module) -> None:
    leaf = next(model.parameters())
    leaf.grad = None if leaf.grad is None else 2 * leaf.grad


def _edit_one(model: nn.Module) -> None:
    leaf = next(model.parameters())
    leaf.grad = None if leaf.grad is None else leaf.grad.mul_(2)


@pytest.mark.parametrize("meddle", [_replace, _replace_one, _edit_one, nn.Module.zero_grad])
def test_gradients_changed_by_other_code_inside_a_batch_are_refused(
    door: int, meddle: Callable[[nn.Module], None]
) -> None:
    """Wherever memory runs out as well, a call gives the exact gradient or a typed error."""
    step, calls = plain(), list[int]()

    def loss_fn(piece: Pair) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            meddle(step.model)
        return step.loss_fn(piece)

    for injected in every_operation(stride=7):
        calls.clear()
        step.model.zero_grad()
        mbs = settled(door, step.model, step.loss_fn, step.batch, micro_batch_size=2)
        with injected, suppress(GradientsChangedError, ReplayUnsafeError):
            through(door, mbs, loss_fn, step.batch)
            assert off_by(step.model, step.wanted) <= 1e-12
    step.model.zero_grad()
    calls.clear()
    with pytest.raises(GradientsChangedError):
        through(door, mbs, loss_fn, step.batch)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_that_a_hook_replaces_are_exact_wherever_memory_runs_out(
    door: int, size: int
) -> None:
    step = plain()
    for leaf in step.model.parameters():
        leaf.register_post_accumulate_grad_hook(
            lambda leaf: setattr(leaf, "grad", leaf.grad.clone())
        )
    for injected in every_operation(stride=13):
        mbs = settled(door, step.model, step.loss_fn, step.batch, micro_batch_size=size)
        with injected:
            through(door, mbs, step.loss_fn, step.batch)
        assert off_by(step.model, step.wanted) <= 1e-12


def test_gradients_cleared_after_the_call_began_are_this_calls_own() -> None:
    """Gradients that do not exist any more are not the user's.

    Two new gradients in the same memory each have to get memory of their own.
    """
    step = becoming(Meeting)()
    mbs = elastic(step.model, micro_batch_size=3)
    for _ in range(3):
        pieces = mbs.micro_batches(step.batch)
        step.model.zero_grad()
        for micro in pieces:
            with micro:
                micro.backward(step.loss_fn(micro.data))
        assert off_by(step.model, step.wanted) <= 1e-12


def test_two_step_functions_under_one_decorator_are_learned_apart() -> None:
    """Two functions under one decorator share the decorator's code.

    The second function has a leaf of its own, which is not one that appeared inside a batch.
    """
    step, scale = plain(), torch.ones((), dtype=torch.float64, requires_grad=True)
    mbs = settled(1, step.model, torch.enable_grad()(step.loss_fn), step.batch)
    with InjectOOM(at=[35]) as inject:
        mbs.backward(torch.enable_grad()(lambda piece: step.loss_fn(piece) * scale), step.batch)
    assert inject.hits
    assert (
        off_by([*step.model.parameters(), scale], [*step.wanted, step.loss_fn(step.batch).detach()])
        <= 1e-12
    )


def test_a_weighted_backward_gives_the_same_bits_as_torchs() -> None:
    ours, torchs = gradients_there(), gradients_there()
    for step in (ours, torchs):
        step.begin()
    attempt = Attempt(Range(0, 1, {None: 1 / 3}))
    attempt.weigh(ours.loss_fn(ours.batch), Counts.samples(3), None)
    assert attempt.graph is not None
    torch.autograd.backward(attempt.graph, attempt.weight)
    torch.autograd.backward(torchs.loss_fn(torchs.batch) * (1 / 3))
    assert off_by(ours.model, grads(torchs.model)) == 0
