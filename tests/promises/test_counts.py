"""No sample's loss is lost because it has no loss terms, and no NaN of it reaches a gradient.

Each reference is a plain backward of the whole batch in float64.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import CountError, LossError, MemoryBudget
from tests.helpers.steps import elastic, grads, mlp, off_by, settled, there, through, whole_gradient
from tests.helpers.strikes import every_operation

EXACT = 1e-12
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]

POSITIVES = [0, 0, 3, 0, 0, 1, 0, 2]  # objects in each picture


def pictures(positives: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(3)
    hits = torch.zeros(len(positives), 4, dtype=torch.float64)
    for row, n in enumerate(positives):
        hits[row, :n] = 1
    x = torch.randn(len(positives), 6, dtype=torch.float64, generator=generator)
    return {"x": x, "hits": hits}


def focal(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum over all anchors: a picture without an object has a loss, too (RetinaNet)."""
    return functional.binary_cross_entropy_with_logits(
        model(batch["x"]), batch["hits"], reduction="sum"
    )


def objects(batch: Batch) -> Tensor:
    return batch["hits"].sum(1)


def utterances() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(8, 10, 6, dtype=torch.float64, generator=generator),
        "target": torch.randint(1, 4, (8, 4), generator=generator),
        "words": torch.tensor([0, 0, 0, 0, 3, 2, 1, 4]),
    }


