"""A small model with an optimizer to step."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.helpers.steps import elastic

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
}


class World:
    """A small model with gradients, its optimizer and a runtime."""

    def __init__(
        self, name: str, implementation: str, *, steps: int = 1, scaled: bool = False
    ) -> None:
        torch.manual_seed(0)
        cls, options = OPTIMIZERS[name]
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
        groups: list[dict[str, Any]] = [
            {"params": [*self.model[0].parameters()]},
            {"params": [*self.model[1].parameters()], "lr": 0.05},
        ]
        self.optimizer = cls(groups, **options, **IMPLEMENTATIONS[implementation])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        self.events: list[Any] = []
        self.mbs = elastic(self.model, scaler=self.scaler, on_event=self.events.append)
        for _ in range(steps):
            self.backward()
            self.plain()
        self.backward()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        loss = (
            self.model(torch.linspace(-1, 2, 15, dtype=torch.float64).reshape(5, 3)).pow(2).mean()
        )
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def plain(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
        self.update()

    def guarded(self) -> None:
        self.mbs.optimizer_step(self.optimizer)

    def update(self) -> None:
        if self.scaler is not None:
            self.scaler.update()

    def values(self) -> Any:
        """Return copies of all that a step changes."""
        return copied({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, value)


def same(a: Any, b: Any) -> bool:
    """Return whether nested values have the same bits."""
    (ours, here), (theirs, there) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return here == there and all(
        type(x) is type(y) and (torch.equal(x, y) if isinstance(x, Tensor) else x == y)
        for x, y in zip(ours, theirs, strict=True)
    )


def layers(name: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of 16 parameters of 16 KiB with gradients, and an optimizer of torch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model, getattr(torch.optim, name)(model.parameters(), **options)
