"""A guarded step is made whole or not at all, wherever memory runs out in it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, MemoryBudget, MemoryOptions, MisuseError, OptimizerOutOfMemory, OptimizerStepError, StepInsideError, UsageError
from elastic_mbs.optimizer.guarded_step import _signature
from elastic_mbs.optimizer.known import only_in_place
from elastic_mbs.optimizer.step_ways import BEST
from elastic_mbs.testing import InjectOOM

pytestmark = pytest.mark.injectable

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}, ("loop", "foreach", "fused")),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, ("loop", "foreach", "fused")),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}, ("loop", "foreach", "fused")),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}, ("loop", "foreach", "fused")),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, ("loop", "foreach", "fused")),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}, ("loop", "foreach")),
}
CASES = [(name, implementation) for name, (_, _, offered) in OPTIMIZERS.items() for implementation in offered]


class Everywhere(InjectOOM):
    """Fails at operations in place too: what is refused there has not happened, what came before it has."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        reads = func._schema.name in ("aten::_local_scalar_dense", "aten::copy_", "aten::detach")
        if not (view or reads):
            self.step(func._schema.name)
        return func(*args, **(kwargs or {}))


class World:
    """A small model with gradients, its optimizer and a runtime."""

    def __init__(self, name: str, implementation: str, *, steps: int, scaled: bool, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        cls, options, _ = OPTIMIZERS[name]
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
        head, body = list(self.model[1].parameters()), list(self.model[0].parameters())
        groups: list[dict[str, Any]] = [{"params": body}, {"params": head, "lr": 0.05}]
        self.optimizer = cls(groups, **options, **IMPLEMENTATIONS[implementation])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        self.events: list[Any] = []
        self.mbs = ElasticMBS(
            self.model, scaler=self.scaler, on_event=self.events.append, memory=MemoryOptions(monitor_interval=0, wait_for_memory=0)
        )
        for _ in range(steps):
            self.backward()
            self.plain()
        self.backward()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        x = torch.linspace(-1, 2, 15, dtype=next(self.model.parameters()).dtype).reshape(5, 3)
        loss = self.model(x).pow(2).mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def plain(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def guarded(self) -> None:
        self.mbs.optimizer_step(self.optimizer)

    def update(self) -> None:
        if self.scaler is not None:
            self.scaler.update()

    def values(self) -> dict[str, Any]:
        """Everything that a step changes, by value."""
        return deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def off_by(a: Any, b: Any) -> float:
    """The largest relative difference of two nested values; infinite where they differ otherwise."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) if a.shape == b.shape else float("inf")
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((off_by(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return max((off_by(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    return 0.0 if type(a) is type(b) and a == b else float("inf")


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("steps", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize(("name", "implementation"), CASES, ids=["-".join(case).replace(" ", "_") for case in CASES])
def test_wherever_it_runs_out_of_memory_a_step_is_made_whole_or_not_at_all(name: str, implementation: str, steps: int, scaled: bool) -> None:
    reference = World(name, implementation, steps=steps, scaled=scaled)
    reference.plain()
    wanted, following = reference.values(), None
    allocates_nothing = only_in_place(World(name, implementation, steps=steps, scaled=scaled).optimizer)
    # Where copies are taken, operations in place fail as well: their errors are others than memory's on a real device, but no less half-way.
    harness = InjectOOM if allocates_nothing else Everywhere
    points = 0
    for pattern in ("once", "twice", "persistent"):
        number = 0
        while True:
            number += 1
            world = World(name, implementation, steps=steps, scaled=scaled)
            before = world.values()
            at = {"once": [number], "twice": [number, number + 3], "persistent": []}[pattern]
            inject = harness(at=at, always_from=number if pattern == "persistent" else None)
            try:
                with inject:
                    world.guarded()
            except OptimizerStepError:
                assert off_by(world.values(), before) == 0.0, (pattern, number, inject.hits)
                world.guarded()  # it may be called again
            world.update()
            assert off_by(world.values(), wanted) == 0.0, (pattern, number, inject.hits)
            points += bool(inject.hits)
            if pattern == "once" and number % 7 == 1:
                if following is None:
                    reference.backward()
                    reference.plain()
                    following = reference.values()
                world.backward()
                world.guarded()
                world.update()
                assert off_by(world.values(), following) == 0.0, (pattern, number)
            if not inject.hits:
                break
    assert points > 0 or (allocates_nothing and not scaled)


def test_a_recovered_step_is_told_of() -> None:
    world = World("AdamW", "foreach", steps=0, scaled=False)
    says = r"AdamW\.step\(\) does not fit, not even one parameter at a time.*may be called again"
    with InjectOOM(always_from=4), pytest.raises(OptimizerStepError, match=says):
        world.guarded()
    told = [event for event in world.events if isinstance(event, OptimizerOutOfMemory)]
    assert [event.action for event in told] == ["with the caches let go of", "one parameter at a time"]
    assert told[0].line().startswith("out of memory in AdamW.step(), which has been taken back; trying again with the caches let go of: injected")


# ---------------------------------------------------------------------- under a budget


def _wide(cls: type[torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))  # 16 × 16 KiB
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model, cls(model.parameters(), **options)


def test_a_first_step_whose_temporaries_do_not_fit_is_made_one_parameter_at_a_time() -> None:
    reference, optimizer = _wide(torch.optim.AdamW, foreach=True)
    optimizer.step()
    state_and_four_parameters = 2 * 16 * 2**14 + 4 * 2**14  # foreach needs sixteen
    model, optimizer = _wide(torch.optim.AdamW, foreach=True)
    with MemoryBudget("8MiB", track=(model, optimizer)) as budget:
        budget.limit = budget.live + state_and_four_parameters
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    model, optimizer = _wide(torch.optim.AdamW, foreach=True)
    events: list[Any] = []
    with MemoryBudget("8MiB", track=(model, optimizer)) as budget:
        mbs = ElasticMBS(model, on_event=events.append, memory=MemoryOptions(monitor_interval=0))
        budget.limit = budget.live + state_and_four_parameters
        mbs.optimizer_step(optimizer)
    assert [event.action for event in events if isinstance(event, OptimizerOutOfMemory)] == ["with the caches let go of", "one parameter at a time"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_where_not_even_one_parameters_state_fits_everything_stays_as_it_was() -> None:
    model, optimizer = _wide(torch.optim.Adam, foreach=True)
    before = [p.detach().clone() for p in model.parameters()]
    with MemoryBudget("8MiB", track=(model, optimizer)) as budget:
        mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0))
        budget.limit = budget.live + 2**14
        with pytest.raises(OptimizerStepError, match=r"16\.0 KiB of 8\.0 MiB were free at the last look, 7\.5 MiB held by others.*fused=True"):
            mbs.optimizer_step(optimizer)
        assert not optimizer.state
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        live = budget.live
        budget.limit = "8MiB"
        mbs.optimizer_step(optimizer)
        gc.collect()
        assert budget.live == live + 2 * 16 * 2**14 + 16 * 4  # the state, and nothing of the copies or of what failed


@pytest.mark.parametrize("room", [True, False])
def test_copies_are_on_the_device_where_they_fit_and_on_the_host_otherwise(room: bool) -> None:
    model, optimizer = _wide(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)
    optimizer.step()
    with MemoryBudget("64MiB", track=(model, optimizer)) as budget:
        mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0))
        if not room:
            budget.limit = budget.live + 2**16
        budget.reset_peak()
        before = budget.live
        mbs.optimizer_step(optimizer)
        assert (budget.peak - before >= 2 * 16 * 2**14) == room
        assert budget.ooms == 0


def test_a_fused_step_takes_no_copies() -> None:
    model, optimizer = _wide(torch.optim.AdamW, fused=True)
    optimizer.step()
    with MemoryBudget("64MiB", track=(model, optimizer)) as budget:
        mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0))
        budget.reset_peak()
        before = budget.live
        mbs.optimizer_step(optimizer)
        assert budget.peak == before


def test_a_fused_step_that_ends_half_way_by_another_error_says_what_it_leaves() -> None:
    world = World("AdamW", "fused", steps=1, scaled=False)
    with Everywhere(at=[4]), pytest.raises(torch.OutOfMemoryError) as caught:  # nothing there can allocate on a real device
        world.guarded()
    assert caught.value.__notes__ == ["elastic_mbs: a fused step, of which no copies are taken, ended half-way: load the last checkpoint."]


# ---------------------------------------------------------------------- others' optimizers, hooks, schedulers, scalers


class Coupled(torch.optim.Optimizer):
    """Divides by the norm of all gradients together, and changes them in place, as older optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's signature is wider
        self.count += 1
        own = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            state = self.state[p]
            if "seen" not in state:
                state["seen"] = {"mean": torch.zeros_like(p), "list": [0]}
            p.grad.add_(p, alpha=0.1)
            state["seen"]["mean"] = state["seen"]["mean"] * 0.9 + p.grad
            state["seen"]["list"].append(self.count)
            p.sub_(state["seen"]["mean"] / norm, alpha=0.1)
        for group in self.param_groups:
            group["norm"] = norm


def test_an_optimizer_of_others_is_taken_back_and_tried_again_as_a_whole() -> None:
    reference, _ = _wide(torch.optim.SGD, lr=0.1)
    wanted = Coupled(reference.parameters())
    wanted.step()
    number = 0
    while True:
        number += 1
        model, _ = _wide(torch.optim.SGD, lr=0.1)
        optimizer = Coupled(model.parameters())
        mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0))
        with InjectOOM(at=[number]) as inject:
            mbs.optimizer_step(optimizer)
        assert off_by(optimizer.state_dict(), wanted.state_dict()) == 0.0
        assert optimizer.count == 1
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
        if not inject.hits:
            break
        if number in (10, 20, 30):
            before = deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
            with InjectOOM(always_from=number), pytest.raises(OptimizerStepError, match=r"Coupled\.step\(\) does not fit\. It asked for"):
                mbs.optimizer_step(optimizer)
            assert off_by((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]), before) == 0.0
    assert number > 60


