"""The user's model: its modules, its trainable leaves by name, its devices."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from elastic_mbs.device import with_index
from elastic_mbs.errors import UnsupportedError, UsageError


class Modes(NamedTuple):
    """The training mode of each of some modules."""

    modules: Sequence[nn.Module] = ()
    training: Sequence[bool] = ()


class TrainedModel:
    """The modules behind one runtime. A tied or shared part is counted once.

    Attributes:
        roots: the modules that the user gave.
        modules: these and everything below them.
        companions: modules that were not given: those that a loss function can reach in its first
            call, and then those that keep state.
        nearby: modules that were not given and that were made since, as far as the latest call can
            reach them.
        every: the modules, the companions and the modules nearby.
        met: all modules that first calls have met.
        leaves: the trainable parameters.
        generation: the number of changes of leaves or modules that were found.
        group: the number of samples that have to stay together: a module with a `batch_group`
            normalises over that many.
    """

    def __init__(self, model: object) -> None:
        self.roots = tuple(modules_of(model))
        self.modules: list[nn.Module] = []
        self.companions: list[nn.Module] = []
        self.nearby: list[nn.Module] = []
        self.every = self.modules
        self.met: WeakSet[nn.Module] = WeakSet()
        self.leaves: list[torch.Tensor] = []
        self.generation = 0
        self.group = 1
        self._children: list[nn.Module | None] | None = None
        self._parameters: list[nn.Parameter | None] = []
        self._trainable: list[bool] | None = None
        self._stand_ins: Mapping[int, torch.Tensor] = {}  # by the ids of parameters
        for module in chain.from_iterable(root.modules() for root in self.roots):
            _check(module)
        self.refresh()

    def refresh(self) -> bool:
        """Look again at which leaves are trainable; return whether that has changed.

        It runs in every call, so it runs no line of Python for each module or parameter while
        nothing has changed.
        """
        # The children of every module, compared by identity: a module can be added, or put in place
        # of another.
        children = _values(_MODULES, self.modules)
        if children != self._children:
            modules = list(
                dict.fromkeys(chain.from_iterable(root.modules() for root in self.roots))
            )
            self._set_group(math.lcm(*(getattr(module, "batch_group", 1) for module in modules)))
            self.modules, self._children = modules, _values(_MODULES, modules)
            self.met.update(modules)
            self.accompany(self.companions)
        parameters = _values(_PARAMETERS, self.modules)
        trainable = list(map(getattr, parameters, repeat("requires_grad"), repeat(False)))
        if trainable == self._trainable and all(map(is_, parameters, self._parameters)):
            return False
        self._parameters, self._trainable = parameters, trainable
        self.leaves = list(dict.fromkeys(map(self.leaf_of, compress(parameters, trainable))))
        self.generation += 1
        return True

    def accompany(self, companions: Iterable[nn.Module], nearby: Iterable[nn.Module] = ()) -> None:
        """Take these modules as companions, but for those that are in the model (by now).

        Args:
            companions: modules that stay with the model.
            nearby: modules of this call alone.
        """
        given = set(map(id, self.modules))
        self.companions = [each for each in dict.fromkeys(companions) if id(each) not in given]
        self.nearby = list(nearby)
        self.met.update(self.companions)
        beside = [*self.companions, *self.nearby]
        self.every = [*self.modules, *beside] if beside else self.modules

    def _set_group(self, group: int) -> None:
        if self._children is not None and self.group % group:
            raise UsageError(
                f"a module that normalises over groups of {group} samples came into the model "
                "after its ElasticMBS was made, which cuts batches at "
                f"multiples of {self.group}: convert the model first"
            )
        self.group = group

    def refuse_private(self) -> None:
        """Refuse a model whose gradients opacus takes apart by samples.

        It can become one after any call, by hooks alone, so each call that trains looks.

        Raises:
            UnsupportedError: it is one.
        """
        if "opacus" not in sys.modules:  # most jobs do not pay for the look at every hook
            return
        for module in self.modules:
            if any(map(_takes_samples_apart, (module, *module._forward_hooks.values()))):
                raise UnsupportedError(
                    f"{type(module).__name__} is trained privately by opacus, which clips the "
                    "gradient of each sample by its share of the piece: a split would change the "
                    "clipping, and a failure leave it half done. Opacus' own BatchMemoryManager "
                    "splits such batches; ElasticMBS(model, enabled=False) runs them whole"
                )

    def replace(self, stand_ins: Mapping[int, torch.Tensor]) -> None:
        """Have other leaves in place of parameters, from the next `refresh` on.

        Args:
            stand_ins: the tensors that a step computes with, by the ids of the parameters.
        """
        self._stand_ins = stand_ins
        self.forget()

    def leaf_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the leaf that a step computes with in place of a parameter, mostly itself."""
        return self._stand_ins.get(id(parameter), parameter)

    def leaves_of(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaf of each parameter."""
        return list(map(self.leaf_of, parameters) if self._stand_ins else parameters)

    def forget(self) -> None:
        """Make the next `refresh` find everything new."""
        self._trainable = None

    def training(self) -> Modes:
        """Return the training mode of each module."""
        return Modes(self.every, list(map(_TRAINING, self.every)))

    def restore(self, modes: Modes) -> None:
        """Put back the modes that a failed step can have switched, and the leaves it has frozen.

        Args:
            modes: the modules with their modes; empty to leave them.
        """
        for module, training in zip(modes.modules, modes.training, strict=True):
            module.training = training
        for leaf in self.leaves:
            # others can have been quantised
            if not leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex()):
                leaf.requires_grad_()

    def evaluate(self) -> None:
        """Switch every module to evaluation."""
        for module in self.every:
            module.training = False

    def name_of(self, leaf: torch.Tensor) -> str:
        """Return the leaf's parameter name, or its shape when it is not the model's."""
        for name, parameter in chain.from_iterable(root.named_parameters() for root in self.roots):
            if parameter is leaf or self.leaf_of(parameter) is leaf:
                return f"parameter {name!r}"
        return f"a leaf of shape {tuple(leaf.shape)} outside the model"

    def devices(self) -> list[torch.device]:
        """Return the devices of parameters and buffers in the order met; the CPU without either.

        Tensors on "meta" have no values. Where all are there, it is the device that accelerate
        brings their values to.

        Raises:
            UsageError: all are on "meta", and nothing tells where their values are.
        """
        tensors = [*_values(_PARAMETERS, self.modules), *_values(_BUFFERS, self.modules)]
        found = dict.fromkeys(_place_of(tensor) for tensor in tensors if tensor is not None)
        if not found:
            return [torch.device("cpu")]
        return [
            device for device in found if device.type != "meta"
        ] or self._devices_of_the_values()

    def _devices_of_the_values(self) -> list[torch.device]:
        """Return where accelerate's hooks bring the values of a model that is on "meta"."""
        hooks = [getattr(module, "_hf_hook", None) for module in self.modules]
        hooks += chain.from_iterable(getattr(hook, "hooks", ()) for hook in list(hooks))
        wanted = [getattr(hook, "execution_device", None) for hook in hooks]
        found = [with_index(torch.device(device)) for device in wanted if device is not None]
        if not found:
            raise UsageError(
                f"all parameters of {type(self.roots[0]).__name__} are on 'meta', where tensors "
                "have no values: give the modules that hold the values. For stacked parameters "
                "(torch.func) that is `held = nn.ParameterList(params.values())`: give "
                "ElasticMBS(held), and call functional_call with dict(zip(params, held)). A model "
                "that is still to be filled comes after to_empty(device=...) or its checkpoint"
            )
        return list(dict.fromkeys(found))

    def placeholders(self) -> dict[str, int]:
        """Return the tokens that stand for pictures and videos, as a model of transformers says."""
        for module in self.modules:
            config = getattr(module, "config", None)
            found = {
                medium: token
                for medium in ("image", "video")
                for name in (f"{medium}_token_id", f"{medium}_token_index")
                if isinstance(token := getattr(config, name, None), int)
            }
            if found:
                return found
        return {}

    def normalises_batch(self) -> bool:
        """Return whether a BatchNorm in the model would use the statistics of the piece now."""
        return any(m.training or m.running_mean is None for m in self.batch_norms())

    def batch_norms(self) -> list[nn.modules.batchnorm._BatchNorm]:
        """Return the BatchNorm modules without a group of their own."""
        return [
            m
            for m in self.modules
            if isinstance(m, nn.modules.batchnorm._BatchNorm) and not hasattr(m, "batch_group")
        ]

    def sequence_first(self) -> str | None:
        """Return the name of a module that takes (S, N, …), with the samples on dim 1, if any."""
        for name, module in chain.from_iterable(root.named_modules() for root in self.roots):
            takes_sequences = isinstance(module, nn.RNNBase | nn.MultiheadAttention)
            if takes_sequences and not module.batch_first:
                return f"{name or 'the model'} ({type(module).__name__})"
        return None


_MODULES, _PARAMETERS, _BUFFERS, _TRAINING = map(
    attrgetter, ("_modules", "_parameters", "_buffers", "training")
)


def _values(owned: attrgetter[dict[str, Any]], modules: Iterable[nn.Module]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, map(owned, modules))))


