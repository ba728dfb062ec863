"""The ways to use a runtime, each with what it may and what it must change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from elastic_mbs import ElasticMBS
from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.batch.view import map_tensors

from ..flat_options import grouped
from ..models.subject import Subject
from ..reference.by_hand import by_loop, check_covered, view_of
from ..reference.state import State, WrongOutcomeError, error_of, same_state
from ..streams import Streams
from .target import Partition, Target, reference, whole_batch


class Strikes(Protocol):
    """What is notified when the user's code runs."""

    def user_code(self) -> None: ...


@dataclass
class Call:
    """One way to use a runtime, on one case."""

    target: Target
    case: Subject
    mbs: ElasticMBS
    strikes: Strikes | None = None

    @property
    def batch(self) -> Any:
        return self.case.batch(0)

    gradients = True  # whether it may leave gradients behind when it fails, and says so

    def prepare(self) -> None:
        """Brings the case to where the call begins."""
        self._loss = self.noting(self.case.loss_fn)

    def noting(self, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(batch: Any) -> Any:
            if self.strikes is not None:
                self.strikes.user_code()
            return fn(batch)

        return noted

    def perform(self) -> Any:
        raise NotImplementedError

    def judge(self, product: Any, start: State, end: State) -> float:
        """The largest difference of a number from what it should be.

        Raises:
            WrongOutcomeError: it is too large, or what must not change has changed.
        """
        raise NotImplementedError

    def judge_extra(self, *, failed: bool) -> None:
        """Judges what the state has not: see `judge`."""

    def is_whole(self, start: State, end: State) -> bool:
        """Whether all was done when an interrupt came, where that is as good as nothing."""
        return False

    def may_differ(self, start: State, end: State) -> bool:
        """Whether what has changed may: what a GradScaler has unscaled."""
        return False

    def keeper(self) -> Callable[[], None]:
        """A function that puts everything back to where it is now."""
        leaves = self.case.leaves()
        start, objects = State.of(leaves, self.case.model), [leaf.grad for leaf in leaves]
        batch = map_tensors(self.batch, lambda t: t.detach().clone())

        def put_back() -> None:
            start.put_back(leaves, self.case.model, objects)
            with torch.no_grad():
                for tensor, value in zip(tensors_in(self.batch), tensors_in(batch), strict=True):
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)

        return put_back

    def warm_up(self) -> None:
        """One clean call, and everything it changed put back."""
        put_back = self.keeper()
        self.perform()
        put_back()


class Loop(Call):
    """The third door, the loop written out."""

    def perform(self) -> Any:
        return by_loop(self.mbs, self._loss, self.batch)

    def judge(self, product: Any, start: State, end: State) -> float:
        check_covered([*product.partition, *product.skipped], whole_batch(self.target)[-1][1])
        wanted = [reference(self.target, product.partition)]
        if self.case.separable:
            wanted.append(reference(self.target, whole_batch(self.target)))
        worst = min(error_of(end.grads, state.grads) for state in wanted)
        if not worst <= self.case.tolerance:
            raise WrongOutcomeError(f"gradient off by {worst:.3g} with {product.partition}")
        check_state(end, wanted[0], self.case.tolerance)
        return worst


class Backward(Loop):
    """The first door, with outputs where the loss leaves room for them."""

    def prepare(self) -> None:
        super().prepare()
        fn = self.case.loss_fn

        def with_outputs(batch: Any) -> Any:
            loss = fn(batch)
            return loss if isinstance(loss, dict) else (loss, next(iter(tensors_in(batch))).detach() * 1)

        self._loss = self.noting(with_outputs)

    def perform(self) -> Any:
        return self.mbs.backward(self._loss, self.batch)

    def judge(self, product: Any, start: State, end: State) -> float:
        wanted = next(iter(tensors_in(self.batch)))
        if product.outputs is not None and not product.skipped and self.target.name != "edited_batch" and not torch.equal(product.outputs, wanted):
            raise WrongOutcomeError(f"outputs are not those of the batch with {product.partition}")
        return super().judge(product, start, end)


class Reading(Call):
    """The loss of a result, read after a call without a failure."""

    gradients = False

    def prepare(self) -> None:
        super().prepare()
        self._result = self.mbs.backward(self._loss, self.batch)

    def warm_up(self) -> None:
        """Each result is read for the first time."""

    def perform(self) -> float:
        return float(self._result)

    def judge(self, product: float, start: State, end: State) -> float:
        wanted = float(self._result)
        if not (product == wanted or math.isnan(product)):
            raise WrongOutcomeError(f"the loss reads {product}, and then {wanted}")
        return 0.0


class Evaluation(Call):
    """`eval`, whose function gives a number for each piece, and a tensor whose pieces are joined."""

    gradients = False

    def prepare(self) -> None:
        self._runs: list[tuple[int, int]] = []
        runs, fn = self._runs, self.case.loss_fn

        def numbered(batch: dict[str, Any]) -> dict[str, Any]:
            index = batch["index"]
            runs.append((int(batch["first"][0]), int(batch["first"][0]) + len(index)))
            return {"loss": fn(batch["samples"]), "index": index * 1}

        self._fn = self.noting(numbered)
        n = whole_batch(self.target)[-1][1]
        self._numbered = {"samples": self.batch, "index": torch.arange(n), "first": list(range(n))}

    def perform(self) -> Any:
        self._runs.clear()
        return self.mbs.eval(self._fn, self._numbered)

    def judge(self, product: Any, start: State, end: State) -> float:
        if product["index"].tolist() != list(range(whole_batch(self.target)[-1][1])):
            raise WrongOutcomeError(f"outputs are not those of the batch: {product['index'].tolist()}")
        begins = max(i for i, (begin, _) in enumerate(self._runs) if begin == 0)
        runs = self._runs[begins:]
        committed = tuple(run for run, after in zip(runs, [*runs[1:], (runs[-1][1], 0)], strict=True) if after[0] == run[1])
        losses, after = evaluated(self.target, committed)
        check_state(end, after, self.case.tolerance)
        got = product["loss"]
        worst = 0.0
        for name, wanted in losses.items():
            values = got[name] if isinstance(got, dict) else got
            numbers = torch.stack([torch.as_tensor(value).double() for value in (values if isinstance(values, list) else [values])])
            if numbers.shape != wanted.shape or not torch.allclose(numbers, wanted, rtol=self.case.tolerance, atol=1e-14, equal_nan=True):
                raise WrongOutcomeError(f"losses {numbers.tolist()} should be {wanted.tolist()} with {committed}")
        if error_of(end.grads, start.grads) > 0:
            raise WrongOutcomeError("a gradient has changed in an evaluation")
        return worst