@pytest.mark.no_oom_injection
def test_what_a_step_of_others_takes_is_learned_for_the_next() -> None:
    model, _ = _wide(torch.optim.SGD, lr=0.1)
    optimizer = Coupled(model.parameters())
    with MemoryBudget("64MiB", track=[model]):
        mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0))
        mbs.optimizer_step(optimizer)
        mbs.optimizer_step(optimizer)
    size = 16 * 2**14
    learned = {fresh: needed for (name, of, fresh), needed in mbs._parts.optimizer_needs.items() if (name, of) == ("Coupled", size)}
    assert size <= learned[True] <= size + 4 * 2**14 + 2**10
    assert learned[False] < learned[True]


def test_step_hooks_run_once_however_often_the_step_is_tried() -> None:
    world = World("Adam", "foreach", steps=1, scaled=False)
    calls: list[str] = []
    world.optimizer.register_step_pre_hook(lambda *a: calls.append("before"))
    world.optimizer.register_step_post_hook(lambda *a: calls.append("after"))
    with Everywhere(at=[12, 25]) as inject:
        world.guarded()
    assert len(inject.hits) == 2
    assert calls == ["before", "after"]
    with Everywhere(always_from=12), pytest.raises(OptimizerStepError):
        world.guarded()
    assert calls == ["before", "after", "before"]
    world.optimizer.step()
    assert calls == ["before", "after", "before", "before", "after"]  # they are back where they were


