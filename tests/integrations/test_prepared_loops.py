"""A loop of accelerate or Fabric with the runtime, under errors, trains as one without both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from lightning.fabric import Fabric, strategies
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from elastic_mbs import ElasticMBS, GradientOptions, MemoryBudget, UnsupportedError, UsageError
from elastic_mbs.integrations import accelerate as by_accelerate
from elastic_mbs.integrations import fabric as by_fabric
from elastic_mbs.testing import InjectOOM
from stress.reference.state import error_of
from tests.helpers.steps import FailOn, grads, mlp, pairs, quiet

pytestmark = [
    pytest.mark.no_oom_injection,
    pytest.mark.filterwarnings("ignore:The frontend of torch.compile:UserWarning"),
]

EXACT = 1e-12
LossFn = Callable[[Any], Tensor]


class Loop:
    """A training loop in a framework's words; `train(mbs)` is the loop with the runtime in it."""

    model: Any  # as the framework wraps it
    backward: Callable[[Tensor], object]
    clip: Callable[[], object]
    wrap: Callable[..., ElasticMBS]

    def __init__(self, model: nn.Module | None = None) -> None:
        self.plain = mlp() if model is None else model
        self.optimizer: Any = torch.optim.AdamW(self.plain.parameters(), lr=0.01)
        self.schedule: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.loader: Any = DataLoader(TensorDataset(*pairs(16)), 8)
        self.losses: list[float] = []

    def loss_fn(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def elastic(self, model: Any = None, **options: Any) -> ElasticMBS:
        return self.wrap(self.model if model is None else model, **quiet(**options))

    def train(
        self,
        mbs: ElasticMBS | None = None,
        inject: InjectOOM | None = None,
        *,
        guarded: bool = False,
    ) -> list[Any]:
        """Two steps; what a run leaves."""
        inject = inject or InjectOOM()
        for batch in self.loader:
            self.optimizer.zero_grad()
            if mbs is None:
                loss = self.loss_fn(batch)
                self.backward(loss)
            else:
                with inject:
                    loss = mbs.backward(self.loss_fn, batch).loss
            self.losses.append(float(loss.detach()))
            self.clip()
            if guarded:
                assert mbs is not None
                with inject:
                    mbs.optimizer_step(self.optimizer)
            else:
                self.optimizer.step()
            self.schedule.step()
        return self.left()

    def left(self) -> list[Any]:
        state = [
            entry[name]
            for entry in self.optimizer.state_dict()["state"].values()
            for name in ("step", "exp_avg", "exp_avg_sq")
        ]
        return [
            *self.plain.state_dict().values(),
            *state,
            torch.tensor([*self.losses, *self.schedule.get_last_lr()], dtype=torch.float64),
        ]


class AccelerateLoop(Loop):
    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        half: bool = False,
        scale: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(model)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(
            cpu=True, mixed_precision="bf16" if half else "fp16" if scale else "no", **options
        )
        if scale:  # accelerate makes a scaler on a GPU only
            self.accelerator.scaler = self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            self.accelerator.native_amp = True
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            self.plain, self.optimizer, self.schedule, self.loader
        )
        self.backward, self.clip = (
            self.accelerator.backward,
            lambda: self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5),
        )
        self.wrap = partial(by_accelerate.elastic, self.accelerator)


class FabricLoop(Loop):
    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        half: bool = False,
        scale: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
        plugin = (
            MixedPrecision("16-mixed", "cpu", self.scaler)
            if scale
            else MixedPrecision("bf16-mixed", "cpu")
            if half
            else None
        )
        self.fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin, **options)
        self.model, self.optimizer = self.fabric.setup(self.plain, self.optimizer)
        self.loader = self.fabric.setup_dataloaders(self.loader)
        self.backward = self.fabric.backward
        self.clip = lambda: self.fabric.clip_gradients(
            self.model, self.optimizer, max_norm=0.5, error_if_nonfinite=False
        )
        self.wrap = partial(by_fabric.elastic, self.fabric)


LOOPS = pytest.mark.parametrize("make", [AccelerateLoop, FabricLoop])


