"""What a plan trains, made from its seed: the model, what else has gradients, the loss of a piece, and the optimizer."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.layers import Network, flat_gradients
from .batches import CONTAINERS, FEATURES, losses
from .plan import Plan

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda leaves: torch.optim.SGD(leaves, lr=0.05),
    "momentum": lambda leaves: torch.optim.SGD(leaves, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda leaves: torch.optim.Adam(leaves, lr=0.01, foreach=False),
    "adamw": lambda leaves: torch.optim.AdamW(leaves, lr=0.01, amsgrad=True),
    "adam foreach": lambda leaves: torch.optim.Adam(leaves, lr=0.01, foreach=True),
    "adam fused": lambda leaves: torch.optim.Adam(leaves, lr=0.01, fused=True),
    "adagrad": lambda leaves: torch.optim.Adagrad(leaves, lr=0.01),
    "rmsprop": lambda leaves: torch.optim.RMSprop(leaves, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda leaves: torch.optim.NAdam(leaves, lr=0.01),
}


@dataclass
class Output:
    """What models of some libraries return."""

    loss: Any
    scores: Tensor


class Setup:
    """A model in training, with leaves outside of it and an optimizer over both."""

    def __init__(self, plan: Plan, model: Network, guests: list[Tensor]) -> None:
        self.plan, self.model, self.guests = plan, model, guests
        self.optimizer = OPTIMIZERS[plan.optimizer](self.leaves())
        self.flat: list[Tensor] = []  # the buffer that gradients are views of, where they are

    def leaves(self) -> list[Tensor]:
        """Everything that has a gradient."""
        return [*(p for p in self.model.parameters() if p.requires_grad), *self.guests]

    def grads(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in self.leaves()]

    def terms(self, piece: Any) -> tuple[dict[str, Tensor], Tensor]:
        """The losses of a piece by name, and its scores."""
        plan = self.plan
        x, labels, weights = CONTAINERS[plan.container].unpack(piece)
        if plan.edits and x.is_floating_point():
            x.mul_(0.5)
        scores = self.model(x)
        if plan.guests == "prompt":
            scores = scores + self.guests[0]
        terms = losses(plan, scores, labels, weights)
        if plan.guests == "weight":
            terms = {name: term * self.guests[0].exp() for name, term in terms.items()}
        return terms, scores

    def loss_fn(self, piece: Any) -> Any:
        """What is handed to the runtime."""
        terms, scores = self.terms(piece)
        loss: Any = terms if self.plan.count == "both" else terms["loss"]
        made = {"loss": loss, "pair": (loss, scores), "dict": {"loss": loss, "scores": scores}, "object": Output(loss, scores)}
        return made[self.plan.returns]

    def scores(self, piece: Any) -> Tensor:
        """For an evaluation."""
        out: Tensor = self.model(CONTAINERS[self.plan.container].unpack(piece)[0])
        return out

    def twin(self) -> Setup:
        """A copy by value, gradients and the optimizer's state included."""
        twin = Setup(self.plan, *copy.deepcopy((self.model, self.guests)))
        for mine, theirs in zip(twin.leaves(), self.leaves(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.detach().clone()
            if theirs in self.optimizer.state:
                twin.optimizer.state[mine] = copy.deepcopy(self.optimizer.state[theirs])
        return twin


def set_up(plan: Plan) -> Setup:
    """The setup of a plan, every random stream then at the same place."""
    torch.manual_seed(plan.seed)
    random.seed(plan.seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        features = FEATURES if plan.tokens == "no" else 0
        model = Network(plan.layers, plan.width, features=features, sparse=plan.tokens == "sparse", branches=plan.branches)
    finally:
        torch.set_default_dtype(default)
    dtype = torch.bfloat16 if plan.half else torch.float64
    guests = {"weight": [torch.zeros((), dtype=dtype)], "prompt": [torch.randn(1, 1, 3, dtype=dtype)]}.get(plan.guests, [])
    setup = Setup(plan, model.to(dtype), [guest.requires_grad_() for guest in guests])
    _start_gradients(setup)
    return setup


def _start_gradients(setup: Setup) -> None:
    kind = setup.plan.gradients
    sparse = {id(module.weight) for module in setup.model.modules() if isinstance(module, nn.Embedding) and module.sparse}
    leaves = [leaf for leaf in setup.leaves() if id(leaf) not in sparse]
    if kind == "flat":
        setup.flat = [flat_gradients(leaves)]
    elif kind != "none":
        for leaf in leaves[:: 1 if kind == "all" else 2]:
            leaf.grad = torch.randn_like(leaf)