def ctc(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum over utterances: one without words has a loss, all blanks."""
    return functional.ctc_loss(
        model(batch["x"]).log_softmax(-1).transpose(0, 1),
        batch["target"],
        torch.full((len(batch["x"]),), 10),
        batch["words"],
        reduction="sum",
    )


SUMS: dict[str, tuple[Loss, Batch, Callable[[Batch], Tensor]]] = {
    "focal": (focal, pictures(POSITIVES), objects),
    "ctc": (ctc, utterances(), lambda batch: batch["words"]),
}


@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("size", [8, 4, 2, 1])
def test_a_sum_counts_every_sample_also_those_without_a_loss_term(
    kind: str, size: int, door: int
) -> None:
    model, (loss, batch, count) = mlp(), SUMS[kind]
    total = count(batch).sum()
    mbs = elastic(model, micro_batch_size=size, reduction="sum", count=count)

    def whole(net: nn.Module) -> Tensor:
        return loss(net, batch) / total

    result = through(door, mbs, lambda piece: loss(model, piece) / mbs.total, batch)
    assert off_by(model, whole_gradient(model, whole)) <= EXACT
    assert result.item() == pytest.approx(whole(model).item(), rel=1e-12)
    assert mbs.verify(lambda piece: loss(model, piece) / (mbs.total or 1), batch).ok


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("door", [1, 3])
def test_a_sum_with_pieces_without_a_term_is_exact_after_a_failure_anywhere(
    door: int, warm: bool
) -> None:
    model, batch = mlp(), pictures(POSITIVES)
    options: dict[str, Any] = {"micro_batch_size": 2, "reduction": "sum", "count": objects}

    def loss_fn(piece: Batch) -> Any:
        return focal(model, piece) / 6, piece["x"]

    exact = whole_gradient(model, lambda net: focal(net, batch) / 6)
    mbs = settled(door, model, loss_fn, batch, **options)
    for strike in every_operation(stride=11):
        model.zero_grad()
        mbs = mbs if warm else elastic(model, **options)
        with strike:
            result = through(door, mbs, loss_fn, batch)
        assert off_by(model, exact) <= EXACT, strike.hits
        assert torch.equal(result.outputs, batch["x"]), strike.hits


def test_a_sum_without_a_term_in_the_whole_batch_is_run() -> None:
    """A function that guards its division, as RetinaNet's does, trains on such a batch."""
    model, batch = mlp(), pictures([0] * 8)
    mbs = elastic(model, micro_batch_size=2, reduction="sum", count=objects)
    mbs.backward(lambda piece: focal(model, piece) / (mbs.total or 1), batch)
    assert mbs.last_result is not None
    assert off_by(model, whole_gradient(model, lambda net: focal(net, batch))) <= EXACT
    model.zero_grad()
    with pytest.raises(CountError, match=r"the loss is inf.*\n.*divide by \(mbs.total or 1\)"):
        mbs.backward(lambda piece: focal(model, piece) / mbs.total, batch)
    assert all(grad is None for grad in grads(model))


# ---------------------------------------------------------------------- means


def per_object(model: nn.Module, batch: Batch) -> Tensor:
    """Return a mean over objects that pictures without one have a part in, too."""
    return focal(model, batch) / batch["hits"].sum().clamp(min=1)


@pytest.mark.parametrize("door", [1, 3])
def test_a_mean_refuses_a_loss_of_samples_that_count_nothing(door: int) -> None:
    model, batch = mlp(), pictures(POSITIVES)
    mbs = elastic(model, micro_batch_size=2, count=objects)
    with pytest.raises(LossError, match=r"samples 0:2 .* has no terms there") as caught:
        through(door, mbs, lambda piece: per_object(model, piece), batch)
    assert all(grad is None for grad in grads(model))
    # its first way out: the sum, divided by mbs.total
    assert "return the sum divided by mbs.total, with reduction='sum'" in str(caught.value)
    mbs = elastic(model, micro_batch_size=2, count=objects, reduction="sum")
    through(door, mbs, lambda piece: focal(model, piece) / mbs.total, batch)
    assert off_by(model, whole_gradient(model, lambda net: per_object(net, batch))) <= EXACT


def masked(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over the places that hold an object; 0 where there is none."""
    squares: Tensor = model(batch["x"]).square() * batch["hits"]
    return squares.sum() / batch["hits"].sum().clamp(min=1)


def weight_decay(model: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


@pytest.mark.parametrize("door", [1, 3])
def test_a_regulariser_under_its_own_name_is_counted_once(door: int) -> None:
    model, batch = mlp(), pictures(POSITIVES)

    def whole(net: nn.Module) -> Tensor:
        return masked(net, batch) + weight_decay(net)

    mbs = elastic(model, micro_batch_size=2, count=objects)
    with pytest.raises(LossError, match="under a name of its own") as caught:
        through(door, mbs, lambda piece: masked(model, piece) + weight_decay(model), batch)
    assert "count={'loss': count, 'regulariser': None}" in str(caught.value)
    mbs = elastic(model, micro_batch_size=2, count={"loss": objects, "regulariser": None})
    result = through(
        door,
        mbs,
        lambda piece: {"loss": masked(model, piece), "regulariser": weight_decay(model)},
        batch,
    )
    assert off_by(model, whole_gradient(model, whole)) <= EXACT
    assert result.item() == pytest.approx(whole(model).item(), rel=1e-12)
    assert result.losses["loss"].item() == pytest.approx(masked(model, batch).item(), rel=1e-12)
    assert result.losses["regulariser"].item() == pytest.approx(
        weight_decay(model).item(), rel=1e-12
    )


def over_nothing(model: nn.Module, batch: Batch) -> Tensor:
    squares: Tensor = model(batch["x"]).square() * batch["hits"]
    return squares.sum() / batch["hits"].sum()


@pytest.mark.parametrize("kind", [masked, over_nothing])
@pytest.mark.parametrize("door", [1, 3])
def test_a_mean_over_nothing_is_run_for_its_outputs_and_leaves_no_nan(
    kind: Loss, door: int
) -> None:
    model, batch = mlp(), pictures(POSITIVES)

    def loss_fn(piece: Batch) -> Any:
        # without a graph where there is no object, as many functions return it
        any_object = bool(piece["hits"].any())
        return kind(model, piece) if any_object else torch.zeros(()), piece["x"]

    exact = whole_gradient(model, lambda net: kind(net, batch))
    mbs = elastic(model, micro_batch_size=2, count=objects)
    for strike in every_operation(stride=11):
        model.zero_grad()
        with strike:
            result = through(door, mbs, loss_fn, batch)
        assert off_by(model, exact) <= EXACT, strike.hits
        assert torch.equal(result.outputs, batch["x"]), strike.hits
    model.zero_grad()
    through(door, mbs, lambda piece: kind(model, piece), batch)
    assert off_by(model, exact) <= EXACT


# ---------------------------------------------------------------------- several losses


def detr(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the means over pictures and over objects, the latter 0/0 without any."""
    scores = model(batch["x"])
    return {
        "labels": scores.logsumexp(1).mean(),
        "boxes": (scores.square() * batch["hits"]).sum() / batch["hits"].sum(),
    }


NAMED: dict[str, Any] = {"labels": None, "boxes": objects}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("door", [1, 3])
def test_a_loss_without_a_term_in_the_batch_has_no_part_in_it(door: int, enabled: bool) -> None:
    """A batch of pictures without boxes trains the classifier, wherever memory runs out."""
    model, batch = mlp(), pictures([0] * 8)
    exact = whole_gradient(model, lambda net: detr(net, batch)["labels"])
    mbs = elastic(model, micro_batch_size=2, count=NAMED, enabled=enabled)
    for strike in every_operation(stride=13) if enabled else [nullcontext()]:
        model.zero_grad()
        with strike:
            result = through(door, mbs, lambda piece: detr(model, piece), batch)
        assert off_by(model, exact) <= EXACT, strike
        assert set(result.losses) == {"labels", "boxes"}
        assert result.losses["boxes"].item() == 0
        assert result.losses["labels"].item() == pytest.approx(result.item(), rel=1e-12)


@pytest.mark.parametrize("door", [1, 3])
def test_a_sum_by_0_of_several_losses_has_no_part_in_the_batch(door: int) -> None:
    model, batch = mlp(), pictures([0] * 8)
    mbs = elastic(model, micro_batch_size=2, count=NAMED, reduction="sum")

    def loss_fn(piece: Batch) -> dict[str, Tensor]:
        scores, total = model(piece["x"]), there(mbs.total)
        return {
            "labels": scores.logsumexp(1).sum() / total["labels"],
            "boxes": (scores.square() * piece["hits"]).sum() / total["boxes"],
        }

    exact = whole_gradient(model, lambda net: detr(net, batch)["labels"])
    for strike in every_operation(stride=13):
        model.zero_grad()
        with strike:
            through(door, mbs, loss_fn, batch)
        assert off_by(model, exact) <= EXACT, strike.hits


@pytest.mark.parametrize("size", [8, 3, 1])
def test_each_loss_of_a_result_is_weighed_by_its_own_count(size: int) -> None:
    model, batch = mlp(), pictures(POSITIVES)
    mbs = elastic(model, micro_batch_size=size, count=NAMED)
    result = mbs.backward(lambda piece: detr(model, piece), batch)
    whole = detr(model, batch)
    assert list(result.losses) == ["labels", "boxes"]
    for name, loss in whole.items():
        assert result.losses[name].item() == pytest.approx(loss.item(), rel=1e-12)
        assert not result.losses[name].requires_grad
    assert result.item() == float(result) == result.detach().item()
    assert result.item() == pytest.approx(sum(each.item() for each in whole.values()), rel=1e-12)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_list_of_losses_is_refused_and_its_ways_out_are_right(enabled: bool) -> None:
    model, batch = mlp(), pictures(POSITIVES)

    def pair(net: nn.Module, piece: Batch) -> tuple[Tensor, Tensor]:
        scores = net(piece["x"])
        return scores.square().mean(), scores.logsumexp(1).mean()

    with pytest.raises(LossError, match="entries 0 and 1 are both scalars") as caught:
        elastic(model, micro_batch_size=2, enabled=enabled).backward(
            lambda piece: list(pair(model, piece)), batch
        )
    assert all(grad is None for grad in grads(model))
    both = whole_gradient(model, lambda net: sum(pair(net, batch), torch.zeros(())))
    first = whole_gradient(model, lambda net: pair(net, batch)[0])
    assert all(way in str(caught.value) for way in ("their sum", "count={'a'", "value.detach()"))
    ways: list[tuple[Any, Any, Any]] = [
        (None, lambda a, b: a + b, both),
        ({"a": None, "b": None}, lambda a, b: {"a": a, "b": b}, both),
        (None, lambda a, b: (a, b.detach()), first),
    ]
    for count, way, wanted in ways:
        model.zero_grad()
        mbs = elastic(model, micro_batch_size=2, count=count, enabled=enabled)
        mbs.backward(lambda piece, way=way: way(*pair(model, piece)), batch)
        assert off_by(model, wanted) <= EXACT


# ---------------------------------------------------------------------- verify


def test_verify_names_a_loss_of_samples_that_count_nothing() -> None:
    model, batch = mlp(), pictures(POSITIVES)
    losses: list[Loss] = [per_object, lambda net, b: masked(net, b) + weight_decay(net)]
    for loss in losses:
        report = elastic(model, count=objects).verify(partial(loss, model), batch)
        assert not report.ok
        assert len(report.findings) == 1
        assert "has no terms there" in report.findings[0]
        assert "return the sum divided by mbs.total, with reduction='sum'" in report.findings[0]
    right: list[tuple[dict[str, Any], Callable[[Batch], Tensor]]] = [
        ({"count": objects}, lambda piece: masked(model, piece)),
        ({"count": objects}, lambda piece: over_nothing(model, piece)),
        ({"reduction": "sum"}, lambda piece: focal(model, piece)),
        ({"count": objects, "reduction": "sum"}, lambda piece: focal(model, piece)),
    ]
    for options, fn in right:
        report = elastic(model, **options).verify(fn, batch)
        assert (report.ok, report.findings) == (True, ()), report


def test_verify_leaves_out_a_loss_without_a_term_in_the_batch() -> None:
    model, batch = mlp(), pictures([0] * 8)
    report = elastic(model, count=NAMED).verify(lambda piece: detr(model, piece), batch, samples=8)
    assert (report.ok, report.findings) == (True, ())
    assert report.whole == pytest.approx(detr(model, batch)["labels"].item(), rel=1e-12)


def test_verify_does_not_take_rounding_for_a_part_that_comes_once() -> None:
    model, batch = mlp(), pictures(POSITIVES)
    report = elastic(model, reduction="sum").verify(
        lambda piece: focal(model, piece) * (2.0 if len(piece["x"]) == 6 else 1.0), batch
    )
    assert not report.ok
    assert "does not come from samples" not in str(report)


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("empty", [0, 1, 2, 3])
def test_a_piece_without_a_term_keeps_no_graph_in_the_frame_of_a_loop(empty: int) -> None:
    """No backward frees its activations, and `loss` lives until the next piece has its own."""
    model = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 4)).double()
    positives = [2] * 32
    positives[8 * empty : 8 * empty + 8] = [0] * 8
    batch = pictures(positives)
    held = []
    with MemoryBudget("1GiB", track=(model, batch)) as budget:
        mbs = elastic(model, micro_batch_size=8, count=objects)
        for micro in mbs.micro_batches(batch):
            with micro:
                loss = over_nothing(model, micro.data)
                micro.backward(loss)
            held.append(budget.live)
    activations = 8 * 256 * 8
    assert max(held) - min(held) < activations + 2 * sum(p.nbytes for p in model.parameters())
    later = held[max(1, empty) :]
    assert max(later) - min(later) < activations / 2
