"""Position-wise modules: each position of the output depends on that position of the input alone.

A name says nothing of that, so a module is tried: a copy of it, in double precision and with random
weights, runs on a few positions at once and on tiles of them. Outputs and all gradients have to be
equal. Weights are random because a layer that mixes positions can begin with weights of zero.

Refused without a trial are modules with buffers or hooks, and those that hold tensors or modules
beside their parameters and children. Refused by the trial are, besides those that mix positions,
modules that draw random numbers (dropout), that edit their input, and that change their own
attributes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from elastic_mbs.memory.budget import on_host
from elastic_mbs.memory.oom import classify
from elastic_mbs.rollback.random_streams import RandomStreams
from elastic_mbs.rollback.saved_tensors import detached, saved_plainly

TILES = (1, 5, 11, 7)  # positions of each tile of the trial
MOST = 8  # trials of a module: one that is different in each call would never be known
TOLERANCE = 1e-10  # of the largest value; a module that mixes positions is off by 1
_SEED = 0
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TORCHS_OWN = frozenset(vars(nn.Module()))


class _Same:
    """An object that equals itself only, with the same plain attributes, and stays alive.

    A module can read a switch in a configuration that it shares with others.
    """

    def __init__(self, value: object) -> None:
        self.value = value
        plain = (Number, str, type(None), tuple)
        self._attributes = {
            name: each for name, each in _attributes_of(value).items() if isinstance(each, plain)
        }

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Same)
            and other.value is self.value
            and other._attributes == self._attributes
        )

    def __hash__(self) -> int:
        return id(self.value)


class Kept(NamedTuple):
    """The bytes of one position, in double precision."""

    inside: int  # that backward needs, beside parameters and the input
    output: int


class PositionWise:
    """The verdicts on modules. Modules of the same structure are tried once."""

    def __init__(self) -> None:
        self._verdicts: dict[Hashable, Kept | None] = {}
        self._trials = WeakIdKeyDictionary()  # of each module, the keys of its verdicts

    def kept(self, module: nn.Module, input: Tensor, streams: RandomStreams) -> Kept | None:
        """Return the bytes that a position takes inside a module; None if it is not position-wise.

        None, too, for a module with attributes that were others in each of its trials.

        Args:
            module: a module that `may_be_position_wise`.
            input: the tensor that it is called with, of shape (…, positions, features).
            streams: the random streams that it could draw from.

        Raises:
            torch.OutOfMemoryError: there is no room to try it.
        """
        key = (_structure(module), input.ndim, *_shape(input))
        if key not in self._verdicts:
            trials = self._trials.setdefault(module, set())
            if len(trials | {key}) > MOST:
                return None
            self._verdicts[key] = _tried(module, _shape(input), streams)
            trials.add(key)
        return self._verdicts[key]


def may_be_position_wise(module: nn.Module) -> bool:
    """Return whether a module by itself, without its children, may be tried."""
    own = {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}
    return not (
        isinstance(module, torch.jit.ScriptModule)
        or any(buffer is not None for buffer in module._buffers.values())
        or any(vars(module)[name] for name in _HOOKS)
        or "forward" in own
        or "_hf_hook" in own
        or any(map(_holds_others, own.values()))
        or not all(map(_is_plain, module._parameters.values()))
    )


def _holds_others(value: object) -> bool:
    """Return whether an attribute has tensors or modules, which a copy would copy, too."""
    if isinstance(value, Mapping):
        return any(map(_holds_others, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_holds_others, value))
    return isinstance(getattr(value, "__self__", value), Tensor | nn.Module)


def _is_plain(parameter: nn.Parameter | None) -> bool:
    return parameter is None or (
        type(parameter) in (nn.Parameter, FakeTensor)
        and parameter.layout is torch.strided
        and parameter.is_floating_point()
        and parameter.device.type != "meta"
    )


def _structure(module: nn.Module) -> Hashable:
    """Return everything that decides how a module computes, but for the values of its weights."""
    return tuple(
        (
            name,
            type(each),
            each.training,
            tuple(
                (key, None if value is None else (tuple(value.shape), value.requires_grad))
                for key, value in each._parameters.items()
            ),
            tuple(
                (key, _key_of(value)) for key, value in vars(each).items() if key not in _TORCHS_OWN
            ),
        )
        for name, each in module.named_modules()
    )


def _key_of(value: object) -> Hashable:
    """Return a key of an attribute: a number or a string by value, a container by its items."""
    if isinstance(value, Number | str):
        return value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_key_of, value))
    if isinstance(value, dict):
        return dict, tuple((_key_of(key), _key_of(each)) for key, each in value.items())
    return _Same(value)


def _attributes_of(value: object) -> Mapping[str, object]:
    found = getattr(value, "__dict__", {})
    return found if isinstance(found, dict) else {}  # a class has no dict of its own


def _shape(input: Tensor) -> tuple[int, ...]:
    """Return the shape of a trial's input: two samples, a few positions, and all else as it is."""
    shape = list(input.shape)
    if len(shape) > 2:
        shape[0] = min(2, shape[0])
    shape[-2] = sum(TILES)
    return tuple(shape)


