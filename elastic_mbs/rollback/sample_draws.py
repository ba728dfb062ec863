"""Random numbers that belong to samples, and not to pieces.

A stream gives its numbers in the order in which they are asked for, so noise and dropout depend on
how a batch was split. In this mode a draw takes one number from the CPU's stream, its key. The
numbers of each sample come from the key and the sample's place in the batch. With the streams put
back to the call's start before each piece, every split has the same keys.

A recomputation in backward (checkpointing) puts the CPU's stream back by itself, and so it has the
same keys, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.dispatch import VersionedMode, run
from elastic_mbs.errors import UsageError

aten = torch.ops.aten

_WORD = 2**64
Fill = Callable[[Tensor, torch.Generator], object]


class SampleDraws(VersionedMode):
    """A mode in which each draw has a part for each sample of a piece.

    Args:
        start: the place of the piece's first sample in the batch.
        stop: the place after its last one.
        alike: all samples draw the same numbers, so it is no matter which of them a draw goes to.
    """

    def __init__(self, start: int, stop: int, *, alike: bool = False) -> None:
        super().__init__()
        self._samples = stop - start
        self._places = [0] * self._samples if alike else range(start, stop)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Run an operation, and draw for it where it is random."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _draws_nothing(func, args, kwargs):
            return run(func, args, kwargs)
        draw = _DRAWS.get(func)
        if draw is None or kwargs.get("generator") is not None:
            own = " with a generator of its own" if draw is not None else ""
            raise UsageError(
                f'draws="sample" cannot draw {func} for each sample{own}: use dropout, rand, '
                "randn, randint, their _like forms, bernoulli, normal, exponential_ or multinomial "
                "without generator=, or "
                'GradientOptions(draws="piece")'
            )
        return draw(self, func, args, kwargs)

    def fill(self, out: Tensor, fill: Fill) -> Tensor:
        """Fill a new tensor of the samples, row by row.

        Raises:
            UsageError: its first dimension is not that of the samples.
        """
        if out.ndim == 0 or len(out) != self._samples:
            raise UsageError(
                f"random numbers of shape {tuple(out.shape)} were drawn for {self._samples} "
                'samples: with draws="sample" the first dimension of a draw is the samples. Draw '
                "numbers that all samples share before the call, and pass them to loss_fn"
            )
        # How numbers are laid out in a row must not depend on its neighbours.
        rows = (
            out
            if out.is_contiguous()
            else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        )
        key = int(torch.empty((), dtype=torch.int64).random_())
        generator = torch.Generator(out.device)
        for place, row in zip(self._places, rows.unbind(), strict=True):
            fill(row, generator.manual_seed(_mixed(key, place)))
        return out if rows is out else out.copy_(rows)


def _mixed(key: int, place: int) -> int:
    """Return a seed from two numbers: the last step of SplitMix64 (Steele, Lea, Flood 2014)."""
    word = (key + (place + 1) * 0x9E3779B97F4A7C15) % _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % _WORD
    return (word ^ (word >> 31)) & 0xFFFFFFFF  # the CPU's generator takes 32 bits


def _draws_nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation with dropout inside has none."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | {
        **kwargs
    }
    if given.get("train") is False:
        return True
    for argument in func._schema.arguments:
        if argument.name in ("dropout_p", "dropout"):
            return not given.get(argument.name, argument.default_value)
    return False


def _in_place(mode: SampleDraws, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    tensor: Tensor = args[0]
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    mode.fill(out, lambda row, generator: func(row, *args[1:], generator=generator))
    return tensor.copy_(out)


def _bernoulli_of(probabilities: Tensor) -> Fill:
    """Return the fill by a tensor of probabilities, whose rows are taken in order."""
    rows = iter(probabilities)
    return lambda row, generator: row.bernoulli_(next(rows), generator=generator)


def _bernoulli_tensor_in_place(mode: SampleDraws, func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor, probabilities = args
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.copy_(mode.fill(out, _bernoulli_of(probabilities.expand_as(tensor))))  # type: ignore[no-any-return]


def _bernoulli(mode: SampleDraws, func: Any, args: Any, kwargs: Any) -> Tensor:
    probabilities = args[0]
    if len(args) > 1:  # bernoulli.p: the tensor gives the shape alone
        p = args[1]
        out = torch.empty_like(probabilities)
        return mode.fill(out, lambda row, generator: row.bernoulli_(p, generator=generator))
    return mode.fill(torch.empty_like(probabilities), _bernoulli_of(probabilities))


def _new(kwargs: Mapping[str, Any], size: Sequence[int]) -> Tensor:
    options = {name: kwargs.get(name) for name in ("dtype", "device")}
    return torch.empty(size, **options)


def _like(tensor: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    options = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
    return torch.empty_like(tensor, **options)


def _uniform(row: Tensor, generator: torch.Generator) -> object:
    return row.uniform_(generator=generator)


def _gaussian(row: Tensor, generator: torch.Generator) -> object:
    return row.normal_(generator=generator)


def _between(low: int, high: int) -> Fill:
    return lambda row, generator: row.random_(low, high, generator=generator)


def _integers(mode: SampleDraws, func: Any, args: Any, kwargs: Any) -> Tensor:
    *bounds, size = args
    low, high = (0, *bounds)[-2:]
    dtype = kwargs.get("dtype") or torch.int64
    return mode.fill(_new({**kwargs, "dtype": dtype}, size), _between(low, high))


def _integers_like(mode: SampleDraws, func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor, *bounds = args
    low, high = (0, *bounds)[-2:]
    return mode.fill(_like(tensor, kwargs), _between(low, high))


def _normal(mode: SampleDraws, func: Any, args: Any, kwargs: Any) -> Tensor:
    mean, std = (*args, 1.0)[:2]
    if len(args) > 2:  # normal.float_float: with a size
        numbers = mode.fill(_new(kwargs, args[2]), _gaussian)
    else:
        shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
        tensor = mean if isinstance(mean, Tensor) else std
        numbers = mode.fill(tensor.new_empty(shape), _gaussian)
    found: Tensor = numbers * std + mean
    return found


def _multinomial(mode: SampleDraws, func: Any, args: Any, kwargs: Any) -> Tensor:
    weights, number, *others = args
    if weights.ndim == 1:  # one draw for each sample, from the same weights
        if not (others and others[0]):
            raise UsageError(
                'draws="sample" cannot draw torch.multinomial without replacement for each sample, '
                "because each depends on the others: draw before the call, or use "
                'GradientOptions(draws="piece")'
            )
        return mode.fill(
            torch.empty(number, dtype=torch.int64, device=weights.device),
            lambda row, generator: row.copy_(func(weights, 1, True, generator=generator)[0]),
        )
    out = torch.empty((*weights.shape[:-1], number), dtype=torch.int64, device=weights.device)
    rows = iter(weights)
    return mode.fill(
        out,
        lambda row, generator: row.copy_(func(next(rows), number, *others, generator=generator)),
    )


def _dropout(mode: SampleDraws, func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    tensor, p, _ = args
    mask = torch.empty(tensor.shape, dtype=torch.bool, device=tensor.device)
    mode.fill(mask, lambda row, generator: row.bernoulli_(1 - p, generator=generator))
    return tensor * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _filled(fill: Fill, *, like: bool) -> Callable[..., Tensor]:
    def draw(mode: SampleDraws, func: Any, args: Any, kwargs: Any) -> Tensor:
        return mode.fill(_like(args[0], kwargs) if like else _new(kwargs, args[0]), fill)

    return draw


_DRAWS: dict[Any, Callable[..., Any]] = {
    aten.normal_.default: _in_place,
    aten.uniform_.default: _in_place,
    aten.exponential_.default: _in_place,
    aten.random_.default: _in_place,
    aten.random_.to: _in_place,
    getattr(aten.random_, "from"): _in_place,
    aten.bernoulli_.float: _in_place,
    aten.bernoulli_.Tensor: _bernoulli_tensor_in_place,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.rand.default: _filled(_uniform, like=False),
    aten.randn.default: _filled(_gaussian, like=False),
    aten.rand_like.default: _filled(_uniform, like=True),
    aten.randn_like.default: _filled(_gaussian, like=True),
    aten.randint.default: _integers,
    aten.randint.low: _integers,
    aten.randint_like.default: _integers_like,
    aten.randint_like.low_dtype: _integers_like,
    aten.normal.float_float: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.multinomial.default: _multinomial,
    aten.native_dropout.default: _dropout,
}