@pytest.mark.parametrize("hook", ["pre", "post"])
def test_an_error_in_a_users_hook_passes_through_and_is_no_reason_to_step_again(hook: str) -> None:
    world = World("Adam", "foreach", steps=1, scaled=False)
    before, calls = world.values(), []

    def fail(*args: Any) -> None:
        calls.append(hook)
        raise torch.OutOfMemoryError("CUDA out of memory. in the hook")

    getattr(world.optimizer, f"register_step_{hook}_hook")(fail)
    with pytest.raises(torch.OutOfMemoryError, match="in the hook"):
        world.guarded()
    assert calls == [hook]
    assert (off_by(world.values(), before) == 0.0) == (hook == "pre")


def test_a_hook_that_changes_the_arguments_is_refused() -> None:
    world = World("Adam", "foreach", steps=1, scaled=False)
    before = world.values()
    world.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, kwargs))
    with pytest.raises(MisuseError, match="changes the arguments"):
        world.guarded()
    assert off_by(world.values(), before) == 0.0


def test_a_scheduler_sees_the_step() -> None:
    world = World("SGD", "foreach", steps=0, scaled=False)
    scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 1)
    with InjectOOM(at=[1]):
        world.guarded()
    scheduler.step()  # warns, and so fails here, where it has seen no step
    assert world.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_the_scaler_leaves_a_step_out_where_a_gradient_is_not_finite(implementation: str, unscaled: bool) -> None:
    world = World("AdamW", implementation, steps=1, scaled=True)
    assert world.scaler is not None
    before, after = world.values(), []
    world.optimizer.register_step_post_hook(lambda *a: after.append(1))
    next(world.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]  # it has one
    if unscaled:
        world.scaler.unscale_(world.optimizer)
    with InjectOOM(at=[3]):
        world.guarded()
    world.update()
    assert off_by(world.values()["model"], before["model"]) == 0.0
    assert world.scaler.get_scale() == 512.0
    assert after == ([1] if implementation == "fused" else [])  # the fused one is stepped, and leaves its values alone


