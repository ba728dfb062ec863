"""A small model with an optimizer to step, and errors at every operation of the step."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, MemoryOptions
from elastic_mbs.testing import InjectOOM

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}, ("loop", "foreach", "fused")),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, ("loop", "foreach", "fused")),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}, ("loop", "foreach", "fused")),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}, ("loop", "foreach", "fused")),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, ("loop", "foreach", "fused")),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}, ("loop", "foreach")),
}
COPIES = ("aten::copy_", "aten::_foreach_copy_")


class Everywhere(InjectOOM):
    """Fails at operations in place too: what is refused there has not happened, what came before it has.

    An error for good leaves out copies into memory that exists: where even those fail nothing can be rolled back.
    """

    def __init__(self, at: Iterable[int] = (), always_from: int | None = None, errors: Iterable[type[BaseException]] = ()) -> None:
        super().__init__(at, always_from)
        self._errors, self._for_good = iter(errors), always_from is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns, name = func._schema.returns, func._schema.name
        view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not (view or (self._for_good and name in COPIES)):
            try:
                self.step(name)
            except torch.OutOfMemoryError as error:
                raise next(self._errors, torch.OutOfMemoryError)(str(error)) from None
        return func(*args, **(kwargs or {}))


class World:
    """A small model with gradients, its optimizer and a runtime."""

    def __init__(self, name: str, implementation: str, *, steps: int, scaled: bool, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        cls, options, _ = OPTIMIZERS[name]
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
        head, body = list(self.model[1].parameters()), list(self.model[0].parameters())
        groups: list[dict[str, Any]] = [{"params": body}, {"params": head, "lr": 0.05}]
        self.optimizer = cls(groups, **options, **IMPLEMENTATIONS[implementation])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        self.events: list[Any] = []
        self.mbs = ElasticMBS(
            self.model, scaler=self.scaler, on_event=self.events.append, memory=MemoryOptions(monitor_interval=0, wait_for_memory=0)
        )
        for _ in range(steps):
            self.backward()
            self.plain()
        self.backward()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        x = torch.linspace(-1, 2, 15, dtype=next(self.model.parameters()).dtype).reshape(5, 3)
        loss = self.model(x).pow(2).mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def plain(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def guarded(self) -> None:
        self.mbs.optimizer_step(self.optimizer)

    def update(self) -> None:
        if self.scaler is not None:
            self.scaler.update()

    def values(self) -> dict[str, Any]:
        """Everything that a step changes, by value."""
        return deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def off_by(a: Any, b: Any) -> float:
    """The largest relative difference of two nested values; infinite where they differ otherwise."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) if a.shape == b.shape else float("inf")
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((off_by(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return max((off_by(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    return 0.0 if type(a) is type(b) and a == b else float("inf")
