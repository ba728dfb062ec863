"""Everything that a rehearsal edits, put back after it, also what a snapshot does not know.

Modules that nobody gave (a discriminator, a teacher), parameters and plain tensors that a loss
function writes to (a momentum encoder, a queue), and generators that are not named.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from elastic_mbs.dispatch import import_compiler
from elastic_mbs.engine.snapshot import Snapshot
from elastic_mbs.errors import ReplayUnsafeError
from elastic_mbs.rollback.attributes import tensors_of
from elastic_mbs.rollback.places import copyable, versions


class Kept(TorchDispatchMode):
    """A mode that keeps what is about to be edited, and puts unknown modules in evaluation.

    What the rehearsal has made itself is not kept.

    Args:
        known: the modules of the model, whose buffers have a snapshot.
        snapshot: the snapshot. It has no values of parameters: those that are edited are kept here.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Sequence[nn.Module], snapshot: Snapshot) -> None:
        import_compiler()
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._known, self._snapshot = set(known), snapshot
        self._bare = list(_without_copy(known))
        self._versions = versions([tensor for _, tensor in self._bare])
        self._thread = threading.get_ident()
        self._own: set[int] = set()  # storages that the rehearsal has made
        # by storage: all of it, with its values, and the shape of what was edited
        self._tensors: dict[int, tuple[Tensor, Tensor, torch.Size]] = {}
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        # modules, with their modes and buffers
        self._modules: list[tuple[nn.Module, bool, dict[str, Tensor | None]]] = []
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> Any:
        """Begin to keep."""
        self._hook = register_module_forward_pre_hook(self._keep_module)
        return super().__enter__()  # type: ignore[no-untyped-call]  # of torch

    def __exit__(self, *error: Any) -> None:
        """End it."""
        if self._hook is not None:
            self._hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # of torch

    @property
    def modules(self) -> list[nn.Module]:
        """The unknown modules that have run."""
        return [module for module, _, _ in self._modules]

    @property
    def edited(self) -> list[str]:
        """The shapes of the tensors that were edited, in words."""
        return [f"of shape {tuple(shape)}" for _, _, shape in self._tensors.values()]

    # ------------------------------------------------------------------ keeping

    def _keep_module(self, module: nn.Module, args: Any) -> None:
        """Keep a module that runs for the first time, and all below it."""
        if module in self._known or isinstance(module, torch.jit.ScriptModule):
            return
        if threading.get_ident() != self._thread:  # it is no part of this rehearsal
            return
        below: list[nn.Module] = list(module.modules())
        for each in below:
            if each not in self._known:
                self._known.add(each)
                self._modules.append((each, each.training, dict(each._buffers)))
                each.training = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._keep_written(func, args, kwargs)
        generator = kwargs.get("generator")
        if generator is not None and id(generator) not in self._generators:
            self._generators[id(generator)] = generator, generator.get_state()
        given = {_storage(tensor) for tensor in _tensors_of((args, kwargs))}
        result = func(*args, **kwargs)
        self._own.update({_storage(tensor) for tensor in _tensors_of(result)} - given)
        return result

    def _keep_written(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in _tensors_of(value):
                storage = _storage(tensor)
                if storage not in self._own and storage not in self._tensors:
                    whole = _whole(tensor)
                    self._tensors[storage] = whole, whole.clone(), tensor.shape

    # ------------------------------------------------------------------ putting back

    def rewind(self) -> None:
        """Put the snapshot, buffers and values back, for the next run.

        Raises:
            ReplayUnsafeError: a parameter was edited that cannot be kept.
        """
        # The snapshot knows only by versions that a parameter was edited, and not that it is kept.
        with suppress(ReplayUnsafeError):
            self._snapshot.restore()
        for module, _, buffers in self._modules:
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, value, _ in self._tensors.values():
            if tensor.untyped_storage().nbytes() >= value.nbytes:  # its owner has not freed it
                tensor.copy_(value)
        for generator, state in self._generators.values():
            generator.set_state(state)
        lost = self._lost()
        if lost is not None:
            raise ReplayUnsafeError(
                f"loss_fn has changed {lost}, whose values a rehearsal cannot keep and put back: "
                "set it before going on, and change it outside of loss_fn"
            )

    def _lost(self) -> str | None:
        """Return the label of a tensor that was edited, and neither the snapshot nor this has."""
        now = versions([tensor for _, tensor in self._bare])
        for (label, tensor), new, old in zip(self._bare, now, self._versions, strict=True):
            if new != old and not any(_storage(t) in self._tensors for t in _tensors_of(tensor)):
                return label
        return None

    def restore(self) -> None:
        """Put everything back. Can be repeated."""
        self.put_modes_back()
        self.rewind()

    def put_modes_back(self) -> None:
        """Put the modules back in the modes that they were met in."""
        for module, training, _ in self._modules:
            module.training = training


def _without_copy(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of which a snapshot keeps no values, each with its label."""
    for module in modules:
        kind = type(module).__name__
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"the parameter {kind}.{name}", parameter
        attributes = {name: vars(module)[name] for name in tensors_of(module)}
        for name, tensor in (*module._buffers.items(), *attributes.items()):
            if tensor is not None and not copyable(tensor):
                yield f"the tensor {kind}.{name}", tensor


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the dense tensors in arguments or results. Those of other classes have no storage."""
    if isinstance(value, Tensor):
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
            yield value
    elif isinstance(value, dict):
        yield from _tensors_of(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_of(each)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _whole(tensor: Tensor) -> Tensor:
    """Return all values of the tensor's storage, of which the tensor can be a view."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload,no-any-return]  # of torch's stubs
