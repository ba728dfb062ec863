"""Promises of `backward_embeddings`, for a loss that compares the samples of the whole batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import CallFailed, ElasticMBS, Event, MicroBatchFloorError
from elastic_mbs.testing import InjectOOM
from stress.streams import Streams
from tests.helpers.contrast import Contrast, samples
from tests.helpers.steps import FailOn, elastic, grads, mlp, off_by, quiet
from tests.helpers.strikes import every_operation

pytestmark = pytest.mark.injectable

EXACT = 1e-12

# ---------------------------------------------------------------------- exact, and once


@given(
    n=st.integers(1, 13),
    size=st.integers(1, 14),
    at=st.sets(st.integers(1, 140), max_size=3),
    warm=st.booleans(),
    full=st.booleans(),
    replay=st.sampled_from(["auto", "isolate"]),
)
@settings(max_examples=80)
def test_the_gradient_is_the_whole_batchs_whatever_fails(
    n: int, size: int, at: set[int], warm: bool, full: bool, replay: str
) -> None:
    case, x = Contrast(), samples(n)
    wanted = case.by_hand(x)
    mbs = elastic(case.model, micro_batch_size=size, replay=replay)
    if warm:
        mbs.backward_embeddings(case.embed, case.over, x)
        case.zero()
    start: list[Tensor | None] = [
        torch.full_like(leaf, 3.0) if full else None for leaf in case.leaves
    ]
    for leaf, grad in zip(case.leaves, start, strict=True):
        leaf.grad = None if grad is None else grad.clone()
    try:
        with InjectOOM(at=at) as inject:
            result = mbs.backward_embeddings(case.embed, case.over, x)
    except MicroBatchFloorError:
        assert len(inject.hits) > 1, "one failure can always be recovered from"
        assert off_by(case.leaves, start) == 0
        return
    total = [
        grad if before is None or grad is None else grad + before
        for grad, before in zip(wanted, start, strict=True)
    ]
    assert off_by(case.leaves, total) <= EXACT
    assert float(result) == pytest.approx(case.over(case.embed(x)).item(), rel=EXACT)
    assert [start for start, _ in result.partition] + [n] == [
        0,
        *(stop for _, stop in result.partition),
    ]


@pytest.mark.parametrize(
    ("layers", "warm"),
    [
        ((), False),
        ((), True),
        ((nn.Dropout(0.4), nn.Dropout(0.4)), True),
        ((nn.BatchNorm1d(4), nn.Dropout(0.4)), False),
    ],
    ids=["cold", "warm", "masks", "statistics"],
)
@pytest.mark.no_oom_injection
def test_a_failure_at_any_operation_is_recovered_from(
    layers: tuple[nn.Module, ...], warm: bool
) -> None:
    x = samples(8)
    for inject in every_operation(stride=11, least=60):  # in the second pass, too
        case = Contrast(
            *[type(layer)(4) if isinstance(layer, nn.BatchNorm1d) else layer for layer in layers]
        )
        mbs = elastic(case.model, micro_batch_size=4)
        if warm:
            mbs.backward_embeddings(case.embed, case.over, x)
        case.zero()
        buffers = [buffer.clone() for buffer in case.model.buffers()]
        torch.manual_seed(7)
        with inject:
            result = mbs.backward_embeddings(case.embed, case.over, x)
        end = Streams.now()
        after = [buffer.clone() for buffer in case.model.buffers()]
        found = grads(case.leaves)
        for buffer, value in zip(case.model.buffers(), buffers, strict=True):
            buffer.data.copy_(value)
        torch.manual_seed(7)
        assert off_by(case.leaves, case.by_hand(x, result.partition)) <= EXACT, (
            inject.hits,
            result,
        )
        assert Streams.now().same(end), "random streams are where one pass leaves them"
        assert all(
            torch.allclose(a, b, rtol=EXACT)
            for a, b in zip(case.model.buffers(), after, strict=True)
        ), "buffers are updated once"
        assert found[-1] is not None


@pytest.mark.no_oom_injection
def test_a_second_pass_of_independent_samples_is_split_where_it_fails() -> None:
    case, x = Contrast(), samples(8)
    mbs, embed = elastic(case.model, micro_batch_size=4), case.embed_failing(FailOn(4 + 3))
    mbs.backward_embeddings(embed, case.over, x)
    case.zero()
    result = mbs.backward_embeddings(embed, case.over, x)
    assert case.sizes == [4, 4, -8, 4, 2, 2, 2, 2]
    assert (result.partition, result.ooms, result.replayed_samples) == (
        ((0, 2), (2, 4), (4, 6), (6, 8)),
        1,
        4,
    )


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("options", [{"layers": (nn.Dropout(0.4),)}, {"replay": "isolate"}])
def test_a_second_pass_that_would_draw_other_masks_restarts_both(
    options: dict[str, Any],
) -> None:
    case, x = Contrast(*options.pop("layers", ())), samples(8)
    mbs = elastic(case.model, micro_batch_size=4, **options)
    mbs.backward_embeddings(case.embed, case.over, x)
    case.zero()
    result = mbs.backward_embeddings(case.embed_failing(FailOn(4)), case.over, x)
    assert case.sizes == [4, 4, -8, 4, 4, 2, 2, 2, 2, -8, 2, 2, 2, 2]
    assert (result.ooms, result.replayed_samples) == (1, 16)
    case.zero()
    mbs = elastic(case.model, micro_batch_size=4, **options)
    # A failure in the first pass leaves pieces of two sizes, so the pass runs again.
    result = mbs.backward_embeddings(case.embed_failing(FailOn(2)), case.over, x)
    assert case.sizes == [4, 4, 2, 2, 2, 2, 2, 2, -8, 2, 2, 2, 2]
    assert (result.ooms, result.replayed_samples) == (1, 12)


@pytest.mark.no_oom_injection
def test_a_loss_that_draws_random_numbers_draws_after_the_embeddings() -> None:
    case, x = Contrast(nn.Dropout(0.4)), samples(8)
    over = case.over
    # a loss with noise
    case.over = lambda z: over(z + torch.randn_like(z))  # type: ignore[method-assign]
    for inject in every_operation(stride=11):  # memory runs out after the loss has drawn, too
        torch.manual_seed(3)
        with inject:
            result = elastic(case.model, micro_batch_size=3).backward_embeddings(
                case.embed, case.over, x
            )
        drawn = torch.rand(1)
        torch.manual_seed(3)
        assert off_by(case.leaves, case.by_hand(x, result.partition)) <= EXACT
        assert torch.equal(torch.rand(1), drawn)
        case.zero()


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("size", [8, 3])
def test_several_embedders_with_labels_beside_them(size: int) -> None:
    # Labels need no gradient. The loss gets them in the batch's order.
    picture, text = mlp(seed=1), mlp(seed=2)
    batch = {"picture": samples(8), "text": samples(8) + 1, "label": torch.arange(8) % 3}
    scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    leaves = [*picture.parameters(), *text.parameters(), scale]

    def embed(b: dict[str, Tensor]) -> dict[str, Any]:
        return {"pair": (picture(b["picture"]), text(b["text"])), "label": b["label"]}

    def over(found: dict[str, Any]) -> Tensor:
        a, b = found["pair"]
        same = (found["label"][:, None] == found["label"]).double()
        return -functional.logsigmoid((a @ b.T) * scale * (2 * same - 1)).mean()

    over(embed(batch)).backward()
    wanted = grads(leaves)
    for leaf in leaves:
        leaf.grad = None
    result = ElasticMBS([picture, text], micro_batch_size=size, **quiet()).backward_embeddings(
        embed, over, batch
    )
    assert off_by(leaves, wanted) <= EXACT
    assert float(result) == pytest.approx(over(embed(batch)).item(), rel=EXACT)


@pytest.mark.no_oom_injection
def test_padded_texts_in_pieces_by_length() -> None:
    # The model gives a vector per token. A piece's gradient is as long as its trimmed samples.
    model = nn.Embedding(20, 4).double()
    mask = (torch.arange(6) < torch.tensor([2, 6, 1, 4, 3])[:, None]).long()
    batch = {
        "ids": torch.randint(1, 20, (5, 6), generator=torch.Generator().manual_seed(0)) * mask,
        "mask": mask,
    }

    def embed(b: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(b["ids"]).tanh() * b["mask"][..., None]
        return found

    def over(z: Tensor) -> Tensor:
        return torch.einsum("ild,jmd->ij", z, z).logsumexp(1).mean()

    over(embed(batch)).backward()
    wanted = grads(model)
    model.zero_grad()
    result = elastic(
        model, micro_batch_size=2, pieces="by_length", length="mask"
    ).backward_embeddings(embed, over, batch)
    assert len(result.partition) > 1
    assert off_by(model, wanted) <= EXACT


def test_on_a_device_the_gradient_is_the_whole_batchs(device: torch.device) -> None:
    case, x = Contrast(nn.Dropout(0.3)), samples(8)
    case.model.to(device)
    case.temperature = case.temperature.detach().to(device).requires_grad_()
    mbs = elastic(case.model, micro_batch_size=3)
    torch.manual_seed(2)
    result = mbs.backward_embeddings(case.embed, case.over, x)
    torch.manual_seed(2)
    assert off_by(case.leaves, case.by_hand(x.to(device), result.partition)) <= EXACT


# ---------------------------------------------------------------------- no trace


def failing(
    at: str, error: BaseException, case: Contrast
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the case's functions, one of which fails: a pass over the batch, or the loss."""
    fails = FailOn(*({"first": (2,), "second": (4,)}.get(at, ())), error=lambda: error)

    def embed(x: Tensor) -> Tensor:
        fails()
        return case.embed(x)

    def over(z: Tensor) -> Tensor:
        torch.rand(3)
        if at == "loss":
            raise error
        return case.over(z)

    return embed, over


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("at", ["first", "loss", "second"])
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), ValueError("mine"), torch.OutOfMemoryError("CUDA out of memory.")],
    ids=repr,
)
@pytest.mark.parametrize("full", [False, True])
def test_an_error_anywhere_leaves_everything_as_it_was(
    at: str, error: BaseException, full: bool
) -> None:
    case, x = Contrast(nn.BatchNorm1d(4), nn.Dropout(0.4)), samples(8)
    events: list[Event] = []
    mbs = elastic(case.model, micro_batch_size=4, min_micro_batch_size=4, on_event=events.append)
    if full:
        mbs.backward_embeddings(case.embed, case.over, x)
    before, objects = grads(case.leaves), [leaf.grad for leaf in case.leaves]
    buffers, streams = [buffer.clone() for buffer in case.model.buffers()], Streams.now()
    embed, over = failing(at, error, case)
    if isinstance(error, torch.OutOfMemoryError):  # fails every time
        embed = (
            case.embed
            if at == "loss"
            else case.embed_failing(
                FailOn(*range(2 if at == "first" else 3, 99), error=lambda: error)
            )
        )
    with pytest.raises(
        MicroBatchFloorError if isinstance(error, torch.OutOfMemoryError) else type(error)
    ) as caught:
        mbs.backward_embeddings(embed, over, x)
    assert off_by(case.leaves, before) == 0
    assert all(leaf.grad is grad for leaf, grad in zip(case.leaves, objects, strict=True))
    assert "zero_grad" not in "".join(getattr(caught.value, "__notes__", ()))
    assert all(torch.equal(a, b) for a, b in zip(case.model.buffers(), buffers, strict=True))
    assert Streams.now().same(streams)
    assert sum(isinstance(event, CallFailed) for event in events) == 1
    case.zero()
    result = mbs.backward_embeddings(case.embed, case.over, x)
    assert result.partition == ((0, 4), (4, 8)), "the next call is as any other"


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("ends", ["clean", "loss", "second"])
def test_no_embedding_stays_alive_after_the_call(ends: str) -> None:
    case, x, alive = Contrast(), samples(8), list[weakref.ref[Tensor]]()

    def embed(b: Tensor) -> Tensor:
        z = case.embed(b)
        alive.append(weakref.ref(z))
        if ends == "second" and min(case.sizes) < 0:  # the loss has run
            raise ValueError("mine")
        return z

    def over(z: Tensor) -> Tensor:
        alive.append(weakref.ref(z))
        z.register_hook(lambda grad: alive.append(weakref.ref(grad)))
        if ends == "loss":
            raise ValueError("mine")
        return case.over(z)

    mbs = elastic(case.model, micro_batch_size=3)
    try:
        mbs.backward_embeddings(embed, over, x)
    except ValueError:
        assert ends != "clean"
    gc.collect()
    assert len(alive) >= 4
    assert not any(ref() is not None for ref in alive)


@pytest.mark.no_oom_injection
def test_a_view_of_all_states_does_not_keep_them() -> None:
    # Many models embed with the state of the first token.
    model, kept = nn.Linear(6, 4).double(), []

    def over(z: Tensor) -> Tensor:
        kept.append(z.untyped_storage().nbytes())
        return (z @ z.T).mean()

    elastic(model, micro_batch_size=4).backward_embeddings(
        lambda b: model(b[:, None].expand(-1, 50, -1))[:, 0], over, samples(8)
    )
    assert kept == [8 * 4 * 8]
