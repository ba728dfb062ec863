"""The result of a call (loss, outputs, how the batch was split), and the totals over all calls."""

from __future__ import annotations

import copy
import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from elastic_mbs.batch.containers import Path, Role, kind_of, map_tensors, tensors_in
from elastic_mbs.batch.join import Order, Pad, join
from elastic_mbs.device import accelerator_of
from elastic_mbs.errors import UsageError
from elastic_mbs.memory import oom
from elastic_mbs.memory.budget import MemoryBudget, on_host
from elastic_mbs.noise_scale import NoiseScale
from elastic_mbs.options import OutputPlace
from elastic_mbs.sinks.notebook import result_html


@dataclass(eq=False, repr=False)
class StepResult:
    """The outcome of one call.

    Attributes:
        partition: the committed pieces as (start, stop) ranges of samples, in the batch's order, or
            in `order`.
        micro_batch_size: the size that this call ended with, in samples. Pieces of a sorted
            batch may hold more: as many elements as this number of its longest samples.
        ooms: out-of-memory errors survived in this call.
        replayed_samples: samples that were run again.
        noise_scale: the gradient noise scale up to this call, where `GradientOptions(noise_scale=)`
            wants it; None before the first estimate.
        order: with `pieces="by_length"`, the batch's samples in the order in which they were cut;
            None where they were not sorted.
    """

    partition: tuple[tuple[int, int], ...]
    micro_batch_size: int
    ooms: int = 0
    replayed_samples: int = 0
    noise_scale: NoiseScale | None = field(default=None, repr=False)
    order: tuple[int, ...] | None = field(default=None, repr=False)
    _lengths: Sequence[int] = field(default=(), repr=False)  # of the samples in that order
    _losses: tuple[Tensor, ...] = field(default=(), repr=False)  # of the pieces, weighted
    # of each name, those of the pieces, weighted by its own count
    _named: Mapping[str, Sequence[Tensor]] = field(default_factory=dict, repr=False)
    # of the pieces, until they are read
    _outputs: list[StoredOutput | None] = field(default_factory=list, repr=False)
    _per_piece: set[Path] | None = field(default=None, repr=False)  # see `join`
    _pad: Pad = field(default=None, repr=False)
    _joined: Any = field(default=None, repr=False)

    @property
    def loss(self) -> Tensor:
        """The loss of the whole batch: detached, unscaled, a scalar on the device of the losses.

        Only a read of its value waits for the device.
        """
        if not self._losses:  # nothing is kept: its type would be taken for that of the losses
            return torch.zeros(())
        if len(self._losses) > 1:
            self._losses = (_sum(self._losses),)
        return self._losses[0]

    @property
    def losses(self) -> dict[str, Tensor]:
        """The losses of the whole batch by name, where `count` is a dict; else an empty dict.

        Each is weighed by its own count, so they add up to `loss`. One that has no term in the
        batch is 0.
        """
        self._named = {
            name: each if len(each) == 1 else (_sum(each),) for name, each in self._named.items()
        }
        return {name: each[0] for name, each in self._named.items()}

    def item(self) -> float:
        """Return the loss as a number, as a tensor does; waits for the device."""
        return float(self)

    def detach(self) -> Tensor:
        """Return the loss as a tensor, which has no graph anyway."""
        return self.loss

    def backward(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse the line that is left over from a loop without a runtime."""
        raise UsageError("backward has been done by the call already: remove this line")

    def __float__(self) -> float:
        """Return the loss as a number; waits for the device."""
        return oom.retry(
            "read the loss", lambda: float(self.loss), {loss.device for loss in self._losses}
        )

    def __repr__(self) -> str:
        """Return the loss and how the batch was split; waits for the device."""
        return (
            f"StepResult(loss={self._loss_text()}, pieces={len(self.partition)}, "
            f"micro_batch_size={self.micro_batch_size}, ooms={self.ooms}, "
            f"replayed_samples={self.replayed_samples})"
        )

    def _repr_html_(self) -> str:
        """Return a notebook's view: loss, errors, and the pieces."""
        facts = {
            "loss": self._loss_text(),
            "pieces": len(self.partition),
            "micro-batch": self.micro_batch_size,
            "out of memory": self.ooms,
            "replayed samples": self.replayed_samples,
        }
        return result_html(facts, self.partition)

    def _loss_text(self) -> str:
        try:
            return f"{float(self):.6g}"
        except RuntimeError:  # a lost device, or one without data
            return "?"

    def __format__(self, spec: str) -> str:
        """Return the loss in a format, `f"{result:.4f}"`; without one, the whole result."""
        return format(float(self), spec) if spec else str(self)

    @property
    def outputs(self) -> Any:
        """The values that `loss_fn` returned besides the loss, in the batch's order, or None.

        Raises:
            UsageError: the pieces differ in width, and `pad` does not say what fills them up.
        """
        if self._outputs:
            _gather(self._outputs)
            lengths = [stop - start for start, stop in self.partition]
            with on_host(all(stored is None or stored.on_host for stored in self._outputs)):
                order = (
                    None
                    if self.order is None
                    else Order.of(self.order, self._lengths, self.partition)
                )
                self._joined = join(
                    [None if stored is None else stored.get() for stored in self._outputs],
                    lengths,
                    self._per_piece,
                    order,
                    self._pad,
                )
            self._outputs = []
        elif isinstance(self._joined, StoredOutput):
            self._joined = self._joined.get()
        return self._joined


def _sum(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of scalars, on the device and in the type of the last one."""
    if not losses:
        return torch.zeros(())
    last = losses[-1]
    return oom.retry(
        "add up the losses",
        lambda: torch.stack([loss.to(last.dtype) for loss in losses]).sum(),
        {last.device},
    )


def loss_on_host(result: StepResult) -> float | None:
    """Return the loss where reading it waits for nothing, without taking memory for a sum."""
    losses = result._losses
    if any(loss.device.type != "cpu" for loss in losses):
        return None
    return sum(map(float, losses))


def of_batch(result: StepResult, loss: Tensor, stored: StoredOutput | None) -> StepResult:
    """Return the same result with a loss and outputs that come once for the whole batch."""
    return replace(result, _losses=(loss,), _outputs=[], _joined=stored)


def has_loss(result: StepResult) -> bool:
    """Return whether a piece had a loss: without one, the type of `loss` says nothing."""
    return bool(result._losses)


def set_losses(result: StepResult, loss: Tensor, named: Mapping[str, Tensor]) -> None:
    """Put the losses of all ranks' samples in a result that nobody has seen yet."""
    result._losses = (loss,)
    result._named = {name: (value,) for name, value in named.items()}


def stored_bytes(result: StepResult) -> int:
    """Return the size of the outputs that have not been joined yet."""
    return sum(stored.nbytes for stored in result._outputs if stored is not None)


def output_tensors(result: StepResult) -> list[Tensor]:
    """Return the tensors in the outputs, where they lie now."""
    kept = [*result._outputs, result._joined]
    return tensors_in([each._value if isinstance(each, StoredOutput) else each for each in kept])


def without_outputs(result: StepResult) -> StepResult:
    """Return the same result without its outputs."""
    return replace(result, _outputs=[], _joined=None)


@dataclass
class Stats:
    """The totals over all calls of a runtime.

    Attributes:
        calls: training calls that finished.
        samples: samples in them.
        pieces: micro-batches that committed.
        ooms: out-of-memory errors survived, those of `evaluate` too.
        replayed_samples: samples that were run again, those of `evaluate` too.
        sizes: how many calls ended at each micro-batch size.
        graphs: graphs that `torch.compile` made while a call ran: a piece of a new length can need
            one.
    """

    calls: int = 0
    samples: int = 0
    pieces: int = 0
    ooms: int = 0
    replayed_samples: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    graphs: int = 0


def add_to(stats: Stats, result: StepResult, samples: int, *, training: bool) -> None:
    """Count one finished call."""
    stats.ooms += result.ooms
    stats.replayed_samples += result.replayed_samples
    if training:
        stats.calls += 1
        stats.samples += samples
        stats.pieces += len(result.partition)
        size = result.micro_batch_size
        stats.sizes[size] = stats.sizes.get(size, 0) + 1


SMALL = 16 * 2**20
"""Bytes of a batch's outputs that may stay where they are made, without being asked for."""


@dataclass(slots=True)
class Near:
    """The place of outputs that stay with their batch: on its device where they are small.

    Small is what would be small for the whole batch, so the place does not depend on the split.

    Attributes:
        tensors: those of the batch, as the user has given it.
        samples: how many it has.
    """

    tensors: Sequence[Tensor]
    samples: int
    _on_device: bool | None = None  # until the first output is stored

    @property
    def on_device(self) -> bool:
        """True if the batch lies on an accelerator."""
        if self._on_device is None:
            self._on_device = any(tensor.device.type != "cpu" for tensor in self.tensors)
        return self._on_device


Place = Literal["cpu", "device"] | Near | None


def place_of(outputs: OutputPlace, tensors: Sequence[Tensor], samples: int) -> Place:
    """Return the place of the outputs of a batch of these tensors."""
    return Near(tensors, samples) if outputs == "auto" else outputs


class StoredOutput:
    """Outputs of a piece, detached. Where it is wanted they are copied to the host.

    Storing does not wait for the copy, `get` does.
    """

    def __init__(self, value: Any, place: Place, samples: int = 1) -> None:
        """Store outputs.

        Args:
            value: any objects, with tensors in them.
            place: where they are kept.
            samples: of the piece.
        """
        near = place if isinstance(place, Near) and place.on_device else None
        self.on_host = near is None and place != "device"
        self.nbytes = 0  # of their dense tensors
        self._samples = samples
        self._rows = 0  # bytes of those with a row per sample
        # of the last copy from each device that the host did not wait for
        self._events: dict[torch.device, torch.Event] = {}
        # by their address, with their versions: those that stay in memory of the function's
        self.kept: dict[int, tuple[Tensor, int]] = {}
        self._value = map_outputs(value, self._to_host if self.on_host else self._where_it_is)
        if near is not None:
            others = (self.nbytes - self._rows) * near.samples  # as if there was one per sample
            if self._rows * near.samples // samples + others > SMALL:
                self.to_host()

    def to_host(self) -> None:
        """Move the outputs to the host."""
        if not self.on_host:
            self.on_host = True
            self.nbytes = self._rows = 0
            self.kept.clear()
            self._value = map_outputs(self._value, self._to_host)

    def _where_it_is(self, tensor: Tensor) -> Tensor:
        if (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and not tensor.is_inference()
            and tensor.numel()
        ):
            self.kept[tensor.data_ptr()] = tensor.detach(), tensor._version
        return self._detached(tensor)

    def _detached(self, tensor: Tensor) -> Tensor:
        # the size of others is not known
        if tensor.layout is torch.strided and not tensor.is_nested:
            self.nbytes += tensor.nbytes
            if tensor.ndim and tensor.shape[0] == self._samples:
                self._rows += tensor.nbytes
        return tensor.detach()

    def _to_host(self, tensor: Tensor) -> Tensor:
        own = tensor.grad_fn is not None
        tensor = self._detached(tensor)
        accelerator = accelerator_of(tensor.device)
        if accelerator is not None and accelerator.copies_ahead:  # cuda-only
            copy = accelerator.to_host(tensor)
            self._events[tensor.device] = accelerator.mark(self._events.get(tensor.device))
            return copy
        virtual = (budget := MemoryBudget.current()) is not None and budget.covers(tensor.device)
        with on_host(virtual):
            # a tensor that the step did not compute (a buffer, say) can change later
            return tensor.to("cpu", copy=virtual or not own)

    def get(self) -> Any:
        """Return the outputs, once the copy is done."""
        for event in self._events.values():  # cuda-only
            event.synchronize()
        return self._value


def _gather(stored: Iterable[StoredOutput | None]) -> None:
    """Move all outputs to the host where some of them are there: they are joined."""
    found = [each for each in stored if each is not None]
    if any(each.on_host for each in found):
        for each in found:
            each.to_host()


def check_not_overwritten(stored: list[StoredOutput | None]) -> None:
    """Refuse outputs on the device that a later piece has written over."""
    kept = [piece.kept for piece in stored if piece is not None and piece.kept]
    if not kept:
        return
    pieces = Counter(chain.from_iterable(kept))
    if any(
        pieces[address] > 1 and tensor._version != version
        for each in kept
        for address, (tensor, version) in each.items()
    ):
        raise UsageError(
            "an output was overwritten by a later piece: the function returns the same memory "
            "each time. Return a copy (output.clone()), or have outputs moved to the host piece "
            'by piece (outputs="cpu")'
        )


_CLOSED = (
    nn.Module,
    torch.optim.Optimizer,
    Dataset,
    DataLoader,
    torch.Generator,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
)


def map_outputs(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of `value` with `fn` applied to each tensor once.

    `value` may be made of any objects (a decoder's cache, say). Objects from which no tensor is
    reached are handed on. Objects that cannot be deep-copied are, too, and the tensors inside
    keep their graph.
    """
    if kind_of(type(value)).role is Role.TENSOR:
        return fn(value)
    memo = _copied(value, fn)
    try:
        return copy.deepcopy(value, memo)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:
        # an object may refuse to be copied in any way, and a chain of objects may be too long
        return map_tensors(value, fn)


def _copied(value: Any, fn: Callable[[Tensor], Tensor]) -> dict[int, Any]:
    """Return the memo for `copy.deepcopy`, by id.

    Tensors are in it as `fn` has mapped them, and objects that reach no tensor as they are.
    """
    found: dict[int, Any] = {}
    holders = defaultdict[int, list[int]](list)
    mapped: dict[int, Any] = {}
    todo = [value]
    while todo:
        each = todo.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        cls = type(each)
        kind = kind_of(cls)
        if kind.role is Role.TENSOR or kind.splitter is not None:
            mapped[id(each)] = map_tensors(each, fn)
        elif not issubclass(cls, _CLOSED) and not hasattr(cls, "__del__"):
            # a finaliser would run for the copy, too
            parts = gc.get_referents(each)
            for part in parts:
                holders[id(part)].append(id(each))
            todo += parts
    reaching = list(mapped)
    for key in reaching:  # which grows on the way
        found.pop(key, None)
        reaching += holders.pop(key, ())
    return found | mapped
