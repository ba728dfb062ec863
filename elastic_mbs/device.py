"""Accelerators behind one class: CUDA, XPU, MPS, and every other device with a torch module.

Streams and events have one name for all of them (`torch.Stream`, `torch.Event`,
`torch.accelerator`). Everything else is looked up by the name that CUDA gave it, first in the
device's own module (`torch.get_device_module`), then in `torch.accelerator`:

```
   needed for exactness                            without it
   the default random generator                    refused (UnsupportedError)
   needed for speed and growth                     without it
   pinned memory, events, a second stream          copies to the host wait, none is made ahead
   events that tell the time                       the time of a call is not known
   figures of memory and of the allocator          no size grows
```

A device whose memory is the host's (the CPU) and one without memory (meta) are no accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from elastic_mbs.errors import UnsupportedError

BUILT_IN = frozenset({"cpu", "meta", "cuda", "xpu", "mps"})
"""Devices of torch itself: their sources were read, so nothing about them is tried out."""

_NO_ACCELERATOR = frozenset({"cpu", "meta"})
_WAY_OUT = "train on another device, or without recovery: ElasticMBS(..., enabled=False)"


class RandomStream(Protocol):
    """A random stream that can be read and put back, as `torch.Generator` can."""

    def get_state(self) -> Tensor:
        """Return the state, in host memory."""
        ...

    def set_state(self, state: Tensor, /) -> object:
        """Put the stream back to a state."""
        ...


@lru_cache(maxsize=64)
def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the accelerator that a device is, the same object each time; None for CPU and meta."""
    return None if device.type in _NO_ACCELERATOR else Accelerator(device)


def with_index(device: torch.device) -> torch.device:
    """Return the device with its index: which one is current differs from thread to thread.

    Raises:
        RuntimeError: there is no such device here. AssertionError too: CUDA's module asserts it.
    """
    accelerator = accelerator_of(device)
    if accelerator is None or device.index is not None:
        return device
    index = accelerator.current_index()
    return device if index is None else torch.device(device.type, index)


