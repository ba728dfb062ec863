"""Live bytes after each operation on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_mbs.memory.live_storages import LiveStorages
from elastic_mbs.planning.values import Values

_DEVICE = torch.ops.prim.device.default
_GROUPED = torch.ops.aten._grouped_mm.default
_READ = torch.ops.aten._local_scalar_dense.default
_MSE = torch.ops.aten.mse_loss.default
_NO_REDUCTION = 0
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default  # oneDNN's kernel of one layer in one direction
MOST_OPERATIONS = 100_000  # of one trace: 5 s or so


class TooLong(Exception):
    """A trace has more operations than are worth waiting for."""


class OpaqueKernelError(Exception):
    """A kernel keeps memory for its backward that its fake does not show."""


class SparseError(Exception):
    """A tensor is sparse: its size depends on values."""


class Point(NamedTuple):
    """Bytes after one operation."""

    live: int  # in all storages made by the trace
    gradients: int  # of the leaves that have committed by now


class Timeline(TorchDispatchMode):
    """Count of the bytes that operations make on one device, after each of them.

    Storages that existed before are not counted.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        device: torch.device,
        mode: FakeTensorMode,
        count: Callable[[Any, Any, Any, Any], int] | None = None,
        *,
        values: Values | None = None,
        any_value: bool = False,
    ) -> None:
        """Start with nothing counted.

        Args:
            device: its memory is counted.
            mode: that of the fakes.
            count: gives the work of an operation.
            values: the values of fakes that are known.
            any_value: a value that is read is 1: no value changes what the traced code allocates.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.points: list[Point] = []
        self.operations: list[Any] = []
        self._device = device
        self._mode = mode
        self._converted: list[Tensor] = []  # fakes of real tensors, for as long as they count
        self.gradients = 0  # bytes of the gradients made so far
        self._leaves: set[int] = set()  # ids of the leaves that have one
        self._storages = LiveStorages()
        self.elsewhere = False  # storages made now are in other memory
        self.flops = 0  # of matmuls and convolutions, if they are counted
        self._count = count
        self._values = values
        self._any_value = any_value

    @property
    def live(self) -> int:
        """Bytes in live storages that the trace has made."""
        return self._storages.settled()

    def committed(self, leaf: Tensor) -> None:
        """Note that a leaf has its gradient; a hook of the leaf."""
        if leaf.grad is not None and leaf.device == self._device and id(leaf) not in self._leaves:
            self._leaves.add(id(leaf))
            self.gradients += leaf.grad.untyped_storage().nbytes()

    def note(self) -> None:
        """Note the bytes of this moment."""
        self.points.append(Point(self.live, self.gradients))

    def _admit(self, value: Any, *, made: bool) -> None:
        if isinstance(value, Tensor):
            if value.device != self._device:
                return
            if type(value) in (Tensor, torch.nn.Parameter):
                # what the mode puts in its place, so that a view of it is no new memory
                value = self._mode.fake_tensor_converter.from_real_tensor(self._mode, value)
                self._converted.append(value)
            if value.layout is not torch.strided:
                raise SparseError("sparse=False has a plan")
            storage = value.untyped_storage()
            if self._storages.counted(storage) is None:
                self._storages.count(storage, storage.nbytes() if made else 0)
        elif isinstance(value, list | tuple):
            for each in value:
                self._admit(each, made=made)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE:  # more frequent than all other operations together
            return args[0].device
        if func is _READ and self._any_value and args[0].constant is None:
            return 1.0 if args[0].dtype.is_floating_point else 1
        self._admit(args, made=False)
        out = None if self._values is None else self._values.of(func, args, kwargs)
        if out is None:
            out = _with_storage(func, args, _run(func, args, kwargs))
            if self._values is not None:
                self._values.follow(func, args, kwargs, out)
        self._admit(out, made=not self.elsewhere)
        # a query makes nothing, and does not run every time
        if isinstance(out, Tensor | tuple | list):
            self.operations.append(func)
            self.note()
            if self._count is not None:
                self.flops += self._count(func, args, kwargs, out)
        if len(self.points) > MOST_OPERATIONS:
            raise TooLong(f"it has more than {MOST_OPERATIONS} operations")
        return out


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    if func is not _GROUPED:
        return func(*args, **(kwargs or {}))
    # torch's fake of products in groups takes bfloat16 alone; its kernels take more
    a, b = args[:2]
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        ends = args[2] if len(args) > 2 else (kwargs or {})["offs"]
        shape.insert(0, a.shape[0] if a.dim() == 3 else ends.shape[0])
    return a.new_empty(shape)


def _with_storage(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Return a fake result with the storage that the real kernel would give it."""
    if func is _LSTM and args[15]:  # in training mode it keeps a workspace
        raise OpaqueKernelError("torch.backends.mkldnn.enabled = False makes it plain operations")
    if func is _MSE and args[2:] != (_NO_REDUCTION,):
        # the mean lies in the storage of the elements that it is the mean of
        return (args[0] - args[1]).as_strided((), ())
    return out
