"""Jobs of several ranks in trainers' own distributed modes train as without the runtime."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elastic_mbs import DistributedOptions, ElasticMBS
from stress.ranks.job import run_ranks, values
from tests.helpers.ddp import FailingBackward, caught, failing
from tests.helpers.steps import mlp, pairs
from tests.integrations.rank_runs import as_torchrun, trainers_at_hand, whole, worst

pytestmark = [pytest.mark.no_oom_injection, pytest.mark.usefixtures("trainers_at_hand")]
__all__ = ["trainers_at_hand"]

EXACT = 1e-10
Left = tuple[list[float], list[Tensor], int]  # losses, weights, failures


def compared(stock: Left, elastic: Left) -> tuple[float, float, int]:
    """Return how far losses and weights are from each other, and the failures survived."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(elastic[0], stock[0], strict=True))
    return losses, worst(elastic[1], stock[1]), elastic[2]


# ---------------------------------------------------------------------- prepared loops


def prepared_loop(
    setup: Any, elastic: Any, backward: Any, *, rank: int, with_runtime: bool
) -> Left:
    plain = mlp().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    x, y = pairs(32)
    model, optimizer, loader = setup(plain, optimizer, TensorDataset(x.double(), y))
    losses, ooms = [], 0

    def loss_fn(batch: Any) -> Tensor:
        return functional.cross_entropy(failing(model(batch[0])), batch[1])

    mbs: ElasticMBS | None = elastic(model) if with_runtime else None
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        if mbs is None:
            loss = loss_fn(batch)
            backward(loss)
            losses.append(loss.item())
            optimizer.step()
            continue
        FailingBackward.left = int(rank == 1 and step % 2 == 0)
        result = mbs.backward(loss_fn, batch)
        losses.append(result.loss.item())
        ooms += result.ooms
        mbs.optimizer_step(optimizer)
    if mbs is not None:
        mbs.close()
    return losses, whole(plain), ooms


