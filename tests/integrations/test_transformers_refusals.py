"""Refusals of a Trainer with the runtime, each an error that names the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import trl
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn import functional
from transformers import Trainer, TrainingArguments
from transformers.training_args import ParallelMode

from elastic_mbs import UnsupportedError, UsageError
from elastic_mbs.integrations.transformers import ElasticTrainerMixin, elastic_trainer
from tests.helpers.steps import quiet

pytestmark = [
    pytest.mark.no_oom_injection,
    pytest.mark.filterwarnings("ignore:Warnings will be raised for:UserWarning"),
]

ELASTIC: Any = elastic_trainer(Trainer)


def tiny(**config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **config)
    )


def rows(tokens: Callable[[int], int]) -> list[dict[str, Tensor]]:
    """`tokens` labels; in longer rows more of them are what an untrained model thinks."""
    found = []
    for i in range(8):
        ids = torch.arange(10) * (i + 3) % 40
        found.append(
            {"input_ids": ids, "labels": torch.where(torch.arange(10) < tokens(i), ids, -100)}
        )
    return found


def make(
    folder: Any,
    *,
    model: Any = None,
    elastic: Any = None,
    collator: Any = None,
    loss: Any = None,
    data: Any = None,
    **args: Any,
) -> Any:
    plain = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_steps": 1,
    }
    options = TrainingArguments(
        **plain | {"dataloader_pin_memory": False, "per_device_train_batch_size": 8} | args
    )
    more = {
        "train_dataset": rows(lambda i: 2 + i) if data is None else data,
        "data_collator": collator,
        "compute_loss_func": loss,
    }
    return ELASTIC(model=model or tiny(), args=options, elastic=quiet() | (elastic or {}), **more)


# ---------------------------------------------------------------------- classes


def test_other_trainers_of_trl_are_refused() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"DistillationTrainer: of trl SFTTrainer, .* smaller per_device_train_batch_size",
    ):
        elastic_trainer(trl.DistillationTrainer)


def test_sentence_transformers_are_sent_to_backward_embeddings() -> None:
    foreign = type(
        "SentenceTransformerTrainer", (Trainer,), {"__module__": "sentence_transformers.trainer"}
    )
    with pytest.raises(
        UnsupportedError,
        match=r"compare the samples .* mbs\.backward_embeddings\(embed_fn, loss_fn, batch\)",
    ):
        type("Mine", (ElasticTrainerMixin, foreign), {})


def test_the_mixin_goes_left_and_a_class_of_trainers_is_wanted() -> None:
    with pytest.raises(
        UsageError, match=r"goes left of Trainer.*class X\(ElasticTrainerMixin, Trainer\)"
    ):
        type("Wrong", (Trainer, ElasticTrainerMixin), {})
    with pytest.raises(UsageError, match="give a class of trainers"):
        elastic_trainer(int)


def test_the_class_is_made_once_and_one_with_the_runtime_stays_as_it_is() -> None:
    assert elastic_trainer(Trainer) is ELASTIC
    assert elastic_trainer(ELASTIC) is ELASTIC
    assert ELASTIC.__name__ == "ElasticTrainer"


# ---------------------------------------------------------------------- options of the trainer


class Args(TrainingArguments):
    """Says of itself what a machine with more devices would."""

    mode = ParallelMode.NOT_PARALLEL
    parallel_mode = property(lambda self: self.mode)


REFUSED: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "batch size": (
        lambda made: vars(made.args).update(auto_find_batch_size=True),
        UsageError,
        "keeps the batch: leave it out",
    ),
    "several XPUs": (
        lambda made: setattr(made.accelerator.state, "distributed_type", DistributedType.MULTI_XPU),
        UnsupportedError,
        "MULTI_XPU",
    ),
    "DeepSpeed": (
        lambda made: setattr(made.accelerator.state, "distributed_type", DistributedType.DEEPSPEED),
        UnsupportedError,
        "FSDP in its second version, or one process, without DeepSpeed",
    ),
    "sagemaker": (
        lambda made: setattr(made.args, "mode", ParallelMode.SAGEMAKER_MODEL_PARALLEL),
        UnsupportedError,
        "sagemaker_model_parallel",
    ),
    "XLA": (lambda made: setattr(made.args, "mode", ParallelMode.TPU), UnsupportedError, "tpu"),
    "DataParallel": (
        lambda made: setattr(made.args, "mode", ParallelMode.NOT_DISTRIBUTED),
        UnsupportedError,
        "CUDA_VISIBLE_DEVICES=0",
    ),
    "context": (
        lambda made: setattr(made.accelerator.state, "parallelism_config", ParallelismConfig()),
        UnsupportedError,
        r"\(ParallelismConfig\)",
    ),
    "activation offloading": (
        lambda made: setattr(made.args, "activation_offloading", True),
        UnsupportedError,
        "escalate=",
    ),
    "router": (
        lambda made: setattr(made.model.config, "output_router_logits", True),
        UnsupportedError,
        "is not the one of Mixtral and its like",
    ),
    "scaler": (
        lambda made: setattr(made.accelerator, "scaler", torch.amp.GradScaler("cpu")),
        UnsupportedError,
        "use bf16=True",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_trainers_that_pieces_would_train_wrongly_are_refused(what: str, tmp_path: Any) -> None:
    change, error, way_out = REFUSED[what]
    made = make(tmp_path, elastic={"optimizer_step": what == "scaler"})
    made.args.__class__ = Args
    state = dict(vars(made.accelerator.state))
    try:
        change(made)
        with pytest.raises(error, match=way_out):
            made._inner_training_loop()
    finally:
        vars(made.accelerator.state).clear()
        vars(made.accelerator.state).update(state)


def test_the_same_is_refused_when_the_trainer_is_made(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="auto_find_batch_size=True"):
        make(tmp_path, auto_find_batch_size=True)


def test_an_optimizer_that_steps_inside_backward_is_refused(tmp_path: Any) -> None:
    made = make(tmp_path)
    made._get_learning_rate = lambda: 0.1
    made.args.optim = transformers.training_args.OptimizerNames.LOMO
    with pytest.raises(UnsupportedError, match=r"learning_rate=….*LOMO"):
        made.training_step(
            made.model,
            {
                name: torch.stack([row[name] for row in made.train_dataset])
                for name in ("input_ids", "labels")
            },
        )


# ---------------------------------------------------------------------- options of ours


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"mirco_batch_size": 4},
            "elastic= has no option 'mirco_batch_size': did you mean micro_batch_size=…",
        ),
        ({"scaler": None}, "elastic= sets scaler= by itself: leave it out"),
        ({"optimizer_step": "yes"}, "'optimizer_step': 'yes'} is neither True nor False"),
        (
            {"count": {"a": len}},
            "give a function of the batch that returns one count per sample, or None",
        ),
        ({"micro_batch_size": 0}, "micro_batch_size=0 is neither 'auto' nor"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match=said):
        make(tmp_path, elastic=options)


def test_options_that_are_no_dict_are_named() -> None:
    with pytest.raises(
        UsageError, match="elastic=: True is no dict of options; there are micro_batch_size, count"
    ):
        ELASTIC(model=tiny(), elastic=True)


# ---------------------------------------------------------------------- other losses


def by_sample(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A mean over samples of the means over their tokens."""
    each = functional.cross_entropy(
        outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
    )
    return (each.sum(1) / labels[:, 1:].ne(-100).sum(1)).mean()


