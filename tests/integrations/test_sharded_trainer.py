"""A Trainer of transformers under FSDP in its second version trains as without the runtime."""

from __future__ import annotations

import ast
import gc
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from torch import Tensor

from elastic_mbs.testing import InjectOOM
from stress.ranks.job import run_ranks, values
from tests.helpers.ddp import caught
from tests.integrations.rank_runs import (
    FSDP2,
    as_torchrun,
    shard_on_cpus,
    trainers_at_hand,
    whole,
)
from tests.integrations.test_several_ranks import EXACT

__all__ = ["trainers_at_hand"]  # a fixture

pytestmark = [pytest.mark.no_oom_injection]

Drawn = tuple[int, int]  # seeds of the errors on each rank, 0 for none
SHARDED: dict[str, Any] = {"per_device_train_batch_size": 4} | FSDP2


class Run(NamedTuple):
    """A training: the weights at its end, losses and norms of gradients as logged, and errors.

    Attributes:
        ooms: attempts of pieces that have failed.
        hits: operations that have failed, those between pieces and in the optimizer included.
    """

    weights: list[float]
    losses: list[float]
    norms: list[float]
    ooms: int = 0
    hits: int = 0


def apart(mine: list[float], stock: list[float]) -> float:
    """Return max|Δ|/max|stock|."""
    differences = [abs(a - b) for a, b in zip(mine, stock, strict=True)]
    return max(differences) / max(map(abs, stock))


def in_rank(rank: int, world: int, folder: str) -> None:
    """Prepare a rank: losses in float64, and a way to shard on CPUs."""
    import transformers

    as_torchrun(rank, world)
    os.chdir(folder)
    Tensor.float = Tensor.double  # type: ignore[method-assign]  # losses begin with logits.float()
    transformers.logging.set_verbosity_error()
    shard_on_cpus()


def made(kind: Any, name: str, **options: Any) -> Any:
    from tests.integrations.trainer_runs import KINDS, rows, trainer

    model, labels, more = KINDS[name]
    return trainer(kind, model(), rows(labels, 32), **more | options)


def run_of(trainer: Any, **how: Any) -> Run:
    """Train, and return how it went."""
    trainer.train(**how)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, norms = ([float(entry[key]) for entry in logs] for key in ("loss", "grad_norm"))
    hits = getattr(trainer, "hits", None)
    errors = (0, 0) if hits is None else (trainer.elastic.stats.ooms, len(hits))
    return Run(weights_of(trainer), losses, norms, *errors)


def weights_of(trainer: Any) -> list[float]:
    found: list[float] = torch.cat([each.flatten() for each in whole(trainer.model)]).tolist()
    return found


def stock() -> Any:
    from transformers import Trainer

    return Trainer


def struck(seed: int) -> Any:
    """Return a class of trainers with the runtime, and errors at operations that are drawn.

    They are in a batch, ours around its pieces included, and in the optimizer's step.
    """
    from elastic_mbs.integrations.transformers import elastic_trainer

    draw, struck = random.Random(seed), list[str]()

    def faults() -> InjectOOM:
        inject = InjectOOM([draw.randint(1, 120), draw.randint(200, 900)] if seed else ())
        inject.hits = struck
        return inject

    def injected(step: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            with faults():
                step(*args)

        return run

    class Struck(elastic_trainer(stock())):  # type: ignore[misc]  # a class made here
        hits = struck

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            mbs: Any = self.elastic  # it is made here, where all ranks come
            vars(mbs).setdefault("optimizer_step", injected(mbs.optimizer_step))
            with faults():
                return super().training_step(*args, **kwargs)

    return Struck


# ---------------------------------------------------------------------- training

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rows without labels": ("causal, rows without labels", {}),
    "clipped": ("clipped", {}),
    "accumulated": ("uncounted", {"gradient_accumulation_steps": 2}),
    "a share for each rank": ("causal", {"average_tokens_across_devices": False}),
    "checkpointing": ("causal", {"fsdp_config": {"activation_checkpointing": True}}),
    "values of rank 0": ("causal", {"fsdp_config": {"cpu_ram_efficient_loading": True}}),
    "by the environment": ("causal", {"fsdp": False}),
}
ONE_PROCESS = ("rows without labels", "clipped", "by the environment")


def in_shards(rank: int, world: int, folder: str, case: str, seeds: Drawn) -> tuple[Run, Run]:
    """Return the training of the stock Trainer, and the one with the runtime."""
    in_rank(rank, world, folder)
    name, options = CASES[case]
    options = SHARDED | options
    if case == "by the environment":  # as `accelerate launch` sets it
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    return run_of(made(stock(), name, **options)), run_of(
        made(struck(seeds[rank]), name, elastic={"optimizer_step": True}, **options)
    )


def alone(rank: int, world: int, folder: str, case: str) -> Run:
    in_rank(rank, world, folder)
    name, options = CASES[case]
    return run_of(made(stock(), name, per_device_train_batch_size=8, **options))


