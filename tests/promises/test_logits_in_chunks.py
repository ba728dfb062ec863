"""`escalate=("logits",)`: a head and its cross-entropy run in chunks, with exact gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from elastic_mbs import Escalated, Event, MemoryBudget, MicroBatchFloorError, ReplayUnsafeError
from elastic_mbs.escalation import logits, tile
from elastic_mbs.escalation.head import OtherLayers
from elastic_mbs.escalation.logits import ChunkedLogits, LazyLogits
from elastic_mbs.rollback.graph import drop_unrun
from stress.reference.state import error_of
from tests.helpers.steps import elastic, grads, there, through
from tests.helpers.strikes import every_operation

CLASSES, FEATURES, LENGTH = 50, 8, 9
Loss = Callable[[Tensor, Tensor], Tensor]


class Words(nn.Module):
    """A language model of one layer, with a cap on its logits where there is one."""

    def __init__(
        self,
        *,
        bias: bool = False,
        cap: float | None = None,
        tied: bool = False,
        classes: int = CLASSES,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(classes, FEATURES)
        self.body = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, classes, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.cap = cap

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.embedding(ids)).tanh())
        if self.cap is not None:
            found = torch.tanh(found / self.cap) * self.cap
        return found


def tokens(samples: int = 3, length: int = LENGTH, classes: int = CLASSES) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, classes, (samples, length), generator=generator)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put off the smallest layer, too, and make the smallest chunks."""
    monkeypatch.setattr(logits, "SMALL", 0)
    monkeypatch.setattr(logits, "FEWEST", 1)


def shifted(z: Tensor, ids: Tensor) -> Tensor:
    rows = z[..., :-1, :].contiguous()
    return functional.cross_entropy(rows.view(-1, z.size(-1)), ids[..., 1:].reshape(-1))


def transformers(z: Tensor, ids: Tensor) -> Tensor:
    labels = functional.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    rows = z.double().view(-1, z.shape[-1])
    return functional.cross_entropy(rows, labels, ignore_index=-100, reduction="sum") / 7


def weights(z: Tensor) -> Tensor:
    return torch.linspace(0.1, 2, z.shape[-1], dtype=z.dtype)


