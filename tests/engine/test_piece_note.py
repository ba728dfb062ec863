"""An error of the user's step says in a note that it came from a piece of the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, LossError, Policy
from tests.helpers.steps import once, pairs

pytestmark = pytest.mark.injectable


def squeezed(model: nn.Module) -> Any:
    def loss_fn(batch: Any) -> Tensor:
        logits = model(batch[0]).squeeze()
        # of one sample: "Dimension out of range"
        return nn.functional.cross_entropy(logits.flatten(1), batch[1])

    return loss_fn


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", [1, 2, 3])
def test_an_error_in_a_piece_says_so_and_the_advised_option_helps(
    model: nn.Module, door: int
) -> None:
    batch = pairs(5)  # 2, 2 and 1
    with pytest.raises(IndexError) as caught:
        once(door, model, squeezed(model), batch, micro_batch_size=2)
    (note,) = caught.value.__notes__
    assert note.startswith("elastic_mbs: raised in a piece of 1 of 5 samples (number 4)")
    policy = eval(note.rsplit(": ", 1)[1])
    assert isinstance(policy, Policy)
    result = once(door, model, squeezed(model), batch, micro_batch_size=2, policy=policy)
    assert len(result.partition) == 2


@pytest.mark.no_oom_injection
def test_an_evaluation_says_so_and_a_whole_batch_and_our_own_errors_do_not(
    model: nn.Module,
) -> None:
    def fails(batch: Any) -> Tensor:
        raise ValueError("the step's own")

    with pytest.raises(ValueError, match="own") as caught:
        ElasticMBS(model, micro_batch_size=3).evaluate(fails, torch.zeros(4, 6))
    assert "a piece of 2 of 4 samples (number 0, 1)" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="own") as caught:
        ElasticMBS(model).backward(fails, pairs())
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(LossError) as refused:
        ElasticMBS(model, micro_batch_size=1).backward(lambda batch: None, pairs())
    assert not hasattr(refused.value, "__notes__")


@pytest.mark.no_oom_injection
def test_the_samples_of_a_piece_are_named_by_their_numbers_in_the_batch() -> None:
    model = nn.Linear(1, 1)

    def loss_fn(piece: Any) -> Tensor:
        if bool((piece["x"] == 2).any()):
            raise ValueError("a bad picture")
        loss: Tensor = model(piece["x"]).mean()
        return loss

    def note(samples: int, **options: Any) -> str:
        mask = (torch.arange(3) < torch.tensor([1, 3] * (samples // 2))[:, None]).long()
        batch = {"mask": mask, "x": torch.arange(float(samples))[:, None]}
        with pytest.raises(ValueError, match="bad picture") as caught:
            ElasticMBS(model, micro_batch_size=samples // 2, **options).backward(loss_fn, batch)
        return str(caught.value.__notes__[0])

    assert note(20).endswith("a piece of 10 of 20 samples (number 0, 1, 2, 3, 4, 5, 6, 7, …)")
    assert note(4, pieces="by_length", length="mask").endswith("2 of 4 samples (number 0, 2)")
