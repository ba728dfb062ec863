"""The rows of a trainer's batch, and the samples that they are for the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size

from elastic_mbs.integrations.exchange import Exchange
from elastic_mbs.runtime import ElasticMBS


class Rows:
    """A batch with one row per sample, as most trainers have it.

    Attributes:
        generated: the trainer makes the rows itself, inside its step.
        mismatch: what to do where the losses of pieces do not add up to that of the batch.
    """

    generated = False
    mismatch = (
        "Where the loss is no mean over the labels that are not -100, say what it is a mean over: "
        'elastic={"count": batch → one count per sample}, None for samples. '
        "Make a sum over samples a mean"
    )

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def length(self) -> Callable[[Any], Tensor] | None:
        """A function samples → lengths, for `pieces="by_length"`; None where the user says it."""
        return None

    def samples(self, inputs: Any) -> Any:
        """Return the trainer's batch as samples."""
        return inputs

    def rows(self, piece: Any) -> Any:
        """Return samples as the trainer's batch."""
        return piece

    def number(self, samples: Any) -> int:
        """Return the number of samples."""
        return find_batch_size(samples) or 1

    def count(self, samples: Any) -> Tensor | None:
        """Return the loss terms of each sample; None where its labels tell."""
        return None

    def weights(self, piece: Any) -> Mapping[str, float]:
        """Return the weights of a piece in the metrics of its batch, by kind."""
        return {}

    def prepare(self, samples: Any, mbs: ElasticMBS, model: Any, exchange: Exchange) -> None:
        """Find out what the loss of each piece needs to know of its batch, on all ranks."""

    def losses_of(self, piece: Any, whole: Any) -> AbstractContextManager[None]:
        """Return a context in which the trainer's loss of a piece adds up to that of `whole`."""
        return nullcontext()

    def comparable(self) -> AbstractContextManager[None]:
        """Return a context in which losses of a few samples can be compared with each other."""
        return nullcontext()

    def checked(self, loss: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """Return a loss that is compared with those of pieces, and may refuse the batch itself."""
        return loss

    def stored(self, outputs: Any) -> Any:
        """Return outputs of a piece with one row per sample, to be joined."""
        return outputs

    def joined(self, outputs: Any) -> Any:
        """Return joined outputs as the trainer has them."""
        return outputs


def labels_in(inputs: Any, *, shifts: bool) -> Tensor | None:
    """Return the number of labels that are not -100 in each sample, as the trainer counts.

    Args:
        inputs: the trainer's batch.
        shifts: each label is predicted by the token before.

    Returns:
        One number per sample; None where there are no labels.
    """
    labels = inputs.get("labels")
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    elif shifts and isinstance(labels, Tensor):
        labels = labels[..., 1:]
    return (
        labels.ne(-100).reshape(len(labels), -1).sum(1)
        if isinstance(labels, Tensor) and labels.ndim
        else None
    )


def ctc_reduction(model: Any) -> str | None:
    """Return how a model of transformers with a CTC head reduces its loss; None for others.

    The models without that head have the same configuration.
    """
    get_base = getattr(model, "get_base_model", lambda: model)  # of peft
    base = get_base()
    if not any(kind.__name__.endswith("ForCTC") for kind in type(base).__mro__):
        return None
    found: str | None = getattr(getattr(base, "config", None), "ctc_loss_reduction", None)
    return found