def flat(z: Tensor, ids: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(z.flatten(0, 1), ids.flatten(), **options)


CHUNKED: dict[str, Loss] = {
    "shifted": shifted,
    "transformers": transformers,
    "smoothed": lambda z, ids: flat(z, ids, label_smoothing=0.1),
    "weighted": lambda z, ids: flat(z, ids, weight=weights(z), ignore_index=3),
    "weighted and smoothed": lambda z, ids: flat(
        z, ids, weight=weights(z), ignore_index=3, label_smoothing=0.2
    ),
    "sum": lambda z, ids: flat(z, ids, reduction="sum"),
    "module": lambda z, ids: nn.CrossEntropyLoss()(z.reshape((-1, z.shape[-1])), ids.flatten()),
    "transposed": lambda z, ids: functional.cross_entropy(z.transpose(1, 2), ids),
    "mT": lambda z, ids: functional.cross_entropy(z.mT, ids, reduction="sum"),
    "permuted": lambda z, ids: functional.cross_entropy(z.permute(0, 2, 1), ids),
    "last position left out": lambda z, ids: flat(z[:, 1:], ids[:, :-1]),
    "scaled": lambda z, ids: flat(0.5 * z / 1.5, ids),
    "bytes": lambda z, ids: flat(z, ids.byte()),
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


COMPUTED: dict[str, Loss] = {
    "log_softmax": lambda z, ids: -z.log_softmax(-1).gather(2, ids[..., None]).mean(),
    "probabilities": lambda z, ids: functional.cross_entropy(
        z.flatten(0, 1), functional.one_hot(ids.flatten(), z.shape[-1]).to(z.dtype)
    ),
    "none": lambda z, ids: flat(z, ids, reduction="none").square().mean(),
    "classes left out": lambda z, ids: flat(z[..., :40], ids.clamp(max=39)),
    "classes in another order": lambda z, ids: flat(z[..., torch.arange(CLASSES - 1, -1, -1)], ids),
    "a penalty beside": lambda z, ids: shifted(z, ids) + z.square().mean() / 100,
    "an autograd function": lambda z, ids: shifted(Doubled.apply(z), ids),  # type: ignore[no-untyped-call]
    "in place": lambda z, ids: flat(z.mul_(2), ids),
    "hooked": lambda z, ids: (z.register_hook(lambda g: 2 * g), shifted(z, ids))[1],
    "added": lambda z, ids: flat(z + torch.ones(CLASSES, dtype=z.dtype), ids),
}


def gradients(model: nn.Module, loss: Loss, ids: Tensor, mode: Any = None) -> list[Tensor | None]:
    """Return the loss and its gradients."""
    model.zero_grad()
    if mode is None:
        found = loss(model(ids), ids)
    else:
        with mode:
            found = loss(model(ids), ids)
    found.backward()
    return [found.detach(), *grads(model)]


def chunked(others: OtherLayers, rows: int = 4) -> ChunkedLogits:
    gradients_of_tokens = (tokens().numel() + CLASSES) * FEATURES * 8
    return ChunkedLogits(others, lambda: gradients_of_tokens + rows * 2 * CLASSES * 8)


@pytest.mark.parametrize("model", ["plain", "bias", "cap", "tied"])
@pytest.mark.parametrize("loss", [*CHUNKED, *COMPUTED])
def test_gradients_are_those_of_the_whole(small: None, loss: str, model: str) -> None:
    options: dict[str, Any] = {} if model == "plain" else {model: 5.0 if model == "cap" else True}
    words, ids, others = Words(**options).double(), tokens(), OtherLayers()
    loss_fn = CHUNKED.get(loss) or COMPUTED[loss]
    wanted = gradients(words, loss_fn, ids)
    for _ in range(2):  # the second time it is known which layer is a head
        found = gradients(words, loss_fn, ids, chunked(others))
        assert error_of(found, wanted) <= 1e-12
        assert (words.head.weight in others) == (loss in COMPUTED)


def test_a_loss_in_single_precision_is_scaled_before_it_is_rounded(small: None) -> None:
    # as in the models of transformers, of which a piece is a third of its batch
    words, ids = Words().double(), tokens()

    def loss_fn(z: Tensor, ids: Tensor) -> Tensor:
        return flat(z.float(), ids) / 3

    wanted = gradients(words, loss_fn, ids)[1:]
    found = gradients(words, loss_fn, ids, chunked(OtherLayers()))[1:]
    assert error_of(found, wanted) <= 1e-12


def views_edited(z: Tensor, ids: Tensor) -> Tensor:
    rows = z.view(-1, z.shape[-1])
    z.mul_(2)
    return functional.cross_entropy(rows, ids.flatten())


def views_hooked(z: Tensor, ids: Tensor) -> Tensor:
    rows = z.view(-1, z.shape[-1])
    z.register_hook(lambda grad: 2 * grad)
    return functional.cross_entropy(rows, ids.flatten())


@pytest.mark.parametrize("loss", [views_edited, views_hooked])
def test_logits_whose_views_could_miss_an_edit_are_refused(small: None, loss: Loss) -> None:
    words, ids = Words().double(), tokens()
    with chunked(OtherLayers()), pytest.raises(ReplayUnsafeError, match='leave "logits" out'):
        loss(words(ids), ids)


@pytest.mark.parametrize("read", [shifted, COMPUTED["log_softmax"]])
def test_an_input_that_was_edited_before_its_logits_were_read_is_refused(
    small: None, read: Loss
) -> None:
    # Plain training allows that where the head is frozen.
    words, ids = Words().double(), tokens()
    words.head.requires_grad_(False)
    hidden = words.body(words.embedding(ids)).tanh() * 1
    with chunked(OtherLayers()), pytest.raises(ReplayUnsafeError, match="edited in place after"):
        z = words.head(hidden)
        hidden.mul_(2)
        read(z, ids)


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_of_gradients_are_those_of_the_whole(small: None, inside: bool) -> None:
    words, ids = Words().double(), tokens()

    def twice(loss: Loss, mode: Any) -> list[Tensor]:
        with ExitStack() as stack:
            stack.enter_context(mode)
            found = loss(words(ids), ids)
            if not inside:
                stack.close()
            first = torch.autograd.grad(found, [*words.parameters()], create_graph=True)
            penalty = torch.stack([each.square().sum() for each in first]).sum()
            return list(torch.autograd.grad(penalty, [*words.parameters()]))

    for name in ("shifted", "log_softmax"):
        loss = CHUNKED.get(name) or COMPUTED[name]
        wanted = twice(loss, torch.enable_grad())
        assert error_of(twice(loss, chunked(OtherLayers())), wanted) <= 1e-12


def test_no_product_is_made_twice(small: None) -> None:
    words, ids = Words().double(), tokens()
    counts = []
    for mode in (None, chunked(OtherLayers())):
        with FlopCounterMode(display=False) as counter:
            gradients(words, shifted, ids, mode)
        counts.append(counter.get_total_flops())
    assert counts[1] <= counts[0]


def test_a_second_backward_has_the_same_gradient(small: None) -> None:
    words, ids = Words().double(), tokens()
    wanted = gradients(words, shifted, ids)[1:]
    words.zero_grad()
    with chunked(OtherLayers()):
        loss = shifted(words(ids), ids)
    loss.backward(retain_graph=True)
    loss.backward()
    assert error_of([there(grad) / 2 for grad in grads(words)], wanted) <= 1e-12


@pytest.mark.parametrize("name", ["shifted", "smoothed", "weighted and smoothed"])
@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_round_no_more_than_torch(
    small: None, dtype: torch.dtype, scale: float, name: str
) -> None:
    words, ids = Words().to(dtype), tokens(8)
    with torch.no_grad():  # where the softmax is nearly 1, digits are lost easily
        words.head.weight.mul_(scale)
    exact = Words().double()
    exact.load_state_dict(words.state_dict())
    ids[0] = exact(ids[0]).argmax(-1)
    wanted = gradients(exact, CHUNKED[name], ids)
    by_torch = gradients(words, CHUNKED[name], ids)
    words.zero_grad()
    found = gradients(words, CHUNKED[name], ids, chunked(OtherLayers()))
    assert there(found[0]).dtype is there(by_torch[0]).dtype
    assert error_of(found, wanted) <= 1.5 * error_of(by_torch, wanted) + torch.finfo(dtype).eps


def test_a_class_that_is_ruled_out_has_no_gradient(small: None) -> None:
    words, ids = Words(bias=True).double(), tokens().clamp(min=1)
    labels = ids.clone()
    labels[0] = -100  # where the target does not count, that of class 0 stands in its place
    with torch.no_grad():
        words.head.bias[0] = -torch.inf

    def loss(z: Tensor, ids: Tensor) -> Tensor:
        return flat(z, labels)

    wanted = gradients(words, loss, ids)
    found = gradients(words, loss, ids, chunked(OtherLayers()))
    assert error_of(found, wanted) <= 1e-12


def test_a_head_in_float16_is_left_alone(small: None) -> None:
    words, ids = Words().half(), tokens()
    with chunked(OtherLayers()):
        assert type(words(ids)) is Tensor


def test_autocast_computes_the_same_logits(small: None) -> None:
    words, ids = Words().float(), tokens()

    def loss(z: Tensor, ids: Tensor) -> Tensor:
        assert z.dtype is torch.bfloat16
        return shifted(z.float(), ids)

    with torch.autocast("cpu", torch.bfloat16):
        wanted = loss(words(ids), ids)
        with chunked(OtherLayers()):
            found = loss(words(ids), ids)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        lazy: Any = None
        with chunked(OtherLayers()):
            lazy = words(ids)
        assert isinstance(lazy, LazyLogits)
        torch.testing.assert_close(lazy + 0, words(ids))


def test_logits_can_be_read_after_the_loss(small: None) -> None:
    words, ids = Words().double(), tokens()
    wanted = words(ids).detach()
    events: list[Event] = []
    mbs = elastic(words, escalate=("logits",), on_event=events.append)

    def loss_fn(piece: Tensor) -> Any:
        if not any(isinstance(event, Escalated) for event in events):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        z = words(piece)
        return shifted(z, piece), z

    result = mbs.backward(loss_fn, ids)
    torch.testing.assert_close(result.outputs, wanted, rtol=1e-12, atol=1e-12)
    assert type(result.outputs) is Tensor


def test_a_sample_whose_logits_do_not_fit_trains_exactly() -> None:
    classes = 8000
    words, ids = Words(classes=classes).double(), tokens(1, 512, classes)

    def loss_fn(piece: Tensor) -> Tensor:
        return shifted(words(piece), piece)

    wanted = gradients(words, shifted, ids)[1:]
    words.zero_grad()
    with MemoryBudget("20GiB", [words]) as budget:
        before = budget.live
        loss_fn(ids).backward()
        words.zero_grad()
        need = budget.peak - before
        budget.limit = before + need // 4
        with pytest.raises(MicroBatchFloorError, match='escalate="auto"'):
            elastic(words, sensor=None).backward(loss_fn, ids)
        events: list[Event] = []
        mbs = elastic(words, sensor=None, escalate=("logits",), on_event=events.append)
        mbs.backward(loss_fn, ids)
        found = grads(words)
        words.zero_grad()
        assert mbs.backward(loss_fn, ids).ooms == 0
    assert [event.by for event in events if isinstance(event, Escalated)] == ["logits"]
    assert error_of(found, wanted) <= 1e-12


@pytest.mark.parametrize("rungs", [("logits",), ("logits", "tile", "offload")])
@pytest.mark.parametrize("door", [1, 3])
def test_oom_at_any_operation_while_in_chunks_changes_nothing(
    small: None, door: int, rungs: tuple[str, ...]
) -> None:
    words, ids = Words(tied=True).double(), tokens(4, 6)
    wanted = gradients(words, shifted, ids)[1:]
    words.zero_grad()
    events: list[Event] = []

    def loss_fn(piece: Tensor) -> Tensor:
        if sum(isinstance(event, Escalated) for event in events) < len(rungs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return shifted(words(piece), piece)

    mbs = elastic(words, escalate=rungs, on_event=events.append, micro_batch_size=2)
    through(door, mbs, loss_fn, ids)
    words.zero_grad()
    for strike in every_operation(stride=11):
        with strike:
            through(door, mbs, loss_fn, ids)
        assert error_of(grads(words), wanted) <= 1e-12, strike.hits
        words.zero_grad()


def test_a_failure_inside_a_chunk_leaves_nothing_alive(small: None) -> None:
    words, ids = Words(bias=True), tokens()
    for strike in every_operation(stride=3):
        with MemoryBudget("1GiB", [words, ids]) as budget:
            before = budget.live
            with suppress(torch.OutOfMemoryError), strike:
                gradients(words, shifted, ids, chunked(OtherLayers()))
            words.zero_grad()
            drop_unrun()
            assert budget.live == before, strike.hits


class Softmaxes(TorchDispatchMode):
    """The rows of every softmax."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.rows = list[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.exp_.default:
            self.rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("length", [100, 1000])
def test_a_longer_sample_makes_more_chunks_and_no_longer_ones(
    small: None, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(logits, "_ROWS", 25)
    words, ids = Words().double(), tokens(1, length)
    with ChunkedLogits(OtherLayers(), lambda: 2**30), Softmaxes() as seen:
        flat(words(ids), ids)
    assert seen.rows == [25] * (length // 25)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_takes_half_of_the_free_memory_at_most(
    small: None, dtype: torch.dtype, steps: int
) -> None:
    words, ids = Words(classes=400, cap=3.0 if steps else None).to(dtype), tokens(1, 500)
    with MemoryBudget("1GiB", [words, ids]) as budget:
        hidden = words.body(words.embedding(ids)).tanh()
        left, fixed = 2**20, hidden.nbytes + words.head.weight.nbytes
        with ChunkedLogits(OtherLayers(), lambda: left + fixed), Softmaxes() as seen:
            z = words.head(hidden)
            z = z if words.cap is None else torch.tanh(z / words.cap) * words.cap
            before = budget.live
            budget.reset_peak()
            flat(z, ids)
        assert len(seen.rows) > 1
        # a few numbers a row come to the logits
        assert left / 8 < budget.peak - before - fixed < 0.52 * left


def test_the_input_of_the_head_is_gone_once_its_gradient_is_there(small: None) -> None:
    words, ids = Words(), tokens()
    alive: list[bool] = []
    with chunked(OtherLayers()):
        before = words.body(words.embedding(ids))
        hidden = 2 * before  # no operation but the head's keeps it
        kept = StorageWeakRef(hidden.untyped_storage())
        before.register_hook(lambda grad: alive.append(not kept.expired()))
        loss = flat(words.head(hidden), ids)
        del hidden
    assert not kept.expired()
    loss.backward()
    assert alive == [False]


class Wide(nn.Module):
    """Two blocks with a wide layer inside; the user can have checkpointed them."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2)]
        )
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + x.mean(-2, keepdim=True)
            x = x + (checkpoint(block, x, use_reentrant=False) if self.own else block(x))
        return x


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("rungs", [("logits",), ("logits", "checkpoint"), ("logits", "tile")])
def test_wide_layers_in_checkpoints_compute_the_same_in_backward(
    small: None, monkeypatch: pytest.MonkeyPatch, rungs: tuple[str, ...], own: bool
) -> None:
    for name, value in {"SMALL": 0, "WORTH": 0, "FEWEST": 2}.items():
        monkeypatch.setattr(tile, name, value)
    model = Wide(own=own).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    wanted = grads(model)
    model.zero_grad()
    events: list[Event] = []

    def loss_fn(piece: Tensor) -> Tensor:
        if sum(isinstance(event, Escalated) for event in events) < len(rungs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        found: Tensor = model(piece).square().mean()
        return found

    elastic(model, escalate=rungs, on_event=events.append).backward(loss_fn, x)
    assert error_of(grads(model), wanted) <= 1e-12