def means(losses: list[float]) -> list[float]:
    """Return the means over the ranks."""
    total = torch.tensor(losses, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return (total / torch.distributed.get_world_size()).tolist()


def in_accelerate(rank: int, world: int) -> tuple[float, float, int]:
    from accelerate import Accelerator

    from elastic_mbs.integrations.accelerate import elastic

    as_torchrun(rank, world)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world

    def setup(model: nn.Module, optimizer: Any, dataset: Any) -> Any:
        return accelerator.prepare(model, optimizer, DataLoader(dataset, 4))

    stock, mine = (
        prepared_loop(
            setup,
            lambda model: elastic(accelerator, model),
            accelerator.backward,
            rank=rank,
            with_runtime=with_runtime,
        )
        for with_runtime in (False, True)
    )
    return compared((means(stock[0]), *stock[1:]), mine)


def in_sharding_accelerate(rank: int, world: int) -> tuple[float, float, int]:
    """Train in accelerate's FSDP, which it makes on accelerators alone, and is told to here."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    from elastic_mbs.integrations.accelerate import elastic

    as_torchrun(rank, world)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin

    def setup(model: nn.Module, optimizer: Any, dataset: Any) -> Any:
        made = accelerator.prepare(model, optimizer, DataLoader(dataset, 4))
        assert isinstance(made[0], FSDPModule), type(made[0])
        return made

    stock, mine = (
        prepared_loop(
            setup,
            lambda model: elastic(accelerator, model),
            accelerator.backward,
            rank=rank,
            with_runtime=with_runtime,
        )
        for with_runtime in (False, True)
    )
    return compared((means(stock[0]), *stock[1:]), mine)


def in_fabric(rank: int, world: int, *, sharded: bool = False) -> tuple[float, float, int]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from elastic_mbs.integrations.fabric import elastic

    as_torchrun(rank, world)

    def shard(module: nn.Module, mesh: Any) -> nn.Module:
        for layer in module.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(module, mesh=mesh["data_parallel"])
        return module

    strategies: dict[bool, dict[str, Any]] = {
        False: {"strategy": "ddp", "precision": "64-true"},
        True: {"strategy": ModelParallelStrategy(shard, world, 1)},
    }
    fabric = Fabric(accelerator="cpu", devices=world, **strategies[sharded])
    fabric.launch()
    assert fabric.world_size == world

    def setup(model: nn.Module, optimizer: Any, dataset: Any) -> Any:
        loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, shuffle=False))
        if not sharded:
            return *fabric.setup(model, optimizer), loader
        module = fabric.setup_module(model)  # and then the optimizer, of its shards
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        return module, fabric.setup_optimizers(optimizer), loader

    stock, mine = (
        prepared_loop(
            setup,
            lambda model: elastic(fabric, model),
            fabric.backward,
            rank=rank,
            with_runtime=with_runtime,
        )
        for with_runtime in (False, True)
    )
    return compared((means(stock[0]), *stock[1:]), mine)


def in_sharding_fabric(rank: int, world: int) -> tuple[float, float, int]:
    return in_fabric(rank, world, sharded=True)


@pytest.mark.parametrize(
    "framework", [in_accelerate, in_sharding_accelerate, in_fabric, in_sharding_fabric]
)
def test_a_loop_on_several_ranks_trains_the_same_while_one_runs_out(framework: Any) -> None:
    (losses, weights, undisturbed), (others, own, survived) = values(run_ranks(framework))
    assert max(weights, own) < EXACT
    assert max(losses, others) < 1e-6  # Fabric gives outputs in float32
    assert undisturbed == 0 < survived


def not_prepared(rank: int, world: int) -> str:
    from accelerate import Accelerator

    from elastic_mbs.integrations.accelerate import elastic

    as_torchrun(rank, world)
    accelerator = Accelerator(cpu=True)
    return caught(lambda: elastic(accelerator, mlp()))


def test_a_model_that_was_not_prepared_is_refused_on_all_ranks() -> None:
    for found in values(run_ranks(not_prepared)):
        assert found.startswith("UsageError: the model is in no DistributedDataParallel")


# ---------------------------------------------------------------------- transformers' Trainer


def in_trainer(rank: int, world: int, folder: str, kind: str, steps: int) -> tuple[float, ...]:
    """Return how far weights and an evaluation, and logged losses are apart, and the failures."""
    import transformers

    from elastic_mbs.integrations.transformers import elastic_trainer
    from tests.integrations.trainer_runs import KINDS, rows, trainer

    as_torchrun(rank, world)
    os.chdir(folder)
    Tensor.float = Tensor.double  # type: ignore[method-assign]  # losses begin with logits.float()
    transformers.logging.set_verbosity_error()
    model, labels, options = KINDS[kind]
    options |= {
        "gradient_accumulation_steps": steps,
        "per_device_train_batch_size": 4,
        "ddp_find_unused_parameters": True,
    }

    class Failing:
        """A hook that runs out of memory on the last rank."""

        def __init__(self) -> None:
            self.left = 2 if rank == world - 1 else 0
            self.anywhere = False

        def __call__(self, *args: Any) -> None:
            # not in the comparison before training
            if self.left and (self.anywhere or torch.is_grad_enabled()):
                self.left -= 1
                raise torch.OutOfMemoryError("injected: out of memory in forward")

    stock = trainer(transformers.Trainer, model(), rows(labels, 32), **options)
    stock.train()
    mine = trainer(
        elastic_trainer(transformers.Trainer),
        model(),
        rows(labels, 32),
        elastic={},
        **options | {"save_strategy": "epoch"},
    )
    hook = Failing()
    next(mine.model.children()).register_forward_hook(hook)
    mine.train()
    logs = [
        [entry["loss"] for entry in each.state.log_history if "loss" in entry]
        for each in (stock, mine)
    ]
    loss = max(abs(a - b) / abs(b) for a, b in zip(*logs, strict=True))
    weights = [[p.detach() for p in each.model.parameters()] for each in (mine, stock)]
    wanted = stock.evaluate(rows(labels, 20))["eval_loss"]
    hook.left, hook.anywhere = int(rank == world - 1), True  # one rank has more pieces
    evaluated = mine.evaluate(rows(labels, 20))["eval_loss"]
    assert not hook.left
    apart = max(worst(*weights), abs(evaluated - wanted) / abs(wanted))
    return apart, loss, len(logs[0]), mine.elastic.stats.ooms


@pytest.mark.parametrize("kind", ["causal, rows without labels", "uncounted"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_trainer_on_several_ranks_trains_and_logs_the_same(
    kind: str, steps: int, tmp_path: Any
) -> None:
    found = values(run_ranks(in_trainer, str(tmp_path), kind, steps))
    assert [ooms > 0 for *_, ooms in found] == [False, True]
    assert max(weights for weights, *_ in found) < EXACT
    assert max(loss for _, loss, *_ in found) < 1e-5  # the trainer adds losses up in float32
    assert found[0][2] == 32 // (4 * 2 * steps)  # rank 0 logs
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    kept = {path.name for path in checkpoint.glob("elastic_mbs*")}
    assert kept == {"elastic_mbs.rank0.json", "elastic_mbs.rank1.json"}


def differing(rank: int, world: int, folder: str) -> tuple[str, str, list[int]]:
    """Train where one rank logs before the first step, and resume where one has no sizes."""
    import transformers

    from elastic_mbs.integrations.transformers import elastic_trainer
    from tests.integrations.trainer_runs import KINDS, rows, trainer

    as_torchrun(rank, world)
    os.chdir(folder)
    model, labels, options = KINDS["causal"]
    options |= {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    options |= {"ddp_find_unused_parameters": True}
    cut = {"distributed": DistributedOptions(timeout=5.0), "micro_batch_size": 3}

    def made() -> Any:
        kind = elastic_trainer(transformers.Trainer)
        return trainer(kind, model(), rows(labels, 32), elastic=cut, **options)

    def log(*args: Any, **kwargs: Any) -> None:
        if rank == 0:
            first.log({"here": 1.0})

    first, callback = made(), transformers.TrainerCallback()
    callback.on_train_begin = log
    first.add_callback(callback)
    trained = caught(first.train)
    if rank:
        os.remove(f"checkpoint-1/elastic_mbs.rank{rank}.json")
    again = made()
    resumed = caught(lambda: again.train(resume_from_checkpoint="checkpoint-1"))
    return trained, resumed, [entry["here"] for entry in first.state.log_history if "here" in entry]


def test_ranks_may_use_the_runtime_at_different_times(tmp_path: Any) -> None:
    found = values(run_ranks(differing, str(tmp_path)))
    assert found == [("no error", "no error", [1.0]), ("no error", "no error", [])]


def gathering(rank: int, world: int, folder: str) -> tuple[str, str]:
    """Return the errors of trainers that ask the other ranks in their losses."""
    import transformers

    from elastic_mbs.integrations.transformers import elastic_trainer
    from tests.integrations.trainer_runs import KINDS, rows, trainer

    class Noting(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.accelerator.gather_for_metrics(torch.ones(()))
            return super().compute_loss(*args, **kwargs)

    as_torchrun(rank, world)
    os.chdir(folder)
    model, labels, options = KINDS["uncounted"]
    mine = trainer(elastic_trainer(Noting), model(), rows(labels), elastic={}, **options)
    return caught(mine.train), caught(lambda: mine.evaluate(rows(labels)))


def test_a_loss_that_asks_the_other_ranks_is_refused_on_all_of_them(tmp_path: Any) -> None:
    for found in values(run_ranks(gathering, str(tmp_path))):
        for error in found:
            assert error.startswith("UnsupportedError: a loss asks the other ranks"), error


# ---------------------------------------------------------------------- Lightning


def in_lightning(
    rank: int, world: int, accumulated: int, strategy: str
) -> tuple[float, float, int]:
    """Return how far weights and all logs are apart, and the failures survived."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from elastic_mbs.integrations.lightning import ElasticCallback
    from tests.integrations import lightning_runs
    from tests.integrations.lightning_runs import Run, fit, loader

    class Net(lightning_runs.Net):
        """Logs of one rank and of all, and metrics of all; sharded where it is told to."""

        def configure_model(self) -> None:
            if strategy == "sharded":
                mesh = self.device_mesh
                assert mesh is not None
                for part in (self.body, self.head):
                    fully_shard(part, mesh=mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = self(batch)
            loss = functional.cross_entropy(output, batch[1])
            self.train_f1(output, batch[1])
            self.log("loss", loss, on_epoch=True)
            self.log("everywhere", loss, on_epoch=True, sync_dist=True)
            self.log("train_f1", self.train_f1, on_step=False, on_epoch=True)
            return {"loss": loss, "mean": output.mean()}

    as_torchrun(rank, world)
    options: dict[str, Any] = {
        "devices": world,
        "accumulate_grad_batches": accumulated,
        "train": loader(32),
        "val": [loader(16, 1)],
    }

    def spread() -> Any:
        made = ModelParallelStrategy(world, 1, save_distributed_checkpoint=False)
        return made if strategy == "sharded" else strategy

    stock = fit(Net(), strategy=spread(), **options)
    callback = ElasticCallback()
    short = Net(fits=3 if rank == world - 1 else 8)
    mine = fit(short, [callback], strategy=spread(), **options)

    def logged(run: Run) -> list[float]:
        return [float(value) for _, line in run.lines for _, value in sorted(line.items())]

    pairs_of_logs = zip(logged(mine), logged(stock), strict=True)
    logs = max((abs(a - b) / (abs(b) or 1.0) for a, b in pairs_of_logs), default=0.0)
    return worst(whole(mine.module), whole(stock.module)), logs, callback.runtime.stats.ooms


@pytest.mark.parametrize(
    ("accumulated", "strategy"),
    [
        (1, "ddp_find_unused_parameters_true"),
        (2, "ddp_find_unused_parameters_true"),
        (1, "sharded"),
    ],
)
def test_lightning_on_several_ranks_trains_and_logs_the_same(
    accumulated: int, strategy: str
) -> None:
    found = values(run_ranks(in_lightning, accumulated, strategy))
    assert [ooms > 0 for *_, ooms in found] == [False, True]
    assert max(weights for weights, *_ in found) < EXACT
    assert max(logs for _, logs, _ in found) < EXACT


def manually(rank: int, world: int) -> str:
    from elastic_mbs.integrations.lightning import ElasticCallback
    from tests.integrations.lightning_runs import Net, fit, loader

    as_torchrun(rank, world)
    module = Net()
    module.automatic_optimization = False
    options: dict[str, Any] = {"strategy": "ddp", "devices": world}
    options |= {"train": loader(16), "val": []}
    return caught(lambda: fit(module, [ElasticCallback()], **options))


def test_manual_optimization_is_refused_on_all_ranks() -> None:
    for found in values(run_ranks(manually)):
        assert found.startswith("UnsupportedError: manual optimization under DDPStrategy")
