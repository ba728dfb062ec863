"""Small training steps of every kind that can go wrong in its own way.

Each is rebuilt from its seed for every injection.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_mbs import count_tokens
from elastic_mbs.engine.shared.running import running_call
from elastic_mbs.recipes import convert_ghost_batchnorm

from ..streams import start_streams
from .layers import CLASSES, VOCABULARY, Made, in_double
from .plan import Plan
from .setup import FEATURES, count_of, make_batch, set_up
from .subject import InterpretedBackend, Subject

WIDTH, SAMPLES = 6, 8

planned = partial(Plan, width=WIDTH, samples=SAMPLES, length=3)
text = partial(planned, tokens="dense", count="tokens")  # in three of the samples nothing counts


def planned_step(plan: Plan) -> Subject:
    """Return the step of a plan, on torch's default device."""
    plan = replace(plan, device=torch.get_default_device().type)
    setup = set_up(plan)
    options = {"count": count_of(plan), "accumulate_dtype": torch.float32 if plan.half else None}
    return Subject(
        setup.model,
        setup.loss_fn,
        [make_batch(plan, 0)],
        options=options,
        extra=tuple(setup.guests),
        separable=plan.separable,
    )


def encoder_decoder() -> Subject:
    """Return a step of an encoder–decoder, whose batch is nested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.Transformer(WIDTH, 2, 1, 1, 8, dropout=0.0, batch_first=True)
    parts = {
        "embed": nn.Embedding(VOCABULARY, WIDTH),
        "net": net,
        "head": nn.Linear(WIDTH, VOCABULARY),
    }
    model = Made(lambda m, pair: m.head(m.net(m.embed(pair[0]), m.embed(pair[1]))), **parts)
    source, target, labels = (
        torch.randint(0, VOCABULARY, (SAMPLES, length)) for length in (4, 3, 3)
    )
    return Subject(
        model,
        lambda b: F.cross_entropy(model(b["pair"]).flatten(0, 1), b["y"].flatten()),
        [{"pair": (source, target), "y": labels}],
    )


def guests() -> Subject:
    """Return a step with leaves outside the model.

    They are a learned loss weight, a soft prompt, and a batch that requires grad.
    """
    case = planned_step(planned(layers=("linear",), guests="weight"))
    prompt = torch.randn(FEATURES).requires_grad_()
    x = case.batch(0)[0].requires_grad_()
    return replace(
        case,
        loss_fn=lambda batch: case.loss_fn((batch[0] + prompt, *batch[1:])),
        extra=(*case.extra, prompt, x),
    )


def scaled() -> Subject:
    """Return a step with GradScaler and autocast.

    In bfloat16 two partitions differ by its rounding.
    """
    case = planned_step(planned(layers=("linear",)))
    case.model.float()
    x, *rest = case.batch(0)
    loss_fn = torch.autocast(x.device.type, torch.bfloat16)(case.loss_fn)
    options = {"scaler": torch.amp.GradScaler(x.device.type, init_scale=4.0)}
    return replace(
        case, loss_fn=loss_fn, batches=[(x.float(), *rest)], options=options, tolerance=3e-2
    )


def compiled() -> Subject:
    """Return a step compiled with aot_eager's graphs.

    No parameter commits before the compiled backward ends.
    """
    setup = set_up(planned(layers=("linear",), device=torch.get_default_device().type))
    backend = InterpretedBackend()
    # The graphs of cases built before count against the limit on recompilations.
    torch._dynamo.reset()
    model = setup.model
    compiled_model = torch.compile(model, backend=backend, dynamic=True)
    setup.model = compiled_model  # type: ignore[assignment]  # it is a module, too
    return Subject(model, setup.loss_fn, [make_batch(setup.plan, 0)], backend=backend)


def by_length() -> Subject:
    """Return a step on sentences of several lengths, sorted and trimmed."""
    mask = (torch.arange(5) < torch.tensor([2, 5, 4, 1, 5, 3, 2, 1])[:, None]).long()
    tokens = torch.randint(1, VOCABULARY, mask.shape) * mask
    net = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
    parts = {
        "embed": nn.Embedding(VOCABULARY, WIDTH),
        "net": net,
        "head": nn.Linear(WIDTH, VOCABULARY),
    }
    model = Made(
        lambda m, batch: m.head(m.net(m.embed(batch[0]), src_key_padding_mask=batch[1] == 0)),
        **parts,
    )
    batch = {
        "tokens": tokens,
        "mask": mask,
        "labels": torch.where(mask > 0, tokens.roll(1, 1), -100),
    }
    options = {"count": count_tokens("labels"), "pieces": "by_length", "length": "mask"}
    return Subject(
        model,
        lambda b: F.cross_entropy(
            model((b["tokens"], b["mask"])).flatten(0, 1), b["labels"].flatten()
        ),
        [batch],
        options=options,
    )


def ghost_batchnorm() -> Subject:
    """Return a step with BatchNorm over groups of two samples.

    Gradients and running statistics are the whole batch's, however it is split.
    """
    convolutions = [
        (nn.Conv1d(width, WIDTH, 3, padding=1, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh())
        for width in (FEATURES, WIDTH)
    ]
    layers = [layer for each in convolutions for layer in each]
    model = convert_ghost_batchnorm(
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * WIDTH, CLASSES)), group=2
    )
    batch = torch.randn(SAMPLES, FEATURES, 3), torch.randint(0, CLASSES, (SAMPLES,))
    return Subject(model, lambda b: F.cross_entropy(model(b[0]), b[1]), [batch], whole=True)


def contrastive() -> Subject:
    """Return a step that finds two views of each sample, under dropout, among all others.

    The loss draws numbers as well.
    """
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.Dropout(0.3), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )

    def among_all(views: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (F.normalize(view, dim=1) for view in views)
        scores = a @ torch.cat([b, F.normalize(torch.randn_like(b), dim=1)]).T / 0.1
        return F.cross_entropy(scores, torch.arange(len(a), device=a.device))

    return Subject(
        model, lambda x: (model(x), model(x)), [torch.randn(SAMPLES, FEATURES)], over=among_all
    )


def clip() -> Subject:
    """Return a step with towers for pictures, with BatchNorm, and for texts.

    A temperature in the model and a bias outside it are learned.
    """
    picture = nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )
    words = nn.EmbeddingBag(VOCABULARY, WIDTH)
    bias = torch.tensor(-0.5, requires_grad=True)
    temperature = nn.Parameter(torch.tensor(1.0))
    model = Made(lambda m, x: m.picture(x), picture=picture, words=words, temperature=temperature)

    def pairs(z: dict[str, Tensor]) -> Tensor:
        scores = (
            F.normalize(z["picture"], dim=1) @ F.normalize(z["text"], dim=1).T * temperature.exp()
            + bias
        )
        same = torch.eye(len(scores), device=scores.device)
        return -F.logsigmoid(scores * (2 * same - 1)).sum(1).mean()

    batch = {
        "picture": torch.randn(SAMPLES, FEATURES),
        "text": torch.randint(VOCABULARY, (SAMPLES, 4)),
    }
    return Subject(
        model,
        lambda b: {"picture": model(b["picture"]), "text": words(b["text"])},
        [batch],
        extra=(bias,),
        separable=False,
        over=pairs,
    )


MANY, HIDDEN, POSITIONS = 4096, 1024, 48  # so that a sample's logits, and its MLP, take 1 MiB


def words() -> Subject:
    """Return a step of a language model whose logits and MLPs take most of the memory."""

    def mixed(m: Any, x: Tensor) -> Tensor:
        x = x + m.norm(x).cumsum(1) / POSITIONS
        found: Tensor = x + m.inner(x)
        return found

    blocks = [
        Made(
            mixed,
            norm=nn.LayerNorm(WIDTH),
            inner=nn.Sequential(
                nn.Linear(WIDTH, HIDDEN),
                nn.GELU(),
                nn.Tanh(),
                nn.Sigmoid(),
                nn.Linear(HIDDEN, WIDTH),
            ),
        )
        for _ in range(2)
    ]
    parts = {
        "embed": nn.Embedding(MANY, WIDTH),
        "blocks": nn.Sequential(*blocks),
        "head": nn.Linear(WIDTH, MANY),
    }
    model = Made(lambda m, ids: m.head(m.blocks(m.embed(ids))), **parts)
    ids = torch.randint(0, MANY, (2, POSITIONS))
    return Subject(
        model, lambda b: F.cross_entropy(model(b)[:, :-1].flatten(0, 1), b[:, 1:].flatten()), [ids]
    )


def attentive() -> Subject:
    """Return a step of attention and dropout."""
    return planned_step(
        text(layers=("attention", "dropout", "attention"), tied=True, width=64, length=8)
    )


def escalated(make: Callable[[], Subject], *rungs: str, steps: int) -> Subject:
    """Return a step whose single samples do not fit until so many steps of `rungs` are in use."""
    case = make()

    def loss_fn(batch: Any) -> Any:
        call = running_call()
        if (
            call is not None
            and torch.is_grad_enabled()
            and len(call.parts.profile.ladder.steps) < steps
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return case.loss_fn(batch)

    return replace(case, loss_fn=loss_fn, options={**case.options, "escalate": rungs})


STEPS: dict[str, Plan | Callable[[], Subject]] = {
    "mlp": planned(layers=("linear",)),
    # Gradients and buffers depend on the split.
    "conv_batchnorm": planned(layers=("conv", "batchnorm", "residual", "conv", "batchnorm")),
    "ghost_batchnorm": ghost_batchnorm,
    "gpt_tied": text(layers=("attention", "residual"), tied=True),
    "gpt_dropout": text(layers=("attention", "dropout"), tied=True),  # masks are part of the result
    "encoder_decoder": encoder_decoder,
    "gru": planned(layers=("gru",)),
    "lstm": planned(layers=("lstm",)),
    # Which parameters a piece uses depends on its samples, and one is never used.
    "routed_experts": planned(layers=("experts",)),
    "checkpoint_nonreentrant": planned(
        layers=("attention", "checkpoint dropout"), tokens="dense", tied=True
    ),
    # A parameter commits several times.
    "checkpoint_reentrant": planned(
        layers=("checkpoint tied", "checkpoint tied"), tokens="dense", tied=True
    ),
    "hidden_backward": planned(layers=("hidden",)),  # leaves outside the graph
    "sparse_embedding": planned(layers=("linear",), tokens="sparse"),
    "two_losses": text(layers=("attention",), count="both"),
    "guests": guests,
    "flat_gradients": planned(layers=("linear",), gradients="flat"),
    "gradients_at_start": planned(layers=("linear",), gradients="all"),
    "gradients_at_start_dropout": text(layers=("attention", "dropout"), tied=True, gradients="all"),
    "host_masks": planned(layers=("linear", "host mask")),  # drawn with `random` and numpy
    "spectral_norm": planned(layers=("spectral",)),  # buffers change at every forward
    # The loss function edits its batch in place.
    "edited_batch": planned(layers=("linear",), edits=True),
    "scaled": scaled,
    "half_in_float32": planned(layers=("linear",), half=True),
    "compiled": compiled,
    "offloaded": partial(escalated, attentive, "offload", steps=1),
    "checkpointed": partial(escalated, attentive, "checkpoint", steps=2),  # all of its blocks
    "some_checkpointed": partial(escalated, attentive, "checkpoint", steps=1),
    "logits_in_chunks": partial(escalated, words, "logits", steps=1),
    "tiled": partial(escalated, words, "tile", steps=1),
    "every_rung": partial(escalated, words, "logits", "tile", "checkpoint", "offload", steps=5),
    "by_length": by_length,
    "contrastive": contrastive,  # the masks of its two passes have to be the same
    "clip": clip,  # leaves of the loss's own, and statistics that are updated once
}


def build(name: str, device: str = "cpu") -> Subject:
    """Return the step, in float64 from its seed, with every random stream at the same place."""
    start_streams(0)
    step = STEPS[name]
    with in_double(), torch.device(device):
        return replace(planned_step(step) if isinstance(step, Plan) else step(), name=name)