def modules_of(model: object) -> Sequence[nn.Module]:
    """Return the modules that `model=` stands for."""
    if isinstance(model, torch.optim.Optimizer):
        raise UsageError(f"model= got an optimizer ({type(model).__name__}): give the model")
    modules = [model] if isinstance(model, nn.Module) else model
    if not (
        isinstance(modules, Sequence)
        and modules
        and all(isinstance(module, nn.Module) for module in modules)
    ):
        raise UsageError(
            f"model={str(model)[:80]!r} is a {type(model).__name__}; give a torch.nn.Module or a "
            "sequence of them, of one at least "
            "(a callable only to elastic_step, for methods)"
        )
    return modules


def _place_of(tensor: torch.Tensor) -> torch.device:
    """Return the device where a step has a tensor: an offloaded shard is gathered elsewhere."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None or tensor.device.type in (mesh.device_type, "meta"):
        return tensor.device
    return with_index(torch.device(mesh.device_type))


_WRAPPERS = {"DataParallel", "FullyShardedDataParallel"}


def _check(module: nn.Module) -> None:
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{module.original_name} is compiled by torch.jit, which hides its parameters and "
            "buffers: give the module that it was made from. One "
            "that is not trained can stay outside of the model, and be called in loss_fn"
        )
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise UsageError(
            f"{kind} has parameters without a shape yet: run one batch through the model first, "
            "under torch.no_grad()"
        )
    if not _WRAPPERS.isdisjoint(base.__name__ for base in type(module).__mro__):
        raise UnsupportedError(
            f"{kind} runs collectives or replicas inside forward and backward, and a replay in "
            "one would leave the others waiting or half done. "
            "Give the module itself, wrapped in DistributedDataParallel, or sharded by "
            "fully_shard (FSDP2), with one process per device"
        )


def _takes_samples_apart(value: object) -> bool:
    """Return whether a module, or the owner of a hook, is opacus' maker of gradients per sample."""
    kind = type(getattr(value, "__self__", value))
    return any(
        base.__module__.partition(".")[0] == "opacus" and "GradSample" in base.__name__
        for base in kind.__mro__
    )