def _tried(module: nn.Module, shape: Sequence[int], streams: RandomStreams) -> Kept | None:
    """Return the bytes that a position takes inside a module; None if the trial fails."""
    before = streams.read(hosts=True)
    try:
        with (
            on_host(),
            saved_plainly(),  # a checkpoint around would count them
            torch._C.DisableTorchFunction(),
            torch.autocast("cpu", enabled=False),
            torch.enable_grad(),
        ):
            kept = _trial(module, shape)
    except Exception as error:
        if classify(error) is not None:  # which says nothing about the module
            raise
        return None
    finally:
        drew = streams.moved(before)
        streams.restore(before)
    return None if drew else kept


def _trial(module: nn.Module, shape: Sequence[int]) -> Kept | None:
    generator = torch.Generator().manual_seed(_SEED)
    twin = _twin(module, generator)
    leaves = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    input = _positions(shape, generator).requires_grad_()
    before = _attributes(twin)
    inside: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        inside[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return detached(tensor)

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        whole = twin(input)
    if type(whole) is not Tensor or whole.shape[:-1] != input.shape[:-1] or input._version:
        return None
    if whole.dtype is not torch.float64:
        return None
    tiled = torch.cat([twin(tile) for tile in input.split(TILES, -2)], -2)
    if _attributes(twin) != before or not _equal([whole], [tiled]):
        return None
    seed = _random(whole.shape, generator)
    grads = [
        torch.autograd.grad(out, [input, *leaves], seed, allow_unused=True)
        for out in (whole, tiled)
    ]
    if not _equal(*grads):
        return None
    for tensor in (input, *twin.parameters()):
        inside.pop(tensor.untyped_storage().data_ptr(), None)
    positions = math.prod(shape[:-1])
    return Kept(sum(inside.values()) // positions, whole.nbytes // positions)


def _twin(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a copy of a module on the host, with random weights in double precision."""
    copies: dict[int, Any] = {}
    for parameter in module.parameters():
        value = _random(parameter.shape, generator)
        if parameter.ndim > 1:
            value /= math.sqrt(max(1, parameter.shape[-1]))
        copies[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, copies)


def _positions(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a trial's input: every second position is like the others, the rest are all apart.

    Attention of a position to those like it is next to nothing where all are far apart.
    """
    apart = _random(shape, generator)
    alike = apart / math.sqrt(max(1, shape[-1])) + _random((*shape[:-2], 1, shape[-1]), generator)
    every_second = torch.arange(shape[-2])[:, None] % 2 == 0
    return torch.where(every_second, alike, apart)


def _random(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64, device="cpu", generator=generator)


def _attributes(module: nn.Module) -> list[dict[str, object]]:
    """Return the attributes of a module and its children, and the lengths of containers."""
    return [
        {
            name: (value if isinstance(value, Number | str) else id(value), _length(value))
            for name, value in vars(each).items()
        }
        for each in module.modules()
    ]


def _length(value: object) -> int | None:
    return len(value) if isinstance(value, list | dict | set | tuple) else None


def _equal(some: Iterable[Tensor | None], others: Iterable[Tensor | None]) -> bool:
    """Return whether tensors are equal to rounding, and finite."""
    for one, other in zip(some, others, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
            continue
        off = (one - other).abs().max().item()
        if not off <= TOLERANCE * one.abs().max().item():  # not a number, too
            return False
    return True
