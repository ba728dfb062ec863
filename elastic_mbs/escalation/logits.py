"""Logits in chunks: a linear head and the cross-entropy after it never hold all logits at once.

Inside the context a large linear layer is put off. Where its output reaches
`torch.nn.functional.cross_entropy`, through nothing but casts, shifts of leading dimensions and
scalings, both run chunk by chunk, and each chunk runs again in backward. Whatever else reads the
output computes it first, as if nothing had been put off, and that layer is left alone from then on.
Inside a checkpoint nothing is put off.

    hidden (rows, features) ──► head ──► logits (rows, classes) ──► cross_entropy ──► loss
                                put off                             in chunks of rows
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from elastic_mbs.errors import ReplayUnsafeError

SMALL = 2**20  # bytes of logits that are not worth it
_COPIES = 4  # of a chunk's logits that its loss and its backward hold at once; two more a step
_MOST = 64  # chunks of a loss: more cost time and gain no memory

_WAY_OUT = 'which cannot be put off: leave "logits" out of RecoveryOptions(escalate=...)'

Step = Callable[[Tensor], Tensor]


class OtherLayers:
    """The linear layers whose output was read by something else than a cross-entropy."""

    def __init__(self) -> None:
        self._weights = WeakIdKeyDictionary()

    def add(self, weight: Tensor) -> None:
        """Leave the layer with this weight alone from now on."""
        self._weights[weight] = True

    def __contains__(self, weight: Tensor) -> bool:
        return weight in self._weights


@dataclass(frozen=True)
class Head:
    """A linear layer that was put off, and the elementwise steps after it.

    Attributes:
        hidden: its input, of shape (…, features).
        weight: of shape (classes, features).
        bias: of shape (classes,), or None.
        steps: functions of the logits, of no parameters.
        autocast: the type of autocast where the layer was called; None where it was off.
        others: the layers that are left alone.
        classes_first: the last two dimensions of the logits have changed places.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    steps: tuple[Step, ...]
    autocast: torch.dtype | None
    others: OtherLayers
    classes_first: bool = False
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.versions:
            object.__setattr__(self, "versions", self._versions())

    def _versions(self) -> tuple[int, ...]:
        return tuple(x._version for x in (self.hidden, self.weight, self.bias) if x is not None)

    def check(self) -> None:
        """Refuse to compute logits whose inputs were edited since the layer was called.

        Raises:
            ReplayUnsafeError: an input has changed.
        """
        if self._versions() != self.versions:
            raise ReplayUnsafeError(
                f"the input or the weight of a linear layer with {self.weight.shape[0]} outputs "
                f"was edited in place after the layer was called, {_WAY_OUT}"
            )

    def with_rows(self, hidden: Tensor) -> Head:
        """Return the head of other rows of the same input."""
        self.check()
        return replace(self, hidden=hidden, versions=())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        *leading, rows = self.hidden.shape[:-1]
        classes = self.weight.shape[0]
        return (*leading, classes, rows) if self.classes_first else (*leading, rows, classes)

    @contextlib.contextmanager
    def as_called(self) -> Iterator[None]:
        """Run the block under the autocast of the call."""
        kind = self.hidden.device.type
        with torch.autocast(kind, dtype=self.autocast, enabled=self.autocast is not None):
            yield

    def whole(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return all logits, in their shape."""
        found = self.rows(hidden, weight, bias)
        return found.transpose(-1, -2) if self.classes_first else found

    def rows(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of some rows, of shape (…, classes)."""
        with self.as_called():
            found = functional.linear(hidden, weight, bias)
            for step in self.steps:
                found = step(found)
        return found


class LazyLogits(Tensor):
    """Logits that are not computed until something reads them. They have no memory of their own."""

    head: Head
    _made: Tensor | None
    _viewed: bool  # another one shares its memory
    computed: bool  # its own values count from now on, not those of the head

    # What runs inside the context is followed by its mode.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, head: Head, dtype: torch.dtype) -> LazyLogits:
        """Return the logits of a head, which has memory for them only when they are read."""
        made: LazyLogits = Tensor._make_wrapper_subclass(
            cls, head.shape, dtype=dtype, device=head.hidden.device
        )
        made.head, made._made = head, None
        made._viewed = made.computed = False
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub is narrower
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the logits, which are computed now."""
        if func._schema.is_mutable:
            for each in (*args, *(kwargs or {}).values()):
                if isinstance(each, LazyLogits):
                    each.compute()
        real = tree_map_only(LazyLogits, LazyLogits._real, (args, kwargs or {}))
        return func(*real[0], **real[1])

    def viewed(self, head: Head) -> Tensor:
        """Return logits that share the memory of these."""
        self._viewed = True
        found = _put_off(head, self.dtype)
        assert isinstance(found, LazyLogits)
        found._viewed = True
        return found

    def compute(self) -> None:
        """Count with the values of these logits from now on: they, or their gradient, are edited.

        Raises:
            ReplayUnsafeError: others share their memory.
        """
        if self._viewed:
            raise ReplayUnsafeError(f"logits of which there are views were edited, {_WAY_OUT}")
        self.head.others.add(self.head.weight)
        self.computed = True

    def _real(self) -> Tensor:
        if self._made is None:
            head = self.head
            head.check()
            head.others.add(head.weight)
            self._made = head.whole(head.hidden.detach(), head.weight.detach(), _detached(head))
        return self._made


def _detached(head: Head) -> Tensor | None:
    return None if head.bias is None else head.bias.detach()


class _PutOff(torch.autograd.Function):
    """The graph of lazy logits, for whatever reads them: the layer is run again in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, dtype: Any
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.head = replace(
            head, hidden=hidden.detach(), weight=weight.detach(), bias=None, versions=(0,)
        )
        return LazyLogits(head, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs = ctx.saved_tensors
        double = torch.is_grad_enabled()  # a gradient of the gradient is asked for
        own = [
            None if each is None else each if double else each.detach().requires_grad_(wanted)
            for each, wanted in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        ]
        wanted: Any = [
            each for each, asked in zip(own, ctx.needs_input_grad, strict=False) if asked
        ]
        with torch.enable_grad():
            logits = ctx.head.whole(*own)
        found = iter(torch.autograd.grad(logits, wanted, grad, create_graph=double))
        grads = [next(found) if asked else None for asked in ctx.needs_input_grad[:3]]
        return (*grads, None, None)


def _put_off(head: Head, dtype: torch.dtype) -> Tensor:
    found: Tensor = _PutOff.apply(head.hidden, head.weight, head.bias, head, dtype)  # type: ignore[no-untyped-call]
    return found


class ChunkedLogits(TorchFunctionMode):
    """A context manager: inside it a head and its cross-entropy run in chunks.

    Args:
        others: the layers that are left alone.
        free: returns the bytes that are free, or None where that is not known.
    """

    def __init__(self, others: OtherLayers, free: Callable[[], int | None]) -> None:
        super().__init__()
        self._others = others
        self._free = free
        self._entered = False

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the mode. May be repeated."""
        if self._entered:
            self._entered = False
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Put a linear layer off, or run a function of logits that were put off."""
        kwargs = kwargs or {}
        if _in_checkpoint():
            return func(*args, **kwargs)
        if func is functional.linear:
            return self._linear(*args, **kwargs)
        if func is functional.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        lazy = args[0] if args else None
        if isinstance(lazy, LazyLogits) and not lazy.computed and torch.is_grad_enabled():
            if getattr(func, "__name__", "") in _HOOKS:
                lazy.compute()
            elif (found := _followed(lazy, func, args[1:], kwargs)) is not None:
                return found
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        autocast = _autocast_of(input)
        dtype = autocast or input.dtype
        classes, features = weight.shape if weight.ndim == 2 else (0, 0)
        nbytes = input.numel() // max(1, features) * classes * dtype.itemsize
        if (
            isinstance(input, LazyLogits)
            or type(input) not in (Tensor, FakeTensor)
            or not torch.is_grad_enabled()
            or classes <= features
            or nbytes < SMALL
            or weight in self._others
        ):
            return functional.linear(input, weight, bias)
        return _put_off(Head(input, weight, bias, (), autocast, self._others), dtype)

    def _cross_entropy(self, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        if isinstance(input, LazyLogits) and self._can_chunk(input, target, given):
            for old in ("size_average", "reduce"):  # None, or it could not be done
                given.pop(old, None)
            return chunked_cross_entropy(input.head, target, self._rows(input), **given)
        return functional.cross_entropy(input, target, *args, **kwargs)

    @staticmethod
    def _can_chunk(input: LazyLogits, target: Tensor, given: dict[str, Any]) -> bool:
        return (
            torch.is_grad_enabled()
            and not input.computed
            and input.ndim == (3 if input.head.classes_first else 2)
            and target.shape == input.head.hidden.shape[:-1]
            and target.numel() > 1
            and given.get("reduction", "mean") in ("mean", "sum")
            and given.get("size_average") is None
            and given.get("reduce") is None
        )

    def _rows(self, logits: LazyLogits) -> int:
        """Return the rows of a chunk: a quarter of the free memory, or the size of the weight."""
        classes, own = logits.head.weight.shape
        rows = logits.numel() // classes
        free = self._free()
        if free is not None:
            copies = _COPIES + 2 * len(logits.head.steps)
            own = min(own, free // (4 * copies * classes * max(4, logits.dtype.itemsize)))
        return max(1, own, -(-rows // _MOST))


def _in_checkpoint() -> bool:
    """Return whether this runs in a checkpoint: in backward it runs again, without this mode."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return bool(hooks) and getattr(hooks[0], "__module__", None) == checkpoint.__module__


_ARGUMENTS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def chunked_cross_entropy(
    head: Head,
    target: Tensor,
    rows: int,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of a head's logits, computed in chunks of `rows`.

    Args:
        head: the head, of hidden states of shape (…, features).
        target: class numbers, of shape (…).
        rows: rows of a chunk.
        weight: as for `cross_entropy`.
        ignore_index: as for `cross_entropy`.
        reduction: "mean" or "sum".
        label_smoothing: as for `cross_entropy`.
    """
    head.check()

    def loss_of(hidden: Tensor, own: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        logits = head.rows(hidden, matrix, bias)
        return functional.cross_entropy(
            logits,
            own,
            weight,
            ignore_index=ignore_index,
            reduction="sum",
            label_smoothing=label_smoothing,
        )

    again = partial(checkpoint, loss_of, use_reentrant=False, preserve_rng_state=False)
    target = target.flatten()
    chunks = zip(head.hidden.flatten(0, -2).split(rows), target.split(rows), strict=True)
    losses = [again(hidden, own, head.weight, head.bias) for hidden, own in chunks]
    total = torch.stack(losses).sum()
    if reduction == "sum":
        return total
    counts = target != ignore_index
    if weight is None:  # in a type that has all whole numbers
        terms = counts.sum().to(torch.promote_types(total.dtype, torch.float32))
    else:
        terms = (weight[target.where(counts, 0)] * counts).sum()
    return (total / terms).to(total.dtype)


# ---------------------------------------------------------------------- steps that are put off


def _followed(lazy: LazyLogits, func: Any, args: Sequence[Any], kwargs: Any) -> Tensor | None:
    """Return the lazy result of a function of lazy logits; None where it has to be computed."""
    name = getattr(func, "__name__", "")
    if kwargs or lazy.head.classes_first:
        return None
    if _puts_classes_first(lazy, func, name, args):
        return lazy.viewed(replace(lazy.head, classes_first=True))
    if name in _VIEWS:
        hidden = _VIEWS[name](lazy, *args)
        if hidden is None:
            return None
        return lazy if hidden is lazy.head.hidden else lazy.viewed(lazy.head.with_rows(hidden))
    if name in _STEPS:
        step, dtype = _STEPS[name](lazy, func, *args)
        if step is None or step is _unchanged:
            return None if step is None else lazy
        head = replace(lazy.head, steps=(*lazy.head.steps, step))
        return _put_off(head, dtype)
    return None


def _puts_classes_first(lazy: LazyLogits, func: Any, name: str, args: Sequence[Any]) -> bool:
    if lazy.ndim != 3:
        return False
    if name == "transpose":
        return sorted(each % 3 for each in args) == [1, 2]
    if name == "permute":
        order = args[0] if len(args) == 1 else args
        return [each % 3 for each in order] == [0, 2, 1]
    return name == "__get__" and func == _MT


def _reshaped(lazy: LazyLogits, *size: Any) -> Tensor | None:
    size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    hidden = lazy.head.hidden
    if not size or size[-1] != lazy.shape[-1]:
        return None
    return hidden.reshape(*size[:-1], hidden.shape[-1])


def _flattened(lazy: LazyLogits, start: int = 0, end: int = -1) -> Tensor | None:
    last = end % lazy.ndim == lazy.ndim - 1
    return None if last else lazy.head.hidden.flatten(start, end)


def _indexed(lazy: LazyLogits, index: Any) -> Tensor | None:
    index = index if isinstance(index, tuple) else (index,)
    if not all(each is Ellipsis or isinstance(each, slice | int) for each in index):
        return None
    if any(isinstance(each, bool) for each in index):
        return None
    reaches_classes = Ellipsis in index[:-1] or len(index) == lazy.ndim
    if index[-1] is Ellipsis or not reaches_classes:
        return lazy.head.hidden[index]
    return lazy.head.hidden[index] if index[-1] == slice(None) else None


def _same(lazy: LazyLogits) -> Tensor:
    return lazy.head.hidden


_MT = vars(torch._C.TensorBase)["mT"].__get__  # the property `tensor.mT`


def _cast(dtype: torch.dtype | None) -> Callable[..., tuple[Step | None, torch.dtype]]:
    def step_of(lazy: LazyLogits, func: Any, wanted: Any = None) -> tuple[Step | None, torch.dtype]:
        to = dtype or wanted
        if isinstance(wanted, torch.device | str):
            same = torch.device(wanted) == lazy.device
            return (_unchanged if same else None), lazy.dtype
        if not isinstance(to, torch.dtype) or not to.is_floating_point:
            return None, lazy.dtype
        if to is lazy.dtype:
            return _unchanged, to
        return (lambda logits: logits.to(to)), to

    return step_of


def _unchanged(logits: Tensor) -> Tensor:
    return logits


def _scaled(lazy: LazyLogits, func: Any, *args: Any) -> tuple[Step | None, torch.dtype]:
    """Return the step of a function of the logits and at most a number."""
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in args):
        return None, lazy.dtype
    return (lambda logits: func(logits, *args)), lazy.dtype


_HOOKS = {"register_hook", "retain_grad"}
_VIEWS: dict[str, Callable[..., Tensor | None]] = {
    "view": _reshaped,
    "reshape": _reshaped,
    "flatten": _flattened,
    "__getitem__": _indexed,
    "contiguous": _same,
}
_STEPS: dict[str, Callable[..., tuple[Step | None, torch.dtype]]] = {
    "float": _cast(torch.float32),
    "double": _cast(torch.float64),
    "to": _cast(None),
    **dict.fromkeys(
        ("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "tanh"), _scaled
    ),
}


def _autocast_of(tensor: Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    # Autocast leaves double precision alone.
    return None if tensor.dtype is torch.float64 else torch.get_autocast_dtype(kind)
