"""Free memory of one GPU by NVML, co-tenants included, without a CUDA context.

A device is found by UUID because CUDA and NVML number them differently (CUDA orders by speed, and
CUDA_VISIBLE_DEVICES hides and reorders).

```
   absent ◄── no library, no driver, device unknown ── first try ──► answering ◄───────────┐
      │ asked again every ten seconds                                    │ any error        │
      ▼                                                                  ▼                  │
   as at the first try                       lost: reference given back, asked again        │
                                             every ten seconds ── it answers again ─────────┘
```

A device that NVML never knew can be read by other means. One that it *lost* is in doubt, and so are
the other figures: the driver was unloaded under the job, the GPU fell off the bus, or the container
lost its rights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic_mbs.memory.processes import Holder, holders_on

RETRY_EVERY = 10.0  # seconds from a failure to the next try
# seconds for which a list of holders is good enough: it is for messages, and costs the driver more
# than the figures
HOLDERS_EVERY = 5.0
# At the first try these mean that NVML is not there or does not serve this device, which says
# nothing bad of the device itself.
_ABSENT = (
    "LibraryNotFound",
    "DriverNotLoaded",
    "FunctionNotFound",
    "LibRmVersionMismatch",
    "NotFound",
    "InvalidArgument",
    "NoPermission",
    "NotSupported",
)


@dataclass(frozen=True)
class NoAnswer:
    """The answer of an NVML that knows nothing of the device."""

    reason: str
    lost: bool = False  # it did once, or failed in a way that puts the device itself in doubt


class NvmlDevice:
    """A GPU or MIG instance by its full UUID, without prefix.

    It is opened at the first reading and again, after a while, when it failed.
    """

    def __init__(self, uuid: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._uuid = uuid
        self._clock = clock
        self._lock = threading.Lock()
        self._initialised = False
        self._handle: Any = None
        self._answered = False
        self._failure: NoAnswer | None = None  # until NVML answers again
        self._retry_at = 0.0  # when the next try is due
        self._holders: tuple[Holder, ...] = ()
        self._holders_at: float | None = None

    def memory(self) -> int | NoAnswer:
        """Return free bytes, or why they are not known.

        Does not raise, and asks NVML only when a try is due.
        """
        with self._lock:
            if self._failure is not None and self._clock() < self._retry_at:
                return self._failure
            return self._read()

    def holders(self) -> tuple[Holder, ...]:
        """Return the other processes that have memory on the device, the biggest first.

        Does not raise: unknown is empty.
        """
        with self._lock:
            if self._handle is None:
                return ()
            now = self._clock()
            if self._holders_at is None or now - self._holders_at >= HOLDERS_EVERY:
                self._holders_at, self._holders = now, ()
                # telemetry: refused (MIG, vGPU) or garbled, it must not cost the reading
                with suppress(Exception):
                    import pynvml

                    self._holders = holders_on(pynvml, self._handle)
            return self._holders

    def _read(self) -> int | NoAnswer:
        try:
            import pynvml
        except Exception as error:
            # the deprecated package warns when it is imported, and a warning may be an error here
            return self._fail(None, f"NVML: {type(error).__name__}: {error}", absent=True)
        try:
            if self._handle is None:
                pynvml.nvmlInit()
                self._initialised = True
                self._handle = self._open(pynvml)
            info = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        except Exception as error:
            # any other type comes from a binding too old, or not NVIDIA's: that says nothing bad
            # of the device either
            absent = (
                not isinstance(error, pynvml.NVMLError)
                or type(error).__name__.removeprefix("NVMLError_") in _ABSENT
            )
            return self._fail(pynvml, f"NVML: {type(error).__name__}: {error}", absent=absent)
        if not info.total:
            return self._fail(pynvml, "NVML gives no memory figures for this device", absent=True)
        self._failure = None
        self._answered = True
        return int(info.free)

    def _fail(self, pynvml: Any, reason: str, *, absent: bool) -> NoAnswer:
        """Latch a failure, and give our reference back.

        The library looks for the driver again only when the process holds no reference.
        """
        self._failure = NoAnswer(reason, lost=self._answered or not absent)
        self._retry_at = self._clock() + RETRY_EVERY
        self._handle, self._holders, self._holders_at = None, (), None
        if self._initialised:
            self._initialised = False
            with suppress(Exception):
                pynvml.nvmlShutdown()
        return self._failure

    def _open(self, pynvml: Any) -> Any:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid}")
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{self._uuid}")