class Accelerator:
    """A device with memory and a queue of work of its own.

    Attributes:
        device: the device; without an index, the one that is current when it is used.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"Accelerator({str(self.device)!r})"

    @property
    def _module(self) -> Any:
        """The device's module in torch; None where there is none: nothing is found in it."""
        try:
            return torch.get_device_module(self.device.type)
        except RuntimeError:
            return None

    # ------------------------------------------------------------------ streams and events

    def current_stream(self) -> torch.Stream:
        """Return the stream that the calling thread queues work in."""
        return torch.accelerator.current_stream(self.device)

    def second_stream(self) -> torch.Stream | None:
        """Return a new stream for copies beside the current one; None where there is only one."""
        if not self.copies_ahead:
            return None
        try:
            stream = torch.Stream(self.device)
        except RuntimeError:
            return None
        return None if stream == self.current_stream() else stream

    def mark(self, event: torch.Event | None = None) -> torch.Event:
        """Record an event in the current stream, or record this one again."""
        if event is None:
            event = torch.Event(self.device)
        event.record(self.current_stream())
        return event

    def stamp(self) -> torch.Event | None:
        """Record an event that tells the time; None where the device has none, or is lost."""
        try:
            event = torch.Event(self.device, enable_timing=True)
            event.record(self.current_stream())
        except RuntimeError:
            return None
        return event

    def synchronize(self) -> None:
        """Wait until the device has done everything that was queued."""
        torch.accelerator.synchronize(self.device)

    def is_capturing(self) -> bool:
        """Return whether the current stream records a graph instead of running."""
        asked = self._found("is_current_stream_capturing")
        return asked is not None and bool(asked())

    # ------------------------------------------------------------------ copies to and from the host

    @cached_property
    def copies_ahead(self) -> bool:
        """True where copies between pinned memory and the device run beside the host."""
        with _disable_current_modes():  # under fake tensors nothing would be tried out
            try:
                self.mark().query()
                return torch.empty(1, pin_memory=True).is_pinned()
            except RuntimeError:
                return False

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory.

        Where `copies_ahead` holds it is in pinned memory, and there once an event that is recorded
        now has passed. Elsewhere the host waits.
        """
        if not self.copies_ahead:
            return tensor.to("cpu", copy=True)
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    # ------------------------------------------------------------------ random numbers

    @cached_property
    def random_stream(self) -> RandomStream:
        """The device's default random generator.

        Raises:
            UnsupportedError: the generator cannot be read, or not be put back.
        """
        initialise = getattr(self._module, "init", None)
        if initialise is not None:
            initialise()
        generators = getattr(self._module, "default_generators", ())
        index = self.device.index or 0
        if index < len(generators):
            stream: RandomStream = generators[index]
        else:
            stream = self._stream_by_functions()
        if self.device.type not in BUILT_IN:
            self._try_out(stream)
        return stream

    def _stream_by_functions(self) -> RandomStream:
        read = getattr(self._module, "get_rng_state", None)
        write = getattr(self._module, "set_rng_state", None)
        if read is None or write is None:
            raise self._no_stream(
                f"torch.{self.device.type} has neither default_generators nor get_rng_state and "
                "set_rng_state"
            )
        return _StreamByFunctions(self.device, read, write)

    def _try_out(self, stream: RandomStream) -> None:
        """Draw, put the stream back, and draw the same again; leave it where it was."""
        before = stream.get_state()
        if not isinstance(before, Tensor) or before.device.type != "cpu":
            raise self._no_stream(
                f"its state is a {type(before).__name__}, and not a tensor in host memory"
            )
        before = before.clone()  # it may be a view of the memory that a draw changes
        try:
            first = self._draw()
            moved = not torch.equal(stream.get_state(), before)
            stream.set_state(before)
            second = self._draw()
        except NotImplementedError as error:
            raise self._no_stream(f"it cannot draw: {error}") from error
        finally:
            stream.set_state(before)
        if not moved or first != second:
            raise self._no_stream(
                "put back to an earlier state it draws other numbers"
                if moved
                else "its state does not change when numbers are drawn"
            )

    def _draw(self) -> list[float]:
        drawn: list[float] = torch.rand(8, device=self.device).tolist()
        return drawn

    def _no_stream(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"device {str(self.device)!r}: the default random generator cannot be read and put "
            f"back ({reason}), so a replay would draw other numbers than the failed attempt. Use "
            f"a version of its package that can, or {_WAY_OUT}"
        )

    # ------------------------------------------------------------------ memory
    # A lost device raises RuntimeError. A missing figure raises UnsupportedError, a kind of it.

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device, other processes counted."""
        free, total = self._ask("mem_get_info", "get_memory_info")
        return int(free), int(total)

    def memory_reserved(self) -> int:
        """Return the bytes that torch's allocator holds of the device."""
        return int(self._ask("memory_reserved"))

    def memory_stats(self) -> Mapping[str, Any]:
        """Return the allocator's statistics in dicts of dicts, by the names that CUDA's have.

        CUDA's and XPU's are read as they are: `memory_stats` flattens them, in 5,000 steps of
        Python for each call of a runtime.
        """
        if self._found("memory_stats_as_nested_dict") is None:
            return _nested(self._ask("memory_stats"))
        stats: Mapping[str, Any] = self._ask("memory_stats_as_nested_dict")
        return stats

    def memory_fraction(self) -> float:
        """Return the share of the device that this process may take; 1 where torch cannot tell.

        CUDA's getter came with torch 2.9.
        """
        read = self._found("get_per_process_memory_fraction")
        return 1.0 if read is None else float(read(self.device))

    def reset_peaks(self) -> None:
        """Start a new interval for the allocator's peaks."""
        self._ask("reset_peak_memory_stats")

    def empty_cache(self) -> None:
        """Give unused memory of the allocator back to the device; without a cache do nothing."""
        empty = self._found("empty_cache")
        if empty is not None:
            empty()

    # ------------------------------------------------------------------ identity

    def current_index(self) -> int | None:
        """Return the index of the calling thread's current device; None where there is one only."""
        read = self._found("current_device", "current_device_index")
        return None if read is None else int(read())

    def properties(self) -> Any:
        """Return the device's properties; an object without attributes where there are none."""
        read = self._found("get_device_properties")
        return object() if read is None else read(self.device)

    def name(self) -> str:
        """Return the device and the card's name, where there is one, for a person to read."""
        read = self._found("get_device_name")
        return str(self.device) if read is None else f"{self.device} ({read(self.device)})"

    def _found(self, *names: str) -> Callable[..., Any] | None:
        """Return the first function of these names, of the module or of `torch.accelerator`."""
        module = self._module
        for name in names:
            if (function := getattr(module, name, None)) is not None:
                return cast("Callable[..., Any]", function)
        current = torch.accelerator.current_accelerator()
        if current is None or current.type != self.device.type:
            return None
        shared = (getattr(torch.accelerator, name, None) for name in names)
        return next((function for function in shared if function is not None), None)

    def _ask(self, *names: str) -> Any:
        """Return the answer of the first function of these names for this device."""
        function = self._found(*names)
        lacking = f"torch.{self.device.type} has no {names[0]}"
        if function is None:
            raise UnsupportedError(lacking)
        try:
            return function(self.device)
        except RuntimeError as error:
            if hasattr(self._module, names[0]):
                raise
            # torch.accelerator asserts in C++ that the backend has an allocator of a certain class
            raise UnsupportedError(lacking) from error


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return statistics like {"a.b": 1} as dicts of dicts."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = found
        for each in path:
            place = place.setdefault(each, {})
        place[last] = value
    return found


class _StreamByFunctions:
    """A random stream behind `get_rng_state` and `set_rng_state` of a device's module."""

    def __init__(
        self,
        device: torch.device,
        read: Callable[[torch.device], Tensor],
        write: Callable[[Tensor, torch.device], object],
    ) -> None:
        self._device = device
        self._read = read
        self._write = write

    def get_state(self) -> Tensor:
        return self._read(self._device)

    def set_state(self, state: Tensor) -> None:
        self._write(state, self._device)
