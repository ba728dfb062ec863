"""Kinds of step functions, with the gradients that each has to lead to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.steps import Pair, cross_entropy, mlp, pairs, whole_gradient


@dataclass
class Step:
    """A user's step function, and the gradients that it has to lead to."""

    model: nn.Module
    loss_fn: Callable[[Any], Tensor]
    batch: Any
    wanted: list[Tensor | None]
    # The user runs it before the call that fails.
    begin: Callable[[], object] = lambda: None
    leaves: list[Tensor] | None = None  # None: the parameters of the model
    options: dict[str, Any] = field(default_factory=dict)


def plain() -> Step:
    model, batch = mlp(), pairs()
    return Step(
        model,
        cross_entropy(model),
        batch,
        whole_gradient(model, lambda twin: cross_entropy(twin)(batch)),
    )


def gradients_there() -> Step:
    step = plain()

    def begin() -> None:
        step.loss_fn(step.batch).backward()
        step.model.zero_grad(set_to_none=False)

    step.begin = begin
    return step


def no_gradient_for_a_leaf() -> Step:
    """Return a step with a custom function whose backward returns None for a leaf."""

    class Threshold(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, threshold: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0] * 2, None

    model, (x, y) = mlp(), pairs()
    model.register_parameter("threshold", nn.Parameter(torch.ones(4, dtype=torch.float64)))

    def loss_of(net: Any, piece: Pair) -> Tensor:
        apply: Callable[[Tensor, Any], Tensor] = Threshold.apply
        return nn.functional.cross_entropy(apply(net(piece[0]), net.threshold), piece[1])

    return Step(
        model,
        lambda piece: loss_of(model, piece),
        (x, y),
        whole_gradient(model, lambda twin: loss_of(twin, (x, y))),
    )


def unwritable_gradient() -> Step:
    """Return a step with a gradient that autograd cannot add to; the loss does not reach it."""
    step = plain()
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    step.leaves = list(step.model.parameters())
    step.model.register_parameter("unused", unused)

    def begin() -> None:
        with torch.inference_mode():
            unused.grad = torch.ones(2, dtype=torch.float64)

    step.begin = begin
    return step


def hook_on(*written: int, late: bool = False) -> Step:
    """Return a step whose hooks write to gradients.

    One hook is on each leaf and writes to its own gradient. With `written`, one hook is on the last
    leaf and writes to the gradients of these leaves. A write is no commit, and hides none.
    """
    step = plain()
    leaves = list[Tensor](step.model.parameters())

    def write(leaf: Tensor) -> None:
        for other in [leaves[n] for n in written] or [leaf]:
            if other.grad is not None:
                other.grad.mul_(1.0)

    def register() -> None:
        for leaf in leaves[-1:] if written else leaves:
            leaf.register_post_accumulate_grad_hook(write)

    if late:
        step.begin = register
    else:
        register()
    return step


class Routed(nn.Module):
    """A model with three routes; each reaches leaves of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = [1, 0, 0]
        self.experts = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (
            torch.stack(
                [expert(x) for expert, use in zip(self.experts, self.used, strict=True) if use]
            )
            .pow(2)
            .mean()
        )


class RoutedBySample(Routed):
    """A model that routes each sample; a piece reaches only the leaves of its samples' routes."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            torch.cat(
                [
                    expert(x[x[:, 0] == i])
                    for i, expert in enumerate(self.experts)
                    if (x[:, 0] == i).any()
                ]
            )
            .pow(2)
            .mean()
        )


def routed_by_sample() -> Step:
    model, x = RoutedBySample(), torch.randn(9, 4, dtype=torch.float64)
    known, late = torch.tensor([0, 1, 2] * 3), torch.tensor([0, 1, 2, 1, 1, 1, 0, 1, 2])
    x[:, 0] = late
    wanted = whole_gradient(model, lambda twin: twin(x))
    x[:, 0] = known
    return Step(model, model, x, wanted, lambda: x[:, 0].copy_(late))


class Meeting(nn.Module):
    """Two leaves that meet in one addition, each through a view.

    Autograd gives both gradients the same memory.
    """

    def __init__(self, size: int = 4, *, apart: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.apart = apart
        self.a, self.b, self.w = (
            nn.Parameter(torch.randn(size, dtype=torch.float64)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        late = (x * self.w).exp().mean()  # made first, so its backward comes last
        shape = () if len(self.w) == 1 else (1, -1)
        a, b = (
            leaf.view(shape) * 2 if self.apart else leaf.view(shape) for leaf in (self.a, self.b)
        )
        return a + b + late if not shape else (x + (a + b)).pow(2).mean() + late


def becoming(
    make: Callable[[], nn.Module],
    replay: str = "auto",
    accumulate_dtype: torch.dtype | None = None,
    **later: Any,
) -> Callable[[], Step]:
    """Return a maker of steps whose model gets the attributes `later` before the failing call."""

    def step() -> Step:
        (model, twin), batch = (
            (make(), make()),
            torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4),
        )
        vars(twin).update(later)
        wanted = whole_gradient(twin, lambda net: net(batch))
        return Step(
            model,
            model,
            batch,
            wanted,
            lambda: vars(model).update(later),
            options={"replay": replay, "accumulate_dtype": accumulate_dtype},
        )

    return step


def leaves_outside() -> Step:
    """Return a step with two leaves outside the model that get the same gradient."""
    step = plain()
    weights = [torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    loss_fn = step.loss_fn
    step.loss_fn = lambda piece: loss_fn(piece) + weights[0].squeeze() + weights[1].squeeze()
    step.leaves = [*step.model.parameters(), *weights]
    step.wanted += [torch.ones(1, dtype=torch.float64)] * 2
    step.begin = lambda: torch.optim.SGD(weights).zero_grad()
    return step


def hidden_leaves_outside() -> Step:
    """Return a step whose leaves outside the model are reached by an inner backward only."""
    torch.manual_seed(3)
    model, (x, y) = mlp(), pairs()
    outside = nn.Linear(4, 4).double()

    def loss_of(net: nn.Module, tail: nn.Module, piece: Pair) -> Tensor:
        out: Any = checkpoint(tail, net(piece[0]), use_reentrant=True)
        return nn.functional.cross_entropy(out, piece[1])

    both = nn.ModuleList([model, outside])

    def whole(twin: Any) -> Tensor:
        return loss_of(twin[0], twin[1], (x, y))

    wanted = whole_gradient(both, whole)
    step = Step(model, lambda piece: loss_of(model, outside, piece), (x, y), wanted)
    step.leaves = list(both.parameters())
    step.begin = outside.zero_grad
    return step
