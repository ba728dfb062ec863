"""Small training steps of every kind that can go wrong in its own way, each rebuilt from its seed for every injection."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_mbs import count_tokens

from .layers import CLASSES, VOCABULARY, Made, Network, flat_gradients, in_double
from .subject import InterpretedBackend, Subject

SAMPLES, LENGTH, FEATURES, WIDTH = 8, 3, 4, 6
LABELLED = (3, 1, 0, 2, 2, 3, 3, 1)
"""Labels of each sample that count; one has none."""

Batch = dict[str, Tensor]


def scored(model: nn.Module) -> Callable[[Batch], Tensor]:
    """The loss of a piece, over the labels that count."""
    return lambda batch: F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def step(*layers: str, tokens: bool = False, ignored: bool = False, separable: bool = True, sparse: bool = False, tie: bool = False) -> Subject:
    """A network of these layers, on features or on tokens, some of whose labels are ignored where it is counted in them."""
    model = Network(layers, WIDTH, features=0 if tokens else FEATURES, sparse=sparse, tie=tie)
    x = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH)) if tokens else torch.randn(SAMPLES, LENGTH, FEATURES)
    labels = torch.randint(0, CLASSES, (SAMPLES, LENGTH))
    if ignored:
        for row, kept in enumerate(LABELLED):
            labels[row, kept:] = -100
    options = {"count": count_tokens("labels")} if ignored else {}
    return Subject(model, scored(model), [{"x": x, "labels": labels}], options=options, separable=separable)


def encoder_decoder() -> Subject:
    """An encoder–decoder whose batch is nested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.Transformer(WIDTH, 2, 1, 1, 8, dropout=0.0, batch_first=True)
    parts = {"embed": nn.Embedding(VOCABULARY, WIDTH), "net": net, "head": nn.Linear(WIDTH, VOCABULARY)}
    model = Made(lambda m, pair: m.head(m.net(m.embed(pair[0]), m.embed(pair[1]))), **parts)
    source, target, labels = (torch.randint(0, VOCABULARY, (SAMPLES, length)) for length in (4, 3, 3))
    return Subject(model, lambda b: F.cross_entropy(model(b["pair"]).flatten(0, 1), b["y"].flatten()), [{"pair": (source, target), "y": labels}])


def two_losses() -> Subject:
    """Two losses with two counts: one per token, one per sample."""
    case = step("attention", tokens=True, ignored=True)

    def loss_fn(batch: Batch) -> dict[str, Tensor]:
        return {"tokens": scored(case.model)(batch), "norm": case.model(batch["x"]).pow(2).mean()}

    return replace(case, loss_fn=loss_fn, options={"count": {"tokens": count_tokens("labels"), "norm": None}})


def guests() -> Subject:
    """Leaves outside the model: a learned loss weight, a soft prompt, and a batch that requires grad."""
    case = step("linear")
    weight, prompt = torch.zeros((), requires_grad=True), torch.randn(FEATURES).requires_grad_()
    x = case.batch(0)["x"].requires_grad_()

    def loss_fn(batch: Batch) -> Tensor:
        return scored(case.model)({**batch, "x": batch["x"] + prompt}) * weight.exp()

    return replace(case, loss_fn=loss_fn, extra=(weight, prompt, x))


def begun(case: Subject, *, flat: bool = False) -> Subject:
    """`.grad` from an earlier backward is kept and added to, or views of one flat buffer are."""
    if flat:
        flat_gradients(case.leaves())
    else:
        for leaf in case.leaves():
            leaf.grad = torch.randn_like(leaf)
    return case


def _masked(m: Any, x: Tensor) -> Any:
    import numpy as np

    mask = torch.from_numpy(np.random.rand(*x.shape))  # the legacy stream is what such models use
    return m.inner(x * mask * (random.random() + 0.5))


def host_masks() -> Subject:
    """Masks drawn with `random` and numpy."""
    case = step("linear", separable=False)
    case.model.layers.append(Made(_masked, inner=nn.Linear(WIDTH, WIDTH)))  # type: ignore[operator, union-attr]  # it is a ModuleList
    return case


def edited_batch() -> Subject:
    """A loss function that edits its batch in place."""
    case = step("linear")

    def loss_fn(batch: Batch) -> Tensor:
        batch["x"].mul_(0.5)
        return scored(case.model)(batch)

    return replace(case, loss_fn=loss_fn)


def of_type(dtype: torch.dtype, **options: Any) -> Subject:
    """Parameters and features of another type."""
    case = step("linear")
    case.model.to(dtype)
    batch = case.batch(0)
    return replace(case, batches=[{**batch, "x": batch["x"].to(dtype)}], options=options)


def scaled() -> Subject:
    """GradScaler and autocast; in bfloat16 two partitions differ by its rounding."""
    case = of_type(torch.float32, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))

    def loss_fn(batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scored(case.model)(batch)

    return replace(case, loss_fn=loss_fn, tolerance=3e-2)


def compiled() -> Subject:
    """torch.compile with aot_eager's graphs: no parameter commits before the compiled backward ends."""
    case, backend = step("linear"), InterpretedBackend()
    torch._dynamo.reset()  # the graphs of cases built before count against the limit on recompilations
    model = torch.compile(case.model, backend=backend, dynamic=True)
    return replace(case, loss_fn=scored(model), backend=backend)  # type: ignore[arg-type]  # it is a module, too


STEPS: dict[str, Callable[[], Subject]] = {
    "mlp": lambda: step("linear"),
    # gradients and buffers depend on the split
    "conv_batchnorm": lambda: step("conv", "batchnorm", "residual", "conv", "batchnorm", separable=False),
    "gpt_tied": lambda: step("attention", "residual", tokens=True, ignored=True, tie=True),
    "gpt_dropout": lambda: step("attention", "dropout", tokens=True, ignored=True, tie=True, separable=False),  # masks are part of the result
    "encoder_decoder": encoder_decoder,
    "gru": lambda: step("gru"),
    "lstm": lambda: step("lstm"),
    "routed_experts": lambda: step("experts"),  # which parameters a piece uses depends on its samples, and one is never used
    "checkpoint_nonreentrant": lambda: step("attention", "checkpoint dropout", tokens=True, tie=True, separable=False),
    "checkpoint_reentrant": lambda: step("checkpoint tied", "checkpoint tied", tokens=True, tie=True),  # one parameter commits several times
    "hidden_backward": lambda: step("hidden"),  # leaves that are not in the graph
    "sparse_embedding": lambda: step("linear", tokens=True, sparse=True),
    "two_losses": two_losses,
    "guests": guests,
    "flat_gradients": lambda: begun(step("linear"), flat=True),
    "gradients_at_start": lambda: begun(step("linear")),
    "gradients_at_start_dropout": lambda: begun(step("attention", "dropout", tokens=True, ignored=True, tie=True, separable=False)),
    "host_masks": host_masks,
    "spectral_norm": lambda: step("spectral", separable=False),  # buffers change at every forward
    "edited_batch": edited_batch,
    "scaled": scaled,
    "half_in_float32": lambda: replace(of_type(torch.bfloat16, accumulate_dtype=torch.float32), separable=False),
    "compiled": compiled,
}


def build(name: str, seed: int = 0) -> Subject:
    """The step, built in float64 from its seed; every random stream then stands at the same place."""
    torch.manual_seed(seed)
    random.seed(seed)
    with suppress(ImportError):
        import numpy.random  # by us: whoever imported it between two builds would leave the first of them with another stream

        numpy.random.seed(seed)
    with in_double():
        return replace(STEPS[name](), name=name)
