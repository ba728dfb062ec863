"""Ways to use a runtime, each with the changes that it may and must make."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from elastic_mbs import ElasticMBS, StepResult
from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.batch.join import PerPiece
from elastic_mbs.batch.view import map_tensors

from ..doors import by_loop
from ..flat_options import grouped
from ..models.subject import Subject
from ..reference.by_hand import check_covered, view_of
from ..reference.state import State, WrongOutcomeError, demand, error_of, same_state
from ..streams import Streams
from .target import Partition, Target, reference, whole_batch


@dataclass
class Call:
    """A way to use a runtime, on one case."""

    target: Target
    case: Subject
    mbs: ElasticMBS
    user_code: Callable[[], None] = lambda: None  # called when the user's code runs

    gradients = True  # may leave gradients behind when it fails, and says so

    @property
    def batch(self) -> Any:
        return self.case.batch(0)

    def loss(self, batch: Any) -> Any:
        """Run the user's code."""
        self.user_code()
        return self.case.loss_fn(batch)

    def backward(self) -> StepResult:
        """Call `backward`.

        A loss over embeddings gets a part of the batch beside them, and returns it as outputs.
        """
        if (over := self.case.over) is None:
            return self.mbs.backward(self.loss, self.batch)
        return self.mbs.backward_embeddings(
            lambda batch: (self.loss(batch), one_of(batch)),
            lambda found: (over(found[0]), found[1]),
            self.batch,
        )

    def prepare(self) -> None:
        """Bring the case to the state in which the call begins."""

    def perform(self) -> Any:
        raise NotImplementedError

    def judge(self, product: Any, start: State, end: State) -> float:
        """Return the largest difference of a number from the reference.

        Raises a WrongOutcomeError where it is too large, or more has changed than may.
        """
        raise NotImplementedError

    def judge_failed(self, start: State, end: State, notes: str) -> None:
        """Check that a failed call has changed no more than its error's notes say.

        Raises a WrongOutcomeError otherwise.
        """
        start.demand_kept(end, notes if self.gradients else "")

    def is_whole(self, start: State, end: State) -> bool:
        """Return whether all was done when an interrupt came, where that is allowed."""
        return False

    def keeper(self) -> Callable[[], None]:
        """Return a function that puts everything back to the present state."""
        leaves = self.case.leaves()
        start = State.of(leaves, self.case.model)
        objects = [leaf.grad for leaf in leaves]
        batch = map_tensors(self.batch, lambda t: t.detach().clone())

        def put_back() -> None:
            start.put_back(leaves, self.case.model, objects)
            with torch.no_grad():
                for tensor, value in zip(tensors_in(self.batch), tensors_in(batch), strict=True):
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)

        return put_back

    def warm_up(self) -> None:
        """Make one clean call, and put everything back that it changed."""
        put_back = self.keeper()
        self.perform()
        put_back()


def one_of(batch: Any) -> Tensor:
    """Return a copy of a tensor of the batch."""
    found: Tensor = tensors_in(batch)[0]
    return found.detach() * 1


class Loop(Call):
    """The loop written out."""

    def perform(self) -> Any:
        return by_loop(self.mbs, self.loss, self.batch)

    def judge(self, product: Any, start: State, end: State) -> float:
        whole = whole_batch(self.target)
        check_covered(product.partition, whole[-1][1])
        same = reference(self.target, whole if self.case.whole else product.partition)
        worst = error_of(end.grads, same.grads)
        if self.case.separable:
            worst = min(worst, error_of(end.grads, reference(self.target, whole).grads))
        demand(
            worst <= self.case.tolerance, f"gradient off by {worst:.3g} with {product.partition}"
        )
        end.demand_rest_of(same, self.case.tolerance)
        return worst


class Backward(Loop):
    """`backward`, with outputs where the loss leaves room for them."""

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        return (
            loss if isinstance(loss, dict) or self.case.over is not None else (loss, one_of(batch))
        )

    def perform(self) -> Any:
        return self.backward()

    def judge(self, product: Any, start: State, end: State) -> float:
        if product.outputs is not None and self.target.name != "edited_batch":
            same = torch.equal(product.outputs, next(iter(tensors_in(self.batch))))
            demand(same, f"outputs are not those of the batch with {product.partition}")
        return super().judge(product, start, end)


class Reading(Call):
    """The loss of a result, read for the first time after a call without a failure."""

    gradients = False

    def prepare(self) -> None:
        self._result = self.backward()

    def warm_up(self) -> None:
        """Do nothing: there is no second first reading."""

    def perform(self) -> float:
        return float(self._result)

    def judge(self, product: float, start: State, end: State) -> float:
        wanted = float(self._result)
        demand(
            product == wanted or math.isnan(product), f"the loss reads {product}, and then {wanted}"
        )
        return 0.0