def contrastive(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    rows = outputs.logits.mean(1)
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def test_a_loss_that_is_weighed_otherwise_is_found_and_mended_by_count(
    tmp_path: Any,
) -> None:
    with pytest.raises(
        UsageError, match=r'(?s)WRONG: .*"count": batch → one count per sample}, None for samples'
    ):
        make(tmp_path, loss=by_sample).train()
    whole, split = ({"enabled": False}, {"count": None, "micro_batch_size": 3})
    losses = [
        make(tmp_path, loss=by_sample, elastic=elastic).train().training_loss
        for elastic in (whole, split)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_loss_that_compares_samples_is_refused_unless_that_is_meant(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match=r'(?s)compares samples with each other.*"verify": False'):
        make(tmp_path, loss=contrastive).train()
    make(tmp_path, loss=contrastive, elastic={"verify": False, "micro_batch_size": 4}).train()


class Centred(transformers.GPT2LMHeadModel):
    """A model with a centre that moves in training, and is read or not."""

    reads = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if self.reads:
            out.logits = out.logits - self.centre
        if self.training:
            self.centre.lerp_(out.logits.detach().mean((0, 1)), 0.5)
        return out


@pytest.mark.parametrize("reads", [True, False])
def test_state_that_a_loss_reads_and_moves_in_training_is_refused_by_name(
    reads: bool, tmp_path: Any
) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    def centred(**elastic: Any) -> Any:
        model = Centred(tiny().config).eval()  # as from_pretrained gives it
        model.register_buffer("centre", torch.zeros(40))
        model.reads = reads
        data = rows(lambda i: 10)
        return make(
            tmp_path,
            loss=loss,
            model=model,
            data=data,
            elastic=elastic,
            remove_unused_columns=False,
        )

    made = centred()
    if reads:
        named = r"(?s)reads the buffer Centred\.centre.*in training.*\n  Where that is meant: "
        with pytest.raises(UsageError, match=named) as refused:
            made.train()
        assert "count" not in str(refused.value)
        assert not made.model.centre.any()
        assert all(each.grad is None for each in made.model.parameters())
        made = centred(verify=False)
    made.train()
    assert made.model.centre.any()


def test_a_batch_that_hides_a_mistake_is_not_the_last_one_compared(
    tmp_path: Any,
) -> None:
    """Class weights mean nothing in samples of one class."""

    def by_class(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return functional.cross_entropy(
            outputs.logits[:, 0, :2], labels[:, 0], weight=torch.tensor([1.0, 5.0])
        )

    made = make(tmp_path, loss=by_class, elastic={"micro_batch_size": 4})
    ids = torch.arange(80).reshape(8, 10) % 40
    made.training_step(
        made.model, {"input_ids": ids, "labels": torch.zeros(8, 1, dtype=torch.long)}
    )
    made.model.zero_grad()
    with pytest.raises(UsageError, match=r'"count": batch → one count per sample'):
        made.training_step(made.model, {"input_ids": ids, "labels": torch.arange(8)[:, None] % 2})
    assert all(each.grad is None for each in made.model.parameters())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_no_run_and_the_next_one_is_compared(
    bad: float, tmp_path: Any
) -> None:
    factor = bad

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return by_sample(outputs, labels) * factor

    made = make(tmp_path, loss=loss, max_steps=2)
    made.train()
    assert made.state.global_step == 2
    made = make(tmp_path, loss=loss)
    names = ("input_ids", "labels")
    batch = {name: torch.stack([row[name] for row in made.train_dataset]) for name in names}
    assert not made.training_step(made.model, batch).isfinite()
    made.model.zero_grad()
    factor = 1.0
    with pytest.raises(UsageError, match="WRONG"):
        made.training_step(made.model, batch)


def test_a_loss_that_draws_random_numbers_is_compared_with_equal_draws(tmp_path: Any) -> None:
    def noisy(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        return (outputs.logits * torch.randn_like(outputs.logits)).square().mean()

    make(tmp_path, loss=noisy, elastic={"count": None}).train()
    with pytest.raises(UsageError, match="is a mean over samples, and count= counts something"):
        make(tmp_path, loss=noisy).train()


def test_a_batch_without_labels_adds_nothing(tmp_path: Any) -> None:
    made = make(tmp_path, data=rows(lambda i: 0))
    before = [each.clone() for each in made.model.parameters()]
    assert made.train().training_loss == 0.0
    assert all(map(torch.equal, before, made.model.parameters()))


def test_switched_off_it_is_the_stock_trainer(tmp_path: Any) -> None:
    made = make(tmp_path, loss=contrastive, elastic={"enabled": False})
    made.train()
    assert made.elastic.stats.calls == 0
    assert "elastic/ooms" not in made.state.log_history[0]


def test_training_leaves_the_trainer_as_it_was(tmp_path: Any) -> None:
    made = make(tmp_path)
    before = made.loss_is_scaled_for_ga, {*vars(made.accelerator)}
    made.train()
    assert (made.loss_is_scaled_for_ga, {*vars(made.accelerator)}) == before


# ---------------------------------------------------------------------- private names

USED = {
    "_inner_training_loop": (
        "resume_from_checkpoint",
        "train() runs it once the model is the one that is trained: the runtime's block is around "
        "it",
    ),
    "_get_num_items_in_batch": ("batch_samples", "counts the labels of batches: here of one piece"),
    "_save_optimizer_and_scheduler": (
        "output_dir",
        "is called for each checkpoint that can be resumed",
    ),
    "_prepare_for_training": (
        "resume_from_checkpoint",
        "spreads the model over the ranks, and loads the checkpoint that is resumed",
    ),
    "_prepare_inputs": ("inputs", "moves a batch to the device"),
    "create_optimizer": ("model", "is called once per training"),
    "training_step": ("num_items_in_batch", "runs accelerator.backward once per batch"),
    "prediction_step": ("prediction_loss_only", "returns loss, logits and labels of a batch"),
}


@pytest.mark.parametrize("name", USED)
def test_what_is_used_of_the_trainer_is_there(name: str) -> None:
    parameter, what = USED[name]
    method = getattr(Trainer, name, None)
    assert method is not None, (
        f"Trainer.{name} is gone: it {what}. Look for what does so now, in "
        "elastic_mbs/integrations/transformers.py"
    )
    assert parameter in inspect.signature(method).parameters, (
        f"Trainer.{name} has other arguments: {inspect.signature(method)}"
    )


def test_the_attributes_that_are_used_are_there(tmp_path: Any) -> None:
    made = make(tmp_path)
    assert isinstance(made._loss_shifts_labels, bool), (
        "says whether labels are counted from the second of each row on"
    )
    source = inspect.getsource(Trainer)
    assert "self.loss_is_scaled_for_ga is not None" in source, (
        "True keeps training_step from dividing by the batches accumulated"
    )
    assert "self.current_gradient_accumulation_steps = len(batch_samples)" in source