@lru_cache(maxsize=1024)
def evaluated(target: Target, pieces: Partition) -> tuple[dict[str, Tensor], State]:
    """The losses of these pieces without a graph, by name, and the state after them."""
    case = target.plain()
    view = view_of(case, case.batch(0))
    losses: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for start, stop in pieces:
            loss = case.loss_fn(view.piece(start, stop))
            for name, value in (loss if isinstance(loss, dict) else {"": loss}).items():
                losses.setdefault(name, []).append(value.double())
    return {name: torch.stack(values) for name, values in losses.items()}, State.of(case.leaves(), case.model)


class Verification(Call):
    """`verify`, which changes nothing."""

    gradients = False

    def perform(self) -> Any:
        return self.mbs.verify(self._loss, self.batch)

    def judge(self, product: Any, start: State, end: State) -> float:
        wanted = verified(self.target)
        if str(product) != wanted:
            raise WrongOutcomeError(f"the report is {str(product)!r} and not {wanted!r}")
        if start.changes(end) or error_of(end.grads, start.grads) > 0:
            raise WrongOutcomeError(f"verify has changed {start.changes(end) or 'gradients'}")
        return 0.0


@lru_cache(maxsize=256)
def verified(target: Target) -> str:
    case = target.build()
    with ElasticMBS(case.model, **grouped(case.options)) as mbs:
        return str(mbs.verify(case.loss_fn, case.batch(0)))


class OptimizerStep(Call):
    """`optimizer_step`, of an optimizer whose state is made by its first step."""

    def prepare(self) -> None:
        leaves, streams = self.case.leaves(), Streams.now()
        gradients = reference(self.target, whole_batch(self.target)).grads
        for leaf, grad in zip(leaves, gradients, strict=True):
            leaf.grad = None if grad is None else grad.clone()
        sparse = any(grad is not None and grad.is_sparse for grad in gradients)
        self.optimizer = torch.optim.SGD(leaves, 0.1) if sparse else torch.optim.AdamW(leaves, 0.1)
        self._scaler = self.case.options.get("scaler")
        if self._scaler is not None:
            self._scaler.scale(torch.zeros(()))
        self._start = copied(self.optimizer.state_dict())
        self._warm = False
        streams.restore()

    def warm_up(self) -> None:
        self._warm = True
        self.optimizer.step()
        self._start = copied(self.optimizer.state_dict())

    def perform(self) -> None:
        self.mbs.optimizer_step(self.optimizer)

    def judge(self, product: Any, start: State, end: State) -> float:
        wanted, state = stepped(self.target, self._warm)
        worst = error_of(end.parameters, wanted.parameters)
        if not worst <= self.case.tolerance:
            raise WrongOutcomeError(f"parameters off by {worst:.3g}")
        check_state(end, wanted, self.case.tolerance)
        if not same_state(self.optimizer.state_dict(), state, self.case.tolerance):
            raise WrongOutcomeError("the optimizer's state is not that of a step without failures")
        return worst

    def keeper(self) -> Callable[[], None]:
        return lambda: None  # a gradient that has been unscaled must stay so: the scaler remembers it

    def may_differ(self, start: State, end: State) -> bool:
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        unscaled = [None if grad is None else grad * scale for grad in end.grads]
        return not start.changes(end) and error_of(unscaled, start.grads) < self.case.tolerance

    def judge_extra(self, *, failed: bool) -> None:
        if failed and not same_state(self.optimizer.state_dict(), self._start, 0.0):
            raise WrongOutcomeError("the optimizer's state is not as at the start")


@lru_cache(maxsize=256)
def stepped(target: Target, warm: bool) -> tuple[State, Any]:
    """Parameters and the optimizer's state after a plain step."""
    case = target.plain()
    with ElasticMBS(case.model) as mbs:
        call = OptimizerStep(target, case, mbs)
        call.prepare()
        if warm:
            call.warm_up()
        if call._scaler is None:
            call.optimizer.step()
        else:
            call._scaler.step(call.optimizer)
    return State.of(case.leaves(), case.model), copied(call.optimizer.state_dict())


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


def check_state(end: State, wanted: State, tolerance: float) -> None:
    """Compares buffers and random streams with those of a run without failures.

    Raises:
        WrongOutcomeError: they differ.
    """
    for a, b in zip(end.buffers, wanted.buffers, strict=True):
        if not torch.allclose(a.double(), b.double(), rtol=tolerance, atol=1e-14, equal_nan=True):
            raise WrongOutcomeError("buffers differ from a run without failures")
    if not end.streams.same(wanted.streams):
        raise WrongOutcomeError("random streams differ from a run without failures")


CALLS: dict[str, type[Call]] = {
    "backward": Backward,
    "loop": Loop,
    "eval": Evaluation,
    "verify": Verification,
    "optimizer_step": OptimizerStep,
    "float(loss)": Reading,
}
