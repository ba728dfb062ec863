"""Fake tensors in place of a model's and an optimizer's own, and back.

The real ones are not touched.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import Optimizer, _default_to_fused_or_foreach
from torch.utils._pytree import tree_map_only

from elastic_mbs.batch.containers import tensors_in

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Fakes:
    """The fakes of one plan, one for each real tensor.

    Args:
        plan: marks the fakes that are made, by their mode's attribute `planned_by`.
    """

    def __init__(self, plan: object) -> None:
        # A tensor that loss_fn has from elsewhere becomes a fake when it is used. No operation runs
        # for real to find the shape of its result.
        self.mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        vars(self.mode)["planned_by"] = plan
        # each with its original, which keeps its id taken
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        # buffers that can be masks; smaller ones are flags and counts, which a step changes
        self.tables: list[Tensor] = []

    def __call__(self, real: Tensor) -> Tensor:
        """Return the fake of a tensor, without a gradient.

        A single number on the host keeps its value: an optimizer may read its step count.
        """
        if isinstance(real, FakeTensor) or real.grad_fn is not None:
            return real  # a piece of a batch that requires grad: its gradient goes to the whole
        if type(real) not in (Tensor, nn.Parameter):
            raise TypeError(f"a {type(real).__name__} is no plain tensor")
        if id(real) not in self._made:
            if real.numel() == 1 and real.device.type == "cpu" and not real.requires_grad:
                fake: Tensor = self.mode.fake_tensor_converter.from_real_tensor(
                    self.mode, real.detach().clone(), make_constant=True
                )
            else:
                fake = self.mode.from_tensor(real)
                fake.grad = None
            self._made[id(real)] = real, fake
        return self._made[id(real)][1]

    def of(self, value: Any) -> Any:
        """Return the same containers with fakes in them."""
        return tree_map_only(Tensor, self, value)

    @contextmanager
    def inside(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Replace every tensor of the modules by its fake inside the block.

        Tensors in a module's own lists and dicts are replaced too. At the end all attributes, lists
        and dicts of the modules are as they were, whatever a forward has changed in them.
        """
        attributes: list[tuple[Any, Any]] = [
            (module.__dict__, dict(module.__dict__)) for module in modules
        ]
        boxes = [
            (box, copy(box))
            for _, values in attributes
            for box in values.values()
            if isinstance(box, list | dict)
        ]

        buffers = (buffer for module in modules for buffer in module._buffers.values())
        self.tables = [each for each in buffers if each is not None and each.ndim > 1]

        def put_back() -> None:
            for box, content in (*boxes, *attributes):
                if isinstance(box, list):
                    box[:] = content
                else:
                    box.clear()
                    box.update(content)

        with ExitStack() as backup, ExitStack() as undo:
            for stack in (backup, undo):  # should an interrupt strike one, the other is whole
                stack.callback(put_back)
            for box, content in (*attributes, *boxes):
                if isinstance(box, list):
                    box[:] = [self._in_place(value) for value in content]
                else:
                    box.update(
                        {
                            name: self._in_place(value)
                            for name, value in content.items()
                            if isinstance(value, Tensor | tuple)
                        }
                    )
            yield

    def _in_place(self, value: Any) -> Any:
        return self.of(value) if isinstance(value, Tensor) or type(value) is tuple else value


def step_of(
    optimizer: Optimizer, fakes: Fakes
) -> tuple[Callable[[], object], Callable[[], list[Tensor]]]:
    """Return a step of a copy of the optimizer, and a function that lists its state's tensors.

    The copy knows the fakes only and has no hooks.
    """
    fake: Any = object.__new__(type(optimizer))
    own = {
        name: value.copy() if isinstance(value, list | dict) else value
        for name, value in vars(optimizer).items()
    }
    own.pop("step", None)  # a scheduler's wrapper, bound to the real optimizer
    vars(fake).update(own | {name: type(own[name])() for name in HOOKS})
    fake.param_groups = [fakes.of({**group, **_how(group)}) for group in optimizer.param_groups]
    fake.state = defaultdict(
        dict, {fakes.of(key): fakes.of(state) for key, state in optimizer.state.items()}
    )
    # the wrappers count steps and run the hooks of the process
    run = inspect.unwrap(type(optimizer).step)
    return lambda: run(fake), lambda: [
        leaf for state in fake.state.values() for leaf in tensors_in(state)
    ]


def _how(group: dict[str, Any]) -> dict[str, bool]:
    """Return the group's `foreach`, as torch chooses it for the real tensors and not for fakes."""
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return {}
    return {
        "foreach": _default_to_fused_or_foreach(
            group["params"], group.get("differentiable", False), use_fused=False
        )[1]
    }


def storage_bytes(tensors: Sequence[Tensor | None], device: torch.device) -> int:
    """Return the bytes of the storages behind these tensors on the device, each counted once."""
    storages = [
        tensor.untyped_storage()
        for tensor in tensors
        if tensor is not None and tensor.device == device
    ]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
