"""Pieces by length give the gradient of the padded batch; results keep the batch's order."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, MemoryBudget, PerPiece, count_tokens
from elastic_mbs.testing import InjectOOM
from stress.flat_options import grouped
from tests.helpers.steps import elastic, off_by, once, settled, there, through, whole_gradient
from tests.helpers.strikes import every_operation

EXACT = 1e-12
LENGTHS = [2, 7, 1, 4, 1, 7, 3, 5, 1, 2, 1]
FEW = LENGTHS[:6]  # where every operation is struck
OPTIONS: dict[str, Any] = {"count": count_tokens("labels"), "pieces": "by_length", "length": "mask"}


class Reader(nn.Module):
    """Attention over the words that the mask shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.query, self.head = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12)
        self.double()

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(words)
        scores = (self.query(x) @ x.transpose(1, 2)).masked_fill(mask[:, None] == 0, -torch.inf)
        out: Tensor = self.head(x + scores.softmax(-1) @ x)
        return out


def sentences(lengths: list[int], width: int) -> dict[str, Any]:
    torch.manual_seed(1)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    words = torch.randint(1, 12, mask.shape) * mask
    labels = torch.where((mask > 0) & (torch.rand(mask.shape) < 0.7), words, -100)
    # samples of one word count nothing
    labels[:, 0] = torch.where(torch.tensor(lengths) > 1, words[:, 0], -100)
    return {"words": words, "mask": mask, "labels": labels, "index": torch.arange(len(lengths))}


def loss_of(model: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
    scores = model(batch["words"], batch["mask"])
    return functional.cross_entropy(
        scores.flatten(0, 1), batch["labels"].flatten(), reduction=reduction
    )


def wanted(model: nn.Module, batch: Any, reduction: str = "mean") -> list[Tensor | None]:
    return whole_gradient(model, lambda twin: loss_of(twin, batch, reduction))


@pytest.mark.injectable
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=14),
    st.integers(0, 3),
    st.integers(1, 14) | st.just("auto"),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["mean", "sum"]),
)
def test_the_gradient_is_that_of_the_padded_batch_for_every_size(
    lengths: list[int],
    more: int,
    size: int | str,
    least: int,
    align: int,
    door: int,
    reduction: str,
) -> None:
    model, batch = Reader(), sentences(lengths, max(lengths) + more)
    least = min(least, size) if isinstance(size, int) else least
    sizes = {
        "micro_batch_size": size,
        "min_micro_batch_size": least,
        "align": align,
        "reduction": reduction,
    }
    result = once(door, model, lambda b: loss_of(model, b, reduction), batch, **OPTIONS, **sizes)
    assert off_by(model, wanted(model, batch, reduction)) <= EXACT
    pieces = [stop - start for start, stop in result.partition]
    assert sum(pieces) == len(lengths)
    assert all(piece % align == 0 for piece in pieces[:-1])
    assert all(piece >= min(least, len(lengths)) for piece in pieces)
    if result.order is not None:
        assert [lengths[i] for i in result.order] == sorted(lengths, reverse=True)


@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize("warm", [False, True])
def test_running_out_of_memory_at_any_operation_replays_the_same_samples(
    door: int, warm: bool
) -> None:
    model, batch = Reader(), sentences(FEW, 8)
    exact = wanted(model, batch)
    seen: list[list[int]] = []

    def loss_fn(piece: Any) -> Any:
        seen.append(piece["index"].tolist())
        return loss_of(model, piece), piece["index"] * 1

    mbs = (
        settled(door, model, loss_fn, batch, **OPTIONS)
        if warm
        else elastic(model, micro_batch_size=3, **OPTIONS)
    )
    for strike in every_operation(stride=11):
        model.zero_grad()
        seen.clear()
        if not warm:
            mbs = elastic(model, micro_batch_size=3, **OPTIONS)
        with strike:
            result = through(door, mbs, loss_fn, batch)
        assert off_by(model, exact) <= EXACT, strike.hits
        order = list(there(result.order))
        run = [sample for start, stop in result.partition for sample in order[start:stop]]
        assert sorted(run) == list(range(len(FEW)))
        ranges = [
            order[start : start + len(piece)] for piece in seen for start in [order.index(piece[0])]
        ]
        assert ranges == seen  # each attempt was a range of the same order
        if door == 1:
            assert result.outputs.tolist() == sorted(run)


def test_a_failed_piece_is_halved_by_its_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = Reader(), sentences(LENGTHS, 8)
    mbs = elastic(model, micro_batch_size=4, **OPTIONS)
    controller, told = mbs._knowledge.controller, list[tuple[int, int | None]]()
    halve = controller.out_of_memory

    def out_of_memory(key: Any, attempted: int, capacity: Any) -> int | None:
        told.append((attempted, halve(key, attempted, capacity)))
        return told[-1][1]

    monkeypatch.setattr(controller, "out_of_memory", out_of_memory)
    worth: list[int] = []

    def loss_fn(piece: Any) -> Tensor:
        worth.append(piece["words"].numel())
        if piece["words"].numel() > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return loss_of(model, piece)

    result = mbs.backward(loss_fn, batch)
    assert off_by(model, wanted(model, batch)) <= EXACT
    # The batch has the elements of five samples of seven words: two pieces of at most three.
    assert told == [(3, 1)]
    assert worth[0] == 21
    assert max(worth[1:]) <= 7
    assert (result.micro_batch_size, result.ooms) == (1, 1)