class Evaluation(Call):
    """`evaluate` of a function that gives a loss for each piece, and a tensor that is joined."""

    gradients = False

    def prepare(self) -> None:
        samples = whole_batch(self.target)[-1][1]
        self._index = torch.arange(samples, device=self.case.device)

    def perform(self) -> Any:
        numbered = {"samples": self.batch, "index": self._index}
        return self.mbs.evaluate(
            lambda piece: {"loss": self.loss(piece["samples"]), "index": piece["index"] * 1},
            numbered,
            outputs="device",
        )

    def judge(self, product: Any, start: State, end: State) -> float:
        demand(
            torch.equal(product["index"], self._index),
            f"outputs are not those of the batch: {product['index'].tolist()}",
        )
        losses = product["loss"] if isinstance(product["loss"], dict) else {"": product["loss"]}
        found = {
            name: value if isinstance(value, PerPiece) else PerPiece([value], [len(self._index)])
            for name, value in losses.items()
        }
        pieces = tuple(pairwise(accumulate(next(iter(found.values())).lengths, initial=0)))
        wanted, after = evaluated(self.target, pieces)
        end.demand_rest_of(after, self.case.tolerance)
        for name, values in wanted.items():
            numbers = torch.stack([value.double() for value in found[name]])
            same = numbers.shape == values.shape and torch.allclose(
                numbers, values, rtol=self.case.tolerance, atol=1e-14, equal_nan=True
            )
            demand(same, f"losses {numbers.tolist()} should be {values.tolist()} with {pieces}")
        demand(error_of(end.grads, start.grads) == 0, "a gradient has changed in an evaluation")
        return 0.0


@lru_cache(maxsize=1024)
def evaluated(target: Target, pieces: Partition) -> tuple[dict[str, Tensor], State]:
    """Return the losses of these pieces without a graph, and the state after them.

    Losses come by name, "" where there is one.
    """
    case = target.plain()
    view = view_of(case, case.batch(0))
    losses: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for start, stop in pieces:
            loss = case.loss_fn(view.piece(start, stop))
            for name, value in (loss if isinstance(loss, dict) else {"": loss}).items():
                losses.setdefault(name, []).append(value.double())
    return {name: torch.stack(values) for name, values in losses.items()}, State.of(
        case.leaves(), case.model
    )


class Verification(Call):
    """`verify`, which changes nothing."""

    gradients = False

    def perform(self) -> Any:
        return self.mbs.verify(self.loss, self.batch)

    def judge(self, product: Any, start: State, end: State) -> float:
        wanted = verified(self.target)
        demand(str(product) == wanted, f"the report is {str(product)!r} and not {wanted!r}")
        self.judge_failed(start, end, "")
        return 0.0


@lru_cache(maxsize=256)
def verified(target: Target) -> str:
    case = target.build()
    with ElasticMBS(case.model, **grouped(case.options)) as mbs:
        return str(mbs.verify(case.loss_fn, case.batch(0)))


class OptimizerStep(Call):
    """`optimizer_step` of an optimizer whose first step makes its state."""

    def prepare(self) -> None:
        leaves = self.case.leaves()
        streams = Streams.now()
        gradients = reference(self.target, whole_batch(self.target)).grads
        for leaf, grad in zip(leaves, gradients, strict=True):
            leaf.grad = None if grad is None else grad.clone()
        sparse = any(grad is not None and grad.is_sparse for grad in gradients)
        self.optimizer = torch.optim.SGD(leaves, 0.1) if sparse else torch.optim.AdamW(leaves, 0.1)
        self.scaler = self.case.options.get("scaler")
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device=self.case.device))
        self._start = copy.deepcopy(self.optimizer.state_dict())
        self._warm = False
        streams.restore()

    def warm_up(self) -> None:
        self.optimizer.step()
        self._start = copy.deepcopy(self.optimizer.state_dict())
        self._warm = True

    def perform(self) -> None:
        self.mbs.optimizer_step(self.optimizer)

    def judge(self, product: Any, start: State, end: State) -> float:
        wanted, state = stepped(self.target, self._warm)
        worst = error_of(end.parameters, wanted.parameters)
        demand(worst <= self.case.tolerance, f"parameters off by {worst:.3g}")
        end.demand_rest_of(wanted, self.case.tolerance)
        same = same_state(self.optimizer.state_dict(), state, self.case.tolerance)
        demand(same, "the optimizer's state is not that of a step without failures")
        return worst

    def is_whole(self, start: State, end: State) -> bool:
        with suppress(WrongOutcomeError):
            self.judge(None, start, end)
            return True
        return False

    def keeper(self) -> Callable[[], None]:
        # A gradient that has been unscaled must stay so: the scaler remembers it.
        return lambda: None

    def judge_failed(self, start: State, end: State, notes: str) -> None:
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        unscaled = [None if grad is None else grad * scale for grad in end.grads]
        if start.changes(end) or error_of(unscaled, start.grads) >= self.case.tolerance:
            super().judge_failed(start, end, notes)
        demand(
            same_state(self.optimizer.state_dict(), self._start, 0.0),
            "the optimizer's state is not as at the start",
        )


@lru_cache(maxsize=256)
def stepped(target: Target, warm: bool) -> tuple[State, Any]:
    """Return the parameters and the optimizer's state after a plain step."""
    case = target.plain()
    with ElasticMBS(case.model) as mbs:
        call = OptimizerStep(target, case, mbs)
        call.prepare()
        if warm:
            call.warm_up()
        if call.scaler is None:
            call.optimizer.step()
        else:
            call.scaler.step(call.optimizer)
    return State.of(case.leaves(), case.model), copy.deepcopy(call.optimizer.state_dict())


CALLS: dict[str, type[Call]] = {
    "backward": Backward,
    "loop": Loop,
    "eval": Evaluation,
    "verify": Verification,
    "optimizer_step": OptimizerStep,
    "float(loss)": Reading,
}
