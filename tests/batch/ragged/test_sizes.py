"""A size that was learned holds for batches whose samples bring more or fewer rows."""

import random

import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, MemoryBudget, cut
from elastic_mbs.batch.view import BatchView


def packed(lengths: list[int]) -> dict[str, Tensor]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return {"hidden": torch.randn(1, starts[-1], 32), "cu_seqlens": torch.tensor(starts)}


def test_a_sample_costs_the_elements_that_it_brings() -> None:
    batch = {
        "img": torch.zeros(3, 10),
        "bboxes": torch.zeros(6, 4),
        "cls": torch.zeros(6, 1),
        "batch_idx": torch.tensor([2, 0, 0, 2, 2, 2]),
    }
    costs = BatchView(batch).costs
    assert costs is not None
    assert [costs.worth(i, i + 1) for i in range(3)] == [1, 1, 1]
    assert costs.unit == 10 + 4 * (4 + 1 + 1)
    assert costs.samples == 2  # 22 + 10 + 34 elements, of which the largest sample has 34


def test_samples_with_as_many_rows_are_counted_as_samples() -> None:
    batch = (torch.zeros(4), torch.zeros(8, 3))
    assert BatchView(batch, cut.ragged(1, lengths=[2, 2, 2, 2])).costs is None


def test_memory_that_is_short_is_met_once_and_not_in_each_batch() -> None:
    draw = random.Random(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
    batches = []
    for _ in range(40):
        most = draw.choice([20, 60, 200])
        batches.append([draw.randint(1, most) for _ in range(24)])
    with MemoryBudget("1400KiB"), ElasticMBS(model) as mbs:
        ooms = []
        for lengths in batches:
            batch = packed(lengths)
            result = mbs.backward(lambda piece: model(piece["hidden"]).square().mean(), batch)
            model.zero_grad(set_to_none=True)
            ooms.append(result.ooms)
    assert sum(ooms) > 0
    assert sum(ooms[20:]) <= 2, ooms


def test_a_plan_means_the_largest_samples() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
    batch = packed([5, 50, 7, 100, 3, 20, 60, 90, 1, 44])

    def activations(size: int, batch: dict[str, Tensor]) -> int:
        report = ElasticMBS(model).plan(
            lambda piece: model(piece["hidden"]).square().mean(), batch, budget="1GiB"
        )
        return next(each.activations for each in report.sizes if each.size == size)

    one, two = activations(1, batch), activations(2, batch)
    assert abs(one - activations(1, packed([100, 100]))) <= 0.01 * one
    assert abs(two - 2 * one) <= 0.01 * two