@pytest.mark.parametrize(
    ("case", "seeds"),
    [
        ("rows without labels", (0, 1)),
        ("clipped", (2, 3)),
        ("accumulated", (4, 5)),
        ("a share for each rank", (0, 6)),
        ("checkpointing", (7, 8)),
        ("values of rank 0", (1, 0)),
        ("by the environment", (10, 11)),
    ],
)
def test_a_sharded_model_trains_and_logs_the_same_while_ranks_run_out(
    case: str, seeds: Drawn, tmp_path: Path
) -> None:
    found = values(run_ranks(in_shards, str(tmp_path), case, seeds))
    one = values(run_ranks(alone, str(tmp_path), case, world=1)) if case in ONE_PROCESS else []
    for sharded, mine in found:
        for other in (sharded, *one):
            assert apart(mine.weights, other.weights) < EXACT
            assert apart(mine.norms, other.norms) < EXACT
            assert apart(mine.losses, other.losses) < 1e-6  # the trainer adds them up in float32
    assert [mine.hits > 0 for _, mine in found] == [seed > 0 for seed in seeds]
    assert any(mine.ooms for _, mine in found)


def loading(rank: int, world: int, folder: str) -> tuple[Run, Run]:
    """Train a model that was sharded while it was loaded, and not by accelerate."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from tests.integrations.trainer_runs import rows, trainer

    in_rank(rank, world, folder)

    def run(kind: Any, **options: Any) -> Run:
        sharding = {"distributed_config": DistributedConfig(fsdp_size=world)}
        model = LlamaForCausalLM.from_pretrained("llama", dtype=torch.float64, **sharding)
        data = rows("tokens", 32)
        return run_of(trainer(kind, model, data, per_device_train_batch_size=4, **options))

    return run(stock()), run(struck(5 * rank), elastic={"optimizer_step": True})


def test_a_model_that_was_loaded_sharded_trains_the_same(tmp_path: Path) -> None:
    from tests.integrations.trainer_runs import llama

    llama().save_pretrained(tmp_path / "llama")
    found = values(run_ranks(loading, str(tmp_path)))
    for sharded, mine in found:
        assert apart(mine.weights, sharded.weights) < EXACT
        assert apart(mine.norms, sharded.norms) < EXACT
    assert [mine.ooms > 0 for _, mine in found] == [False, True]


def in_half(rank: int, world: int, folder: str) -> tuple[Run, Run]:
    in_rank(rank, world, folder)
    options = SHARDED | {"bf16": True}
    return run_of(made(stock(), "causal", **options)), run_of(
        made(struck(rank), "causal", elastic={}, **options)
    )


def test_bf16_is_the_stock_trainers_to_rounding(tmp_path: Path) -> None:
    found = values(run_ranks(in_half, str(tmp_path)))
    for sharded, mine in found:
        assert 0 < apart(mine.weights, sharded.weights) < 2**-9
        assert apart(mine.losses, sharded.losses) <= 2**-7  # as many digits as they have
    assert found[1][1].ooms


def without_labels(rank: int, world: int, folder: str) -> tuple[Run, Run]:
    """Train where the first batch of one rank has no labels, so the check finds nothing there."""
    from transformers import default_data_collator

    in_rank(rank, world, folder)

    def collator() -> Any:
        batches = list[int]()

        def collate(rows: Any) -> Any:
            batch = default_data_collator(rows)
            if rank and not batches:
                batch["labels"].fill_(-100)
            batches.append(len(rows))
            return batch

        return collate

    return run_of(made(stock(), "causal", data_collator=collator(), **SHARDED)), run_of(
        made(struck(0), "causal", data_collator=collator(), elastic={}, **SHARDED)
    )


def test_a_rank_without_labels_makes_no_check_of_its_own_later(tmp_path: Path) -> None:
    for sharded, mine in values(run_ranks(without_labels, str(tmp_path))):
        assert apart(mine.weights, sharded.weights) < EXACT
        assert apart(mine.losses, sharded.losses) < 1e-6


def comparing(rank: int, world: int, folder: str) -> str:
    in_rank(rank, world, folder)

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        found: Tensor = outputs.logits.std(0).mean()
        return found

    return caught(made(struck(0), "causal", compute_loss_func=loss, elastic={}, **SHARDED).train)


def test_a_loss_that_compares_samples_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for found in values(run_ranks(comparing, str(tmp_path))):
        assert found.startswith("UsageError: WRONG"), found


# ---------------------------------------------------------------------- around the training


class Watch:
    """A callback that notes how many of some parameters are alive, at each step."""

    def __init__(self, parameters: Any) -> None:
        from transformers import TrainerCallback

        self.alive = list[int]()
        parameters = list(map(ref, parameters))

        def note(*args: Any, **kwargs: Any) -> None:
            self.alive.append(sum(each() is not None for each in parameters))

        self.callback = TrainerCallback()
        self.callback.on_train_begin = self.callback.on_step_end = note


def watched(rank: int, world: int, folder: str) -> list[int]:
    in_rank(rank, world, folder)
    trainer = made(struck(0), "causal", elastic={}, **SHARDED)
    watch = Watch(trainer.model.parameters())
    trainer.add_callback(watch.callback)
    gc.disable()
    trainer.train()
    return watch.alive


def test_nothing_keeps_the_parameters_whole_that_were_sharded(tmp_path: Path) -> None:
    for alive in values(run_ranks(watched, str(tmp_path))):
        assert alive == [0] * 5


def resuming(rank: int, world: int, folder: str) -> tuple[list[float], list[Any]]:
    """Return how far runs are apart, a resumed one among them, and the sizes that it learned."""
    in_rank(rank, world, folder)
    options = SHARDED | {"optim": "adamw_torch", "max_steps": 2}
    saving = {"save_strategy": "steps", "save_steps": 1}
    saving["fsdp_config"] = {"state_dict_type": "SHARDED_STATE_DICT"}
    guarded = {"optimizer_step": True}
    plain = made(stock(), "causal", **options)
    whole = run_of(plain)
    cut = guarded | {"micro_batch_size": 3 - rank}
    run_of(made(struck(0), "causal", elastic=cut, **options | saving))
    again = made(struck(0), "causal", elastic=guarded, **options | saving)
    again.args.save_strategy = "no"
    found = [apart(run_of(again, resume_from_checkpoint="checkpoint-1").weights, whole.weights)]
    found.append(apart(run_of(again).weights, run_of(plain).weights))  # of two more steps
    rows = again.train_dataset[:10]
    predictions = [each.predict(rows).predictions.flatten().tolist() for each in (again, plain)]
    losses = [[each.evaluate(rows)["eval_loss"]] for each in (again, plain)]
    return [*found, apart(*predictions), apart(*losses)], again.elastic.last_result.partition


def test_a_resumed_training_goes_on_with_sizes_and_predicts_the_same(tmp_path: Path) -> None:
    found = values(run_ranks(resuming, str(tmp_path)))
    assert max(max(differences) for differences, _ in found) < EXACT
    assert [len(partition) for _, partition in found] == [2, 2]
    assert [partition[0] for _, partition in found] == [(0, 2), (0, 2)]


def generating(rank: int, world: int, folder: str) -> tuple[list[Any], list[Any], int]:
    """Return what the stock trainer has generated, the one with the runtime, and its pieces."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from elastic_mbs.integrations.transformers import elastic_trainer
    from tests.helpers.steps import quiet
    from tests.integrations.trainer_runs import gpt2

    in_rank(rank, world, folder)
    ids = torch.randint(3, 40, (16, 6), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": each, "labels": each} for each in ids]
    args: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 12}
    args |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "max_steps": 1}
    args |= {"per_device_eval_batch_size": 4}
    found = []
    for kind, more in (
        (Seq2SeqTrainer, {}),
        (elastic_trainer(Seq2SeqTrainer), {"elastic": quiet()}),
    ):
        trainer = kind(
            model=gpt2(pad_token_id=0, eos_token_id=1),
            args=Seq2SeqTrainingArguments("out", **args | SHARDED | {"save_strategy": "no"}),
            train_dataset=data,
            **more,
        )
        trainer.train()
        found.append(trainer)
    with InjectOOM(at=[300] if rank else ()) as inject:
        mine = found[1].predict(data).predictions.tolist()
    return found[0].predict(data).predictions.tolist(), mine, len(inject.hits)


