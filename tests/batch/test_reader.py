from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, MemoryOptions, Warned
from elastic_mbs.batch.reader import first_look
from elastic_mbs.batch.view import BatchView


def kinds(batch: Any, *, training: bool = True, counted: bool = False, **others: Any) -> list[str]:
    return [kind for kind, _ in first_look(BatchView(batch), training=training, counted=counted, **others)]


LABELS = {"x": torch.zeros(2, 3), "labels": torch.tensor([[1, -100], [1, 1]])}


def test_labels_to_ignore_without_a_count_are_told_of_where_there_is_a_loss() -> None:
    assert kinds(LABELS) == ["count"]
    assert kinds(LABELS, counted=True) == kinds(LABELS, training=False) == []
    assert kinds(torch.zeros(1, 2), arguments=(torch.zeros(1),)) == [], "of one sample nothing can be told"


@pytest.mark.parametrize(("reduction", "told"), [("mean", ["count"]), ("sum", [])])
def test_sums_need_no_count(reduction: Literal["mean", "sum"], told: list[str]) -> None:
    model, events = nn.Linear(3, 4), list[Any]()

    def loss_fn(batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["labels"][:, 1], reduction=reduction)

    ElasticMBS(model, reduction=reduction, on_event=events.append, memory=MemoryOptions(monitor_interval=0)).backward(loss_fn, LABELS)
    assert [event.topic for event in events if isinstance(event, Warned)] == told


@pytest.mark.parametrize(
    ("beside", "named", "told"),
    [
        ((torch.zeros(4),), {}, "argument 1 after the batch"),
        (("epoch", torch.zeros(4, 2)), {}, "argument 2 after the batch"),
        ((), {"y": torch.zeros(4)}, "y="),
        ((torch.zeros(4), torch.zeros(4)), {"z": torch.zeros(4)}, "argument 1 after the batch"),
        ((torch.zeros(3), torch.tensor(4.0), 4, None), {"lengths": [1, 2, 3, 4]}, None),
    ],
)
def test_what_has_as_many_rows_as_the_batch_but_is_not_cut_is_told_of(beside: tuple[Any, ...], named: dict[str, Any], told: str | None) -> None:
    found = list(first_look(BatchView(torch.zeros(4, 2)), training=True, counted=False, arguments=beside, named=named))
    assert [kind for kind, _ in found] == ([] if told is None else ["beside"])
    assert told is None or found[0][1].startswith(told)


def test_it_is_said_once_a_function_and_before_anything_fails() -> None:
    model, events = nn.Linear(2, 3), list[Any]()

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y)

    with ElasticMBS(model, micro_batch_size=2, on_event=events.append) as mbs:
        for _ in range(2):
            with pytest.raises(ValueError, match="batch_size"):
                mbs.backward(loss_fn, torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    assert [(event.topic, "backward(loss_fn, (x, y))" in event.message) for event in events if isinstance(event, Warned)] == [("beside", True)]