def test_gradients_of_several_types_are_unscaled_once_each_wherever_that_fails() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, ElasticMBS]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(3, 3).double(), nn.Linear(3, 3), nn.Embedding(5, 3, sparse=True)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x = torch.ones(2, 3)
        loss = model[0](x.double()).sum().float() + model[1](x).sum() + model[2](torch.tensor([1, 1, 3])).sum()
        scaler.scale(loss).backward()
        return model, optimizer, scaler, ElasticMBS(model, scaler=scaler, memory=MemoryOptions(monitor_interval=0))

    reference, optimizer, scaler, _ = make()
    scaler.step(optimizer)
    number, hit = 0, True
    while hit:
        number += 1
        model, optimizer, scaler, mbs = make()
        with Everywhere(at=[number]) as inject:
            mbs.optimizer_step(optimizer)
        hit = bool(inject.hits)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True)), inject.hits
    assert number > 15
    model, optimizer, scaler, mbs = make()
    with InjectOOM(always_from=1), pytest.raises(OptimizerStepError, match="no room to unscale"):
        mbs.optimizer_step(optimizer)
    mbs.optimizer_step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


# ---------------------------------------------------------------------- what passes through, and what is refused


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_any_other_error_passes_through_and_leaves_everything_as_it_was(error: type[BaseException]) -> None:
    class Ends(InjectOOM):
        def step(self, name: str) -> None:
            self.count += 1
            if self.count == 12:
                raise error("stop")

    world = World("Adam", "loop", steps=1, scaled=False)
    before = world.values()
    with pytest.raises(error, match="stop") as caught, Ends():
        world.guarded()
    assert off_by(world.values(), before) == 0.0
    assert caught.value.__notes__ == ["elastic_mbs: parameters and optimizer state are as they were before this step."]


def test_without_gradients_nothing_happens_but_the_hooks() -> None:
    world = World("Adam", "foreach", steps=1, scaled=False)
    world.optimizer.zero_grad()
    before, calls = world.values(), []
    world.optimizer.register_step_post_hook(lambda *a: calls.append(1))
    world.guarded()
    assert off_by(world.values(), before) == 0.0
    assert calls == [1]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_runtime_that_is_not_enabled_steps_plainly(scaled: bool) -> None:
    reference = World("Adam", "foreach", steps=1, scaled=scaled)
    reference.plain()
    world = World("Adam", "foreach", steps=1, scaled=scaled)
    ElasticMBS(world.model, scaler=world.scaler, enabled=False).optimizer_step(world.optimizer)
    world.update()
    assert off_by(world.values(), reference.values()) == 0.0


def test_what_cannot_be_stepped_is_refused_by_name() -> None:
    world = World("Adam", "foreach", steps=1, scaled=False)
    with pytest.raises(UsageError, match="LBFGS runs its closure"):
        world.mbs.optimizer_step(torch.optim.LBFGS(world.model.parameters()))
    with pytest.raises(UsageError, match="takes no closure"):
        world.mbs.optimizer_step(world.optimizer, lambda: 1.0)
    with pytest.raises(UsageError, match="got a int, which is no torch"):
        world.mbs.optimizer_step(3)  # type: ignore[arg-type]  # the mistake
    wrapper = type("Wrapper", (), {"optimizer": world.optimizer})()
    with pytest.raises(UsageError, match=r"got a Wrapper.*pass the Adam inside it"):
        world.mbs.optimizer_step(wrapper)
    accelerated = type("Accelerated", (torch.optim.Optimizer,), {"__init__": lambda self, inner: setattr(self, "optimizer", inner)})
    with pytest.raises(UsageError, match=r"got a Accelerated, which never called Optimizer.__init__: pass the Adam inside it, its \.optimizer, if"):
        world.mbs.optimizer_step(accelerated(world.optimizer))
    for micro in world.mbs.micro_batches(torch.ones(4, 3, dtype=torch.float64)):
        with pytest.raises(StepInsideError), micro:
            world.guarded()
        break


@pytest.mark.no_oom_injection
def test_a_step_that_fits_one_parameter_at_a_time_does_not_fail_first_every_time_and_finds_back() -> None:
    reference, plain = _wide(torch.optim.AdamW, foreach=True)
    for _ in range(45):
        plain.step()
    model, optimizer = _wide(torch.optim.AdamW, foreach=True)
    events: list[Any] = []
    failed: list[int] = []
    with MemoryBudget("8MiB", track=(model, optimizer)) as budget:
        mbs = ElasticMBS(model, on_event=events.append, memory=MemoryOptions(monitor_interval=0))
        for step in range(45):
            if step == 1:
                budget.limit = budget.live + 4 * 2**14  # foreach needs sixteen
            if step == 34:
                budget.limit = "8MiB"
            mbs.optimizer_step(optimizer)
            if any(isinstance(event, OptimizerOutOfMemory) for event in events):
                failed.append(step)
            events.clear()
        assert mbs._parts.step_ways.first(_signature(optimizer)) == BEST
    assert failed == [1, 3, 6, 11, 20]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