@pytest.fixture(autouse=True)
def _no_state_is_left_behind() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@LOOPS
@pytest.mark.parametrize("guarded", [False, True], ids=["plain-step", "guarded-step"])
def test_a_run_with_an_error_at_any_operation_is_the_frameworks_own(
    make: Any, guarded: bool
) -> None:
    wanted, at, hit = make().train(), 0, True
    while hit:
        at += 1
        loop, inject = make(), InjectOOM(at=[at])
        left = loop.train(loop.elastic(), inject, guarded=guarded)
        hit = bool(inject.hits)
        assert error_of(left, wanted) <= EXACT, at
    assert at > 30


@LOOPS
@pytest.mark.parametrize("guarded", [False, True], ids=["plain-step", "guarded-step"])
def test_a_run_in_too_little_memory_is_the_frameworks_own_run(make: Any, guarded: bool) -> None:
    def deep() -> nn.Module:  # it keeps a tensor per layer, and few weights
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 64), *(nn.Tanh() for _ in range(20)), nn.Linear(64, 4)
        ).double()

    loop = make(deep())
    with MemoryBudget("1GiB") as budget:
        wanted = loop.train()
    loop = make(deep())
    with MemoryBudget(budget.peak * 6 // 10), loop.elastic() as mbs:
        left = loop.train(mbs, guarded=guarded)
    assert mbs.stats.ooms
    assert error_of(left, wanted) <= EXACT


@LOOPS
@pytest.mark.parametrize("guarded", [False, True], ids=["plain-step", "guarded-step"])
def test_what_the_framework_does_around_a_step_it_does_once(make: Any, guarded: bool) -> None:
    seen: list[str] = []

    class Callback:
        def on_after_optimizer_step(self, **kwargs: Any) -> None:
            seen.append("callback")

    loop = make(**({"callbacks": [Callback()]} if make is FabricLoop else {}))
    loop.optimizer.optimizer.register_step_post_hook(lambda *args: seen.append("hook"))
    loop.train(loop.elastic(), InjectOOM(at=[1, 60]), guarded=guarded)
    assert seen == (["hook", "callback"] * 2 if make is FabricLoop else ["hook"] * 2)


# ---------------------------------------------------------------------- precision


@LOOPS
def test_bf16_rounds_as_the_frameworks_own_loop_over_the_same_pieces(make: Any) -> None:
    loop, twin = make(mlp().float(), half=True), make(mlp().float(), half=True)
    batch = pairs(8)[0].float(), pairs(8)[1]
    dtypes = set()
    loop.plain[0].register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    with InjectOOM(at=[5]):
        result = loop.elastic().backward(loop.loss_fn, batch)
    own = [
        twin.loss_fn(tuple(part[start:stop] for part in batch)) * (stop - start) / 8
        for start, stop in result.partition
    ]
    for loss in own:
        twin.backward(loss)
    assert len(own) > 1
    assert dtypes == {torch.bfloat16}
    assert float(result) == pytest.approx(sum(map(float, torch.stack(own).detach())), rel=1e-6)
    assert error_of(grads(loop.plain), grads(twin.plain)) <= 1e-6


@LOOPS
# Fabric's own loop goes on after a step that was skipped
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("scale", [1024.0, 2.0**60], ids=["fits", "overflows"])
def test_fp16_scales_clips_and_skips_steps_as_the_framework_does(make: Any, scale: float) -> None:
    def run(*, elastic: bool) -> tuple[list[Any], Any]:
        loop = make(mlp().float(), scale=scale)
        loop.loader = [(x.float(), y) for x, y in loop.loader]
        # a step is then as large as its gradient, and not as its sign
        loop.optimizer.param_groups[0]["eps"] = 1.0
        left = loop.train(loop.elastic() if elastic else None, inject := InjectOOM(at=[5]))
        assert len(inject.hits) == elastic
        return left, loop.scaler.state_dict()

    (wanted, scaler), (left, ours) = run(elastic=False), run(elastic=True)
    assert ours == scaler
    assert (scaler["scale"] == scale) == (scale == 1024.0)
    assert error_of(left, wanted) <= 5e-3


@LOOPS
def test_a_guarded_step_in_fp16_is_refused(make: Any) -> None:
    loop = make(mlp().float(), scale=1024.0)
    mbs = loop.elastic()
    mbs.backward(loop.loss_fn, (pairs(8)[0].float(), pairs(8)[1]))
    with pytest.raises(UnsupportedError, match=r"call optimizer\.step\(\), or use bf16"):
        mbs.optimizer_step(loop.optimizer)
    loop.optimizer.step()


# ---------------------------------------------------------------------- other doors


@LOOPS
def test_evaluation_of_a_wrapped_model_is_cut_too(make: Any) -> None:
    loop, x = make(), pairs(8)[0]
    mbs = loop.elastic()
    with InjectOOM(at=[2]) as inject:
        outputs = mbs.evaluate(loop.model, x)
    assert inject.hits
    assert error_of([outputs], [loop.plain(x)]) <= EXACT
    assert not outputs.requires_grad


@LOOPS
def test_the_other_doors_give_the_gradient_too(make: Any) -> None:
    loop, batch = make(), pairs(8)
    mbs = loop.elastic(micro_batch_size=3)
    loop.loss_fn(batch).backward()
    wanted = grads(loop.plain)
    loop.plain.zero_grad()
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.backward(loop.loss_fn(micro.data))
    assert error_of(grads(loop.plain), wanted) <= EXACT
    loop.plain.zero_grad()
    mbs.backward_embeddings(
        lambda piece: loop.model(piece[0]), lambda z: functional.cross_entropy(z, batch[1]), batch
    )
    assert error_of(grads(loop.plain), wanted) <= EXACT


@LOOPS
def test_compiled_models_and_several_of_them_are_unwrapped(make: Any) -> None:
    loop, other, batch = (
        make(torch.compile(mlp(), backend="eager", dynamic=True)),
        mlp(5, seed=3),
        pairs(8),
    )
    mbs, fail = loop.elastic([loop.model, other]), FailOn(2)

    def both(piece: Any) -> Any:
        fail()
        return loop.loss_fn(piece) + functional.cross_entropy(other(piece[0]), piece[1])

    loop.backward(both(batch))
    wanted = grads([*loop.plain.parameters(), *other.parameters()])
    loop.optimizer.zero_grad()
    other.zero_grad()
    result = mbs.backward(both, batch)
    assert len(result.partition) == 2
    assert error_of(grads([*loop.plain.parameters(), *other.parameters()]), wanted) <= EXACT


@LOOPS
def test_switched_off_it_is_the_frameworks_own_loop(make: Any) -> None:
    loop = make()
    assert error_of(loop.train(loop.elastic(enabled=False), guarded=True), make().train()) == 0


@LOOPS
def test_a_checkpoint_of_the_framework_has_what_was_learned_of_sizes(
    make: Any, tmp_path: Path
) -> None:
    def saved(loop: Any, mbs: ElasticMBS) -> None:
        if make is AccelerateLoop:
            loop.accelerator.register_for_checkpointing(mbs)
            loop.accelerator.save_state(str(tmp_path / "state"))
        else:
            loop.fabric.save(
                tmp_path / "state",
                {"model": loop.model, "optimizer": loop.optimizer, "elastic": mbs},
            )

    def loaded(loop: Any, mbs: ElasticMBS) -> None:
        if make is AccelerateLoop:
            loop.accelerator.register_for_checkpointing(mbs)
            loop.accelerator.load_state(str(tmp_path / "state"))
        else:
            loop.fabric.load(
                tmp_path / "state",
                {"model": loop.model, "optimizer": loop.optimizer, "elastic": mbs},
            )

    loop = make()
    mbs = loop.elastic()
    loop.train(mbs, InjectOOM(at=[5]))
    saved(loop, mbs)
    after = make()
    other = after.elastic()
    loaded(after, other)
    assert other.state_dict() == mbs.state_dict()
    assert other.backward(after.loss_fn, pairs(8)).micro_batch_size == 4


# ---------------------------------------------------------------------- refusals


@LOOPS
@pytest.mark.parametrize(
    "options",
    [
        {"scaler": torch.amp.GradScaler("cpu")},
        {"gradients": GradientOptions(backward=Tensor.backward)},
    ],
)
def test_what_belongs_to_the_framework_is_not_taken_from_the_user(
    make: Any, options: dict[str, Any]
) -> None:
    loop = make()
    with pytest.raises(UsageError, match=r"by itself: leave it out|part: leave it out"):
        loop.wrap(loop.model, **options)


@LOOPS
def test_an_option_that_is_none_is_named(make: Any) -> None:
    loop = make()
    with pytest.raises(
        UsageError,
        match=r"elastic\(\) for (accelerate|Fabric) has no option 'size': there are "
        r"micro_batch_size",
    ):
        loop.wrap(loop.model, size=4)


@pytest.mark.parametrize("module", [by_accelerate, by_fabric])
def test_arguments_in_the_wrong_order_are_named(module: Any) -> None:
    with pytest.raises(
        UsageError, match=r"=.Sequential.* is no .*elastic\((accelerator|fabric), model\)"
    ):
        module.elastic(mlp(), None)


@LOOPS
def test_a_model_that_is_none_is_named(make: Any) -> None:
    with pytest.raises(UsageError, match=r"model='loop' is a str"):
        make().wrap("loop")


def test_accumulation_by_accelerate_is_refused_early_and_late() -> None:
    loop = AccelerateLoop(gradient_accumulation_steps=4)
    with pytest.raises(
        UsageError, match=r"gradient_accumulation_steps=4: .* leave accelerator\.accumulate\(\) out"
    ):
        loop.elastic()
    loop.accelerator.gradient_accumulation_steps = 1
    mbs = loop.elastic()
    with loop.accelerator.accumulate(loop.model):  # of one step it does nothing
        mbs.backward(loop.loss_fn, pairs(8))
    loop.accelerator.gradient_accumulation_steps = 2
    for call in (lambda: mbs.backward(loop.loss_fn, pairs(8)), lambda: mbs.micro_batches(pairs(8))):
        with pytest.raises(UsageError, match="gradient_accumulation_steps=2"):
            call()


SERVED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


OTHERS = [kind for kind in DistributedType if kind not in (*SERVED, DistributedType.FSDP)]


@pytest.mark.parametrize("kind", OTHERS)
def test_distributed_accelerate_is_refused_by_name(
    kind: DistributedType, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = AccelerateLoop()
    monkeypatch.setattr(type(loop.accelerator), "distributed_type", kind)
    with pytest.raises(
        UnsupportedError,
        match=rf"distributed_type is {kind.value} .* run one process on one device",
    ):
        loop.elastic()


def test_the_first_version_of_fsdp_is_refused_with_the_way_to_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = AccelerateLoop()
    monkeypatch.setattr(type(loop.accelerator), "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(type(loop.accelerator), "is_fsdp2", False)
    with pytest.raises(UnsupportedError, match=r"fsdp_version=2"):
        loop.elastic()


def test_a_batch_that_ranks_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = AccelerateLoop()
    spread = SimpleNamespace(non_data_parallel_dim_names=["tp"])
    monkeypatch.setattr(type(loop.accelerator), "parallelism_config", spread)
    with pytest.raises(UnsupportedError, match=r"one batch over ranks \(tp\)"):
        loop.elastic()


@pytest.mark.parametrize(
    "strategy",
    [
        "FSDPStrategy",
        "DataParallelStrategy",
        "DeepSpeedStrategy",
        "XLAStrategy",
        "SingleDeviceXLAStrategy",
    ],
)
def test_distributed_fabric_is_refused_by_name(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = FabricLoop()
    monkeypatch.setattr(
        type(loop.fabric), "strategy", object.__new__(getattr(strategies, strategy))
    )
    monkeypatch.setattr(type(loop.fabric), "world_size", 2)
    with pytest.raises(
        UnsupportedError,
        match=rf"the strategy is {strategy} \(2 processes\): .* run one process on one device",
    ):
        loop.elastic()


def test_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate, fabric = AccelerateLoop(), FabricLoop()
    monkeypatch.setattr(type(accelerate.accelerator), "mixed_precision", "fp8")
    monkeypatch.setattr(
        fabric.fabric.strategy.precision, "precision", "transformer-engine", raising=False
    )
    for loop in (accelerate, fabric):
        with pytest.raises(UnsupportedError, match=r"FP8 remembers .*: use bf16"):
            loop.elastic()