@pytest.mark.parametrize("replay", ["auto", "isolate"])
def test_short_samples_are_halved_below_the_elements_of_the_longest(
    replay: str,
) -> None:
    model, batch = Reader(), sentences([16, *[2] * 16], 16)

    def loss_fn(piece: Any) -> Tensor:
        if len(piece["words"]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return loss_of(model, piece)

    result = elastic(model, micro_batch_size=1, replay=replay, **OPTIONS).backward(loss_fn, batch)
    assert off_by(model, wanted(model, batch)) <= EXACT
    assert max(stop - start for start, stop in result.partition) <= 3


def test_evaluation_gives_the_outputs_of_the_batch_in_its_order() -> None:
    model, batch = Reader(), sentences(LENGTHS, 7)
    names = [f"sentence {i}" for i in range(len(LENGTHS))]

    def scores(piece: Any) -> dict[str, Any]:
        out = model(piece["words"], piece["mask"])
        return {
            "words": piece["words"] * 1,
            "first": out[:, 0],
            "all": out * piece["mask"][:, :, None],
            "names": piece["names"],
            "n": float(len(out)),
        }

    batch["names"] = names
    with torch.no_grad():
        whole = scores(batch)
    for size, fails in ((2, 0), (2, 5), (4, 12), (11, 3)):
        with InjectOOM(at=[fails]) as strike:
            parts = elastic(model, micro_batch_size=size, **OPTIONS).evaluate(scores, batch)
        assert bool(strike.hits) == (fails > 0)
        assert torch.equal(parts["words"], whole["words"])
        assert torch.allclose(parts["first"], whole["first"], rtol=1e-12)
        assert torch.allclose(parts["all"], whole["all"], rtol=1e-12)
        assert parts["names"] == names
        assert isinstance(parts["n"], PerPiece)
        assert parts["n"].sum() == len(LENGTHS)


def test_verify_finds_a_model_that_does_not_mask_its_padding() -> None:
    model, batch = Reader(), sentences(LENGTHS, 9)
    assert elastic(model, **OPTIONS).verify(lambda b: loss_of(model, b), batch).ok

    def unmasked(piece: Any) -> Tensor:
        return loss_of(model, piece | {"mask": torch.ones_like(piece["mask"])})

    report = elastic(model, **OPTIONS).verify(unmasked, batch)
    assert not report.ok
    assert "padding" in str(report)


def test_a_batch_of_one_length_is_not_sorted_and_its_pieces_are_views() -> None:
    model, batch = Reader(), sentences([4] * 6, 4)
    seen = list[int]()

    def loss_fn(piece: Any) -> Tensor:
        seen.append(piece["words"].untyped_storage().data_ptr())
        return loss_of(model, piece)

    mbs = elastic(model, micro_batch_size=2, **OPTIONS)
    mbs.backward(loss_fn, batch)  # copies: it is not known yet whether the step edits them
    seen.clear()
    result = mbs.backward(loss_fn, batch)
    assert result.order is None
    assert set(seen) == {batch["words"].untyped_storage().data_ptr()}


def test_a_disabled_runtime_runs_the_padded_batch_as_it_is() -> None:
    model, batch = Reader(), sentences(LENGTHS, 8)
    result = elastic(model, enabled=False, **OPTIONS).backward(lambda b: loss_of(model, b), batch)
    assert (result.order, result.partition) == (None, ((0, len(LENGTHS)),))


@pytest.mark.parametrize("share", [0.3, 0.7, 1.1])
def test_after_a_plan_the_first_step_runs_at_the_largest_size(
    share: float,
) -> None:
    torch.manual_seed(0)
    model, batch = Reader(), sentences([*range(2, 50), 49], 64)
    with MemoryBudget(2**40, track=[model, *batch.values()]) as budget:
        mbs = ElasticMBS(model, **grouped({"monitor_interval": 0, "seed": 0, **OPTIONS}))
        sizes = mbs.plan(lambda piece: loss_of(model, piece), batch).sizes
        assert sizes[0].size == 27  # in units of the longest sample
        least, most = there(sizes[-1].peak), there(sizes[0].peak)
        budget.limit = int((least + share * (most - least)) / 0.95) + 1024
        largest = there(mbs.plan(lambda piece: loss_of(model, piece), batch).largest)
        result = mbs.backward(lambda piece: loss_of(model, piece), batch)
        assert (result.ooms, budget.ooms) == (0, 0)
        assert (
            result.micro_batch_size
            == largest
            == (27 if share > 1 else pytest.approx(27 * share, abs=2))
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "place", [lambda value: value, lambda value: value.pin_memory(), lambda value: value.cuda()]
)
@pytest.mark.parametrize("prefetch", [True, "pin"])
def test_host_pinned_and_device_batches_give_the_same(place: Any, prefetch: Any) -> None:
    model, batch = Reader(), sentences(LENGTHS, 8)
    exact = [None if grad is None else grad.cuda() for grad in wanted(model, batch)]
    model.cuda()
    mbs = elastic(model, micro_batch_size=2, prefetch=prefetch, outputs="device", **OPTIONS)
    moved = {name: place(value) for name, value in batch.items()}
    for fails in (0, 0, 7, 20, 33):
        model.zero_grad()
        with InjectOOM(at=[fails]):
            result = mbs.backward(lambda piece: (loss_of(model, piece), piece["index"] * 1), moved)
        assert off_by(model, exact) <= EXACT
        run = [
            there(result.order)[i] for start, stop in result.partition for i in range(start, stop)
        ]
        assert result.outputs.tolist() == sorted(run)
