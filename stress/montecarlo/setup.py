"""What a plan trains, made from its seed: the model, what else has gradients, the loss of a piece, and the optimizer."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..models.layers import Network
from .batches import FEATURES, losses, unpack
from .plan import Plan


@dataclass
class Output:
    """What models of some libraries return."""

    loss: Any
    scores: Tensor


@dataclass
class Setup:
    """A model in training."""

    plan: Plan
    model: Network
    guests: list[Tensor]  # leaves outside of it
    optimizer: torch.optim.Optimizer  # over both
    flat: list[Tensor] = field(default_factory=list)  # the buffer that gradients are views of, where they are

    def leaves(self) -> list[Tensor]:
        """Everything that has a gradient."""
        return [*(p for p in self.model.parameters() if p.requires_grad), *self.guests]

    def terms(self, piece: Any) -> tuple[dict[str, Tensor], Tensor]:
        """The losses of a piece by name, and its scores."""
        plan = self.plan
        x, labels, weights = unpack(plan, piece)
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
        match self.plan.returns:
            case "pair":
                return loss, scores
            case "dict":
                return {"loss": loss, "scores": scores}
            case "object":
                return Output(loss, scores)
            case _:
                return loss

    def scores(self, piece: Any) -> Tensor:
        """For an evaluation."""
        out: Tensor = self.model(unpack(self.plan, piece)[0])
        return out

    def take(self, other: Setup) -> None:
        """Becomes equal to `other`: parameters, buffers, gradients and what modules count, by value."""
        with torch.no_grad():
            for mine, theirs in zip([*self.model.parameters(), *self.guests], [*other.model.parameters(), *other.guests], strict=True):
                mine.copy_(theirs)
            for own, module in zip(self.model.modules(), other.model.modules(), strict=True):
                for name, buffer in module._buffers.items():
                    own._buffers[name] = None if buffer is None else buffer.detach().clone()
                if hasattr(module, "count"):
                    own.count = module.count
                own.training = module.training
        self.take_gradients(other)

    def take_gradients(self, other: Setup) -> None:
        """Gradients alone."""
        for mine, theirs in zip(self.leaves(), other.leaves(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.detach().clone()

    def take_optimizer(self, other: Setup) -> None:
        """The optimizer's state, which `load_state_dict` would bring to the type of the parameters."""
        self.optimizer.state.clear()
        for mine, theirs in zip(self.leaves(), other.leaves(), strict=True):
            if theirs in other.optimizer.state:
                self.optimizer.state[mine] = copy.deepcopy(other.optimizer.state[theirs])

    def counters(self) -> list[int]:
        """What modules count by themselves."""
        return [count for module in self.model.modules() if isinstance(count := getattr(module, "count", None), int)]


def set_up(plan: Plan) -> Setup:
    """The setup of a plan, every random stream then at the same place."""
    torch.manual_seed(plan.seed)
    random.seed(plan.seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = Network(
            plan.layers, plan.width, features=FEATURES if plan.tokens == "no" else 0, sparse=plan.tokens == "sparse", branches=plan.branches
        )
    finally:
        torch.set_default_dtype(default)
    dtype = torch.bfloat16 if plan.half else torch.float64
    model.to(dtype)
    guests = {"weight": [torch.zeros((), dtype=dtype)], "prompt": [torch.randn(1, 1, 3, dtype=dtype)]}.get(plan.guests, [])
    guests = [guest.requires_grad_() for guest in guests]
    setup = Setup(plan, model, guests, torch.optim.SGD([torch.zeros(())], lr=0.1))
    setup.optimizer = _optimizer(plan.optimizer, setup.leaves())
    _start_gradients(setup)
    return setup


def _optimizer(name: str, leaves: list[Tensor]) -> torch.optim.Optimizer:
    made: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(leaves, lr=0.05),
        "momentum": lambda: torch.optim.SGD(leaves, lr=0.05, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.Adam(leaves, lr=0.01, foreach=False),
        "adamw": lambda: torch.optim.AdamW(leaves, lr=0.01, amsgrad=True),
        "adam foreach": lambda: torch.optim.Adam(leaves, lr=0.01, foreach=True),
        "adam fused": lambda: torch.optim.Adam(leaves, lr=0.01, fused=True),
        "adagrad": lambda: torch.optim.Adagrad(leaves, lr=0.01),
        "rmsprop": lambda: torch.optim.RMSprop(leaves, lr=0.01, momentum=0.5, centered=True),
        "nadam": lambda: torch.optim.NAdam(leaves, lr=0.01),
    }
    found: torch.optim.Optimizer = made[name]()
    return found


def _start_gradients(setup: Setup) -> None:
    leaves, kind = setup.leaves(), setup.plan.gradients
    sparse = {id(module.weight) for module in setup.model.modules() if isinstance(module, nn.Embedding) and module.sparse}
    leaves = [leaf for leaf in leaves if id(leaf) not in sparse]
    if kind == "flat":
        flat, offset = torch.zeros(sum(leaf.numel() for leaf in leaves), dtype=leaves[0].dtype), 0
        for leaf in leaves:
            leaf.grad = flat[offset : offset + leaf.numel()].view_as(leaf)
            offset += leaf.numel()
        setup.flat = [flat]
    elif kind != "none":
        for leaf in leaves[:: 1 if kind == "all" else 2]:
            leaf.grad = torch.randn_like(leaf)
