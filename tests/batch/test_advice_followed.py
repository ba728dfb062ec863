"""Batches of public reports train exactly once the advised line is followed."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_mbs import ElasticMBS, cut
from elastic_mbs.errors import BatchError
from tests.helpers.steps import quiet

N = 6
COUNTS = [2, 0, 1, 3, 1, 2]
LENGTHS = torch.tensor(COUNTS)
OWNER = torch.repeat_interleave(torch.arange(N), LENGTHS)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Case:
    """A batch, its model, and the mean of its loss over samples."""

    def __init__(
        self, model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        self.model, self.batch = model, batch
        self.loss_fn: Callable[[Any], Tensor] = lambda piece: loss(self.model, piece)


def speech() -> Case:
    """Return concatenated targets of CTC."""
    targets = torch.randint(1, 6, (sum(COUNTS),), generator=torch.Generator().manual_seed(0))
    batch = (rand(N, 12, 5), targets, torch.full((N,), 12), LENGTHS)

    def loss(model: nn.Module, piece: Any) -> Tensor:
        x, labels, steps, counts = piece
        scores = model(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, labels, steps, counts, reduction="none").mean()

    return Case(nn.Linear(5, 6).double(), batch, loss)


def bags() -> Case:
    """Return the bags of an EmbeddingBag."""
    words = torch.randint(0, 9, (sum(COUNTS),), generator=torch.Generator().manual_seed(0))
    batch = (words, torch.cat([torch.zeros(1).long(), LENGTHS.cumsum(0)[:-1]]), rand(N))

    def loss(model: nn.Module, piece: Any) -> Tensor:
        found = model(*piece[:2]).sum(1)
        return F.mse_loss(found, piece[2])

    return Case(nn.EmbeddingBag(9, 3).double(), batch, loss)


def _by_picture(model: nn.Module, pictures: Any, boxes: Tensor, owner: Tensor) -> Tensor:
    found = model(pictures).mean((2, 3))
    each = [(found[i] - boxes[owner == i]).square().sum() for i in range(len(found))]
    return torch.stack(each).mean()


def boxes() -> Case:
    """Return boxes with the number of their picture, by a name that says nothing."""
    batch = {"pictures": rand(N, 3, 4, 4), "boxes": rand(len(OWNER), 4), "which": OWNER}
    return Case(
        nn.Conv2d(3, 4, 3).double(),
        batch,
        lambda model, piece: _by_picture(model, piece["pictures"], piece["boxes"], piece["which"]),
    )


def table() -> Case:
    """Return boxes with the number of their picture in front, as YOLOv5's loader makes them."""
    batch = (rand(N, 3, 4, 4), torch.cat([OWNER[:, None].double(), rand(len(OWNER), 4)], 1))
    return Case(
        nn.Conv2d(3, 4, 3).double(),
        batch,
        lambda model, piece: _by_picture(model, piece[0], piece[1][:, 1:], piece[1][:, 0]),
    )


def detection() -> Case:
    """Return what torchvision's collate function makes: `tuple(zip(*samples))`."""
    pictures = [rand(3, 4 + i, 5) for i in range(N)]
    samples = list(zip(pictures, [{"boxes": rand(count, 4)} for count in COUNTS], strict=True))

    def loss(model: nn.Module, piece: Any) -> Tensor:
        each = [
            (model(picture[None]).mean((2, 3)) - target["boxes"]).square().sum()
            for picture, target in zip(*piece, strict=True)
        ]
        return torch.stack(each).mean()

    return Case(nn.Conv2d(3, 4, 3).double(), tuple(zip(*samples, strict=True)), loss)


@pytest.mark.parametrize("make", [speech, bags, boxes, table, detection])
def test_the_gradient_is_the_plain_one_where_the_advised_line_is_followed(
    make: Callable[[], Case],
) -> None:
    torch.manual_seed(0)
    case = make()
    case.loss_fn(case.batch).backward()
    plain = [leaf.grad.clone() for leaf in case.model.parameters() if leaf.grad is not None]
    case.model.zero_grad()
    with pytest.raises(BatchError, match="disagree on its length") as caught:
        ElasticMBS(case.model, **quiet()).backward(case.loss_fn, case.batch)
    lines = re.findall(rf"if it has {N} samples, .*: dims=(.*)", str(caught.value))
    assert len(lines) == 1
    for size in (1, 2, 4):
        dims = eval(lines[0], {"cut": cut})
        mbs = ElasticMBS(case.model, micro_batch_size=size, dims=dims, **quiet())
        assert len(mbs.backward(case.loss_fn, case.batch).partition) > 1
        for leaf, grad in zip(case.model.parameters(), plain, strict=True):
            assert leaf.grad is not None
            assert float((leaf.grad - grad).abs().max() / grad.abs().max()) <= 1e-12
        case.model.zero_grad()
