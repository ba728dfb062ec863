"""Logits in chunks: a linear head and the cross-entropy after it never hold all logits at once.

Inside the context a large linear layer is put off. Where its output reaches
`torch.nn.functional.cross_entropy`, through nothing but casts, shifts of leading dimensions and
scalings, both run chunk by chunk, and the gradients of each chunk are made at once. Whatever else
reads the output computes it first, as if nothing had been put off, and that layer is left alone
from then on. Inside a checkpoint nothing is put off.

    hidden (rows, features) ──► head ──► logits (rows, classes) ──► cross_entropy ──► loss
                                put off                             in chunks of rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from elastic_mbs.errors import ReplayUnsafeError
from elastic_mbs.escalation.chunks import chunked_cross_entropy, copies_of
from elastic_mbs.escalation.head import WAY_OUT, Head, OtherLayers, Step, gradients_of, leaves_of

SMALL = 2**20  # bytes of logits that are not worth it
_ROWS = 512  # of a chunk, where there is memory for as many: the products of fewer are slow
FEWEST = 32  # of a chunk, where there is not: fewer take too long


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
            raise ReplayUnsafeError(f"logits of which there are views were edited, {WAY_OUT}")
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
        ctx.logits_of = head.whole
        return LazyLogits(head, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs = ctx.saved_tensors
        if not torch.is_grad_enabled():  # no gradient of the gradient is asked for
            inputs = leaves_of(inputs, ctx.needs_input_grad)
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            logits = ctx.logits_of(*inputs)
        return *gradients_of(logits, inputs, grad), None, None


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
            # sums of gradients would leave its range before a scaler could scale them down
            or weight.dtype is torch.float16
        ):
            return functional.linear(input, weight, bias)
        return _put_off(Head(input, weight, bias, (), autocast, self._others), dtype)

    def _cross_entropy(self, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        if isinstance(input, LazyLogits) and self._can_chunk(input, target, given):
            for old in ("size_average", "reduce"):  # None, or it could not be done
                given.pop(old, None)
            rows = self._rows(input)
            return chunked_cross_entropy(input.head, input.dtype, target, rows, **given)
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
        """Return the rows of a chunk: the size of the weight, or half of the free memory.

        Their number does not follow from the length of the sample: longer chunks take more memory
        and are no faster.
        """
        head = logits.head
        classes, own = head.weight.shape
        free = self._free()
        if free is not None:
            # Gradients come first; autocast adds the weight and a product, of half the size each.
            of_weight = head.weight.nbytes * (1 if head.cast is None else 2)
            left = free - head.hidden.nbytes - of_weight
            row = copies_of(head, logits.dtype) * classes * max(4, logits.dtype.itemsize)
            fit = left // (2 * row)
            own = min(max(own, _ROWS), fit)
        return max(own, FEWEST)


def _in_checkpoint() -> bool:
    """Return whether this runs in a checkpoint: in backward it runs again, without this mode."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return bool(hooks) and getattr(hooks[0], "__module__", None) == checkpoint.__module__


_ARGUMENTS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


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
