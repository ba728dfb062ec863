"""A sink that writes a textfile for Prometheus."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_mbs.errors import UsageError
from elastic_mbs.events import Event, GuardedSink, SensorBack, SensorLost

# name: help, labels besides the runtime's name (fields of the event), events that have a value for
# it (none where `_take` sets it), and the field that is the value (where it is empty, the events
# are counted). A name that ends in "_total" is a counter, to which values add up; others are
# gauges.
_METRICS: dict[str, tuple[str, str, str, str]] = {
    "calls_total": ("Calls that finished.", "mode", "CallDone", ""),
    "samples_total": ("Samples in calls that finished.", "mode", "CallDone", "samples"),
    "out_of_memory_total": (
        "Out-of-memory errors.",
        "phase kind",
        "OutOfMemory OptimizerOutOfMemory",
        "",
    ),
    "replayed_samples_total": (
        "Samples that were run again.",
        "mode",
        "CallDone",
        "replayed_samples",
    ),
    "seconds_total": ("Time of calls that finished.", "mode", "CallDone", "seconds"),
    "lost_seconds_total": (
        "Time in attempts that ran out of memory.",
        "mode",
        "CallDone",
        "seconds_lost",
    ),
    "resizes_total": ("Changes of the micro-batch size between calls.", "reason", "Resized", ""),
    "waits_total": ("Waits for others to free memory.", "", "WaitingForMemory", ""),
    "warnings_total": ("Warnings about probable mistakes.", "", "Warned", ""),
    "micro_batch_size": (
        "Micro-batch size in samples when the last call ended.",
        "key",
        "CallDone",
        "micro_batch_size",
    ),
    "samples_per_second": ("Throughput of the last call.", "mode", "CallDone", "rate"),
    "loss": ("Loss of the last training call.", "", "CallDone", "loss"),
    "memory_allocated_bytes": (
        "Bytes in live tensors when the last call ended.",
        "",
        "CallDone",
        "allocated",
    ),
    "memory_reserved_bytes": (
        "Bytes that the allocator held when the last call ended.",
        "",
        "CallDone",
        "reserved",
    ),
    "memory_free_bytes": ("Bytes that the process could still get.", "", "CallDone", "free"),
    "memory_held_by_others_bytes": (
        "Bytes that the process cannot get because others have them.",
        "",
        "CallDone",
        "held_by_others",
    ),
    "memory_total_bytes": ("Bytes that the device has.", "", "CallDone", "total"),
    "memory_readable": ("1 while there are memory readings, 0 while there are none.", "", "", ""),
    "last_event_timestamp_seconds": ("Unix time of the last event.", "", "", ""),
}


class PrometheusTextfile(GuardedSink):
    """Keeps a file for the textfile collector of Prometheus' node_exporter.

    Needs `pip install 'elastic-mbs[prometheus]'`.

    The file is replaced as a whole. Counters begin at zero with the process; each process needs a
    file of its own.

    Args:
        path: the file; the collector reads names that end in ".prom".
        every: least seconds between two writes. What comes in between is written with the next
            event after them, or when the runtime is closed.
        labels: added to every sample, such as `{"rank": "0"}`.

    Raises:
        UsageError: an argument makes no sense, or prometheus_client is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: float = 15.0,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        try:
            import prometheus_client.core
        except ImportError as error:
            raise UsageError(
                "PrometheusTextfile needs prometheus_client, which is not installed: pip install "
                "elastic-mbs[prometheus]"
            ) from error
        self._client = prometheus_client
        self.path = Path(path).absolute()
        self._labels = {label: str(value) for label, value in (labels or {}).items()}
        ours = {"name"}.union(*(own.split() for _, own, _, _ in _METRICS.values()))
        bad = [
            label
            for label in self._labels
            if not re.fullmatch(r"(?!__)[a-zA-Z_]\w*", label, re.ASCII) or label in ours
        ]
        problems = {
            "node_exporter reads names that end in .prom only; name it so": self.path.suffix
            != ".prom",
            f"there is no folder {str(self.path.parent)!r}": not self.path.parent.is_dir(),
            f"every={every!r} is not a finite number of seconds of at least 0": not 0
            <= every
            < math.inf,
            f"{bad} cannot be labels here: letters, digits and _, and none of our own names": bool(
                bad
            ),
        }
        for problem in (problem for problem, present in problems.items() if present):
            raise UsageError(f"PrometheusTextfile({os.fspath(path)!r}): {problem}")
        self._every = every
        self._values: dict[str, dict[tuple[str, ...], float]] = {}  # by metric and labels
        self._written = -math.inf
        self._waiting = False

    def __repr__(self) -> str:
        return f"PrometheusTextfile({str(self.path)!r})"

    def text(self) -> str:
        """The file's contents as of now, in the text format of Prometheus."""
        return str(self._client.generate_latest(self).decode())

    def collect(self) -> Iterator[Any]:
        """The metrics, as prometheus_client reads them."""
        core = self._client.core
        for name, samples in self._values.items():
            about, own, _, _ = _METRICS[name]
            make = core.CounterMetricFamily if name.endswith("_total") else core.GaugeMetricFamily
            family = make(
                f"elastic_mbs_{name}", about, labels=[*self._labels, "name", *own.split()]
            )
            for values, number in samples.items():
                family.add_metric([*self._labels.values(), *values], number)
            yield family

    def _take(self, event: Event) -> None:
        for name, (_, _, kinds, value) in _METRICS.items():
            if type(event).__name__ in kinds.split():
                self._put(name, event, getattr(event, value) if value else 1)
        self._put("last_event_timestamp_seconds", event, time.time())
        self._put(
            "memory_readable",
            event,
            isinstance(event, SensorBack) if isinstance(event, SensorLost | SensorBack) else None,
        )
        self._waiting = True
        if time.monotonic() - self._written >= self._every:
            self._end()

    def _end(self) -> None:
        if self._waiting:
            # also where it fails: a full disk is not tried at every step
            self._written = time.monotonic()
            self._client.write_to_textfile(str(self.path), self)
            self._waiting = False

    def _put(self, name: str, event: Event, value: float | None) -> None:
        if value is not None:
            # its failures have no phase
            labels = tuple(
                str(getattr(event, label, "optimizer"))
                for label in ("name", *_METRICS[name][1].split())
            )
            samples = self._values.setdefault(name, {})
            samples[labels] = value + (samples.get(labels, 0) if name.endswith("_total") else 0)