def test_each_rank_generates_its_own_pieces(tmp_path: Path) -> None:
    found = values(run_ranks(generating, str(tmp_path)))
    for wanted, mine, _ in found:
        assert mine == wanted
    assert [hits for *_, hits in found] == [0, 1]


# ---------------------------------------------------------------------- refusals


def refused(rank: int, world: int, folder: str) -> tuple[str, str, str]:
    """Ask for the first version and then for what the message says, and for fp16."""
    in_rank(rank, world, folder)
    first = made(struck(0), "causal", elastic={}, **SHARDED)
    first.accelerator.state.fsdp_plugin.fsdp_version = 1
    said = caught(first.train)
    advice = re.search(r"TrainingArguments\(fsdp=True, fsdp_config=(.*?\})\)", said)
    assert advice is not None, said
    followed = SHARDED | {"fsdp_config": ast.literal_eval(advice[1])}
    trainer = made(struck(0), "causal", elastic={}, **followed)
    trained = caught(trainer.train)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    return said, trained, caught(trainer.train)


def test_the_first_version_and_fp16_are_refused_with_the_way_out(tmp_path: Path) -> None:
    for said, trained, scaled in values(run_ranks(refused, str(tmp_path))):
        assert said.startswith("UnsupportedError: the Trainer shards the model by FullySharded")
        assert trained == "no error"
        assert scaled.startswith("UnsupportedError: fp16=True with FSDP"), scaled
        assert scaled.endswith("use bf16=True")
