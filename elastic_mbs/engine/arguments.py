"""What the doors are given: what it is called, and what is refused of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError, UnsupportedError, UsageError
from elastic_mbs.events import Sink


def sinks_of(on_event: Sink | Iterable[Sink]) -> tuple[Sink, ...]:
    """The functions that get each event.

    Raises:
        UsageError: something in it cannot be called.
    """
    sinks = (on_event,) if callable(on_event) or not isinstance(on_event, Iterable) else tuple(on_event)
    if not all(callable(sink) for sink in sinks):
        raise UsageError(f"on_event={on_event!r} is neither a function nor a sequence of functions")
    return sinks


def name_of(fn: Callable[..., Any]) -> str:
    """What limits and sizes are kept by: the qualified name of a function, or its type's."""
    named = getattr(fn, "func", fn)  # a functools.partial is called what it calls
    return getattr(named, "__qualname__", type(named).__qualname__)


def identity_of(fn: Callable[..., Any]) -> object:
    """What traits are kept by: the code of a function, which its closures share, or an object's type."""
    named = getattr(fn, "func", fn)
    return getattr(named, "__code__", None) or getattr(getattr(named, "__func__", None), "__code__", None) or type(named)


def modules_of(model: object) -> Sequence[nn.Module]:
    """The modules that `model=` stands for.

    Raises:
        UsageError: it is neither a module nor a sequence.
    """
    if isinstance(model, nn.Module):
        return [model]
    if isinstance(model, Sequence) and not isinstance(model, str):
        return model
    raise UsageError(
        f"model={model!r} is a {type(model).__name__}; give a torch.nn.Module or a sequence of them (a callable only to elastic_step, for methods)"
    )


def refuse_graphs(view: BatchView) -> None:
    """Refuses a batch that pieces cannot share.

    Raises:
        BatchError: a tensor carries a graph.
    """
    if all(tensor.grad_fn is None for tensor in view.tensors()):
        return
    for name, tensor in view.named_tensors():
        if tensor.grad_fn is not None:
            raise BatchError(
                f"the tensor {name or 'batch'!r} carries a graph ({tensor.grad_fn.name()}), and each piece would run backward through it again: "
                "compute it inside loss_fn, with its module in model=[...], or detach it"
            )


def refuse_no_function(fn: object, usage: str) -> None:
    """Refuses a loss, a batch or anything else in the place of the function.

    Raises:
        UsageError: it cannot be called.
    """
    if not callable(fn):
        raise UsageError(f"mbs.{usage}: the function comes first and is called on pieces of the batch; got a {type(fn).__name__} in its place")


def refuse_capture() -> None:
    """Refuses to run where a failure could not be recovered from.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():  # cuda-only
        raise UnsupportedError(
            "a CUDA graph is being captured: an out-of-memory error could not be recovered from inside it. Run the step outside the capture"
        )
