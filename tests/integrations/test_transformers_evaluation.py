"""transformers' Trainer with the runtime in it predicts and evaluates as the stock one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Trainer

from elastic_mbs.integrations.transformers import elastic_trainer
from elastic_mbs.testing.faults import RandomFaults
from stress.reference.state import error_of
from tests.integrations.trainer_runs import EXACT, KINDS, MARKS, gpt2, rows, trainer

pytestmark = MARKS


@pytest.mark.parametrize("kind", ["causal", "causal, rows without labels", "masked", "classes"])
@pytest.mark.parametrize("host", [None, 1])
def test_evaluation_gives_loss_and_logits_of_the_stock_trainer(kind: str, host: int | None) -> None:
    build, labels, _ = KINDS[kind]
    args = {"per_device_eval_batch_size": 8, "eval_accumulation_steps": host}
    stock, ours = (
        trainer(Trainer, build(), None, **args),
        trainer(elastic_trainer(Trainer), build(), None, elastic={}, **args),
    )
    wanted = stock.predict(rows(labels))
    with RandomFaults(0, kind, always=True) as faults:
        found = ours.predict(rows(labels))
    assert faults.hits
    assert abs(found.metrics["test_loss"] - wanted.metrics["test_loss"]) <= EXACT
    assert (
        error_of([torch.as_tensor(found.predictions)], [torch.as_tensor(wanted.predictions)])
        <= EXACT
    )
    assert (found.label_ids == wanted.label_ids).all()


class Padding(Trainer):
    """Logits as wide as the longest row of what it gets, and a number that comes once."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        width = int(inputs["labels"].ne(-100).sum(1).max())
        return loss, (logits[:, :width], loss.reshape(1)), labels


def test_outputs_that_pieces_have_padded_are_joined() -> None:
    found = trainer(
        elastic_trainer(Padding),
        gpt2(),
        None,
        elastic={"micro_batch_size": 3},
        per_device_eval_batch_size=8,
    ).predict(rows("tokens"))
    logits, losses = found.predictions
    assert logits.shape == (16, 10, 40)
    assert (logits == -100).any()
    assert losses.ndim == 1
