"""A sink that writes a textfile for Prometheus."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from elastic_mbs.errors import UsageError
from elastic_mbs.events import (
    CallDone,
    Event,
    OptimizerOutOfMemory,
    OutOfMemory,
    Resized,
    SensorBack,
    SensorLost,
    SizeReader,
    WaitingForMemory,
    Warned,
)
from elastic_mbs.sinks.guarded import GuardedSink


class _Metric(NamedTuple):
    """A metric. A name that ends in "_total" is a counter, to which the values add up; any other is a gauge."""

    help: str
    labels: str  # the event's name, and these fields of it
    events: Any = ()  # the classes that have a value for it; none where `_count` sets it
    value: str = ""  # the field that is the value; without one, the events are counted


_METRICS = {
    "calls_total": _Metric("Calls that finished.", "mode", CallDone),
    "samples_total": _Metric("Samples in calls that finished.", "mode", CallDone, "samples"),
    "out_of_memory_total": _Metric("Out-of-memory errors.", "phase kind", OutOfMemory | OptimizerOutOfMemory),
    "replayed_samples_total": _Metric("Samples that were run again.", "mode", CallDone, "replayed_samples"),
    "seconds_total": _Metric("Time of calls that finished.", "mode", CallDone, "seconds"),
    "lost_seconds_total": _Metric("Time in attempts that ran out of memory.", "mode", CallDone, "seconds_lost"),
    "resizes_total": _Metric("Changes of the micro-batch size between calls.", "reason", Resized),
    "waits_total": _Metric("Waits for others to free memory.", "", WaitingForMemory),
    "warnings_total": _Metric("Warnings about probable mistakes.", "", Warned),
    "micro_batch_size": _Metric("Micro-batch size in samples.", "key"),
    "samples_per_second": _Metric("Throughput of the last call.", "mode", CallDone, "rate"),
    "loss": _Metric("Loss of the last training call.", "", CallDone, "loss"),
    "memory_allocated_bytes": _Metric("Bytes in live tensors when the last call ended.", "", CallDone, "allocated"),
    "memory_reserved_bytes": _Metric("Bytes that the allocator held when the last call ended.", "", CallDone, "reserved"),
    "memory_free_bytes": _Metric("Bytes that the process could still get.", "", CallDone, "free"),
    "memory_held_by_others_bytes": _Metric("Bytes that the process cannot get because others have them.", "", CallDone, "held_by_others"),
    "memory_total_bytes": _Metric("Bytes that the device has.", "", CallDone, "total"),
    "memory_readable": _Metric("1 while there are memory readings, 0 while there are none.", ""),
    "last_event_timestamp_seconds": _Metric("Unix time of the last event.", ""),
}
_OWN_LABELS = {"name"}.union(*(metric.labels.split() for metric in _METRICS.values()))


class PrometheusTextfile(GuardedSink):
    """Keeps a file for the textfile collector of Prometheus' node_exporter. Needs `pip install 'elastic-mbs[prometheus]'`.

    The file is replaced as a whole. Counters begin at zero with the process; each process needs a file of its own.

    Args:
        path: the file; the collector reads names that end in ".prom".
        every: least seconds between two writes. What comes in between is written with the next event after them, or when the runtime is closed.
        labels: added to every sample, such as `{"rank": "0"}`.
        clock: monotonic seconds.
        wall: unix seconds.

    Raises:
        UsageError: an argument makes no sense, or prometheus_client is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: float = 15.0,
        labels: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        try:
            import prometheus_client.core
        except ImportError as error:
            raise UsageError("PrometheusTextfile needs prometheus_client, which is not installed: pip install elastic-mbs[prometheus]") from error
        self._client = prometheus_client
        self.path = Path(path).absolute()
        self._labels = {label: str(value) for label, value in (labels or {}).items()}
        bad_labels = [label for label in self._labels if not re.fullmatch(r"(?!__)[a-zA-Z_]\w*", label, re.ASCII) or label in _OWN_LABELS]
        problems = {
            "node_exporter reads names that end in .prom only; name it so": self.path.suffix != ".prom",
            f"there is no folder {str(self.path.parent)!r}": not self.path.parent.is_dir(),
            "this is a folder": self.path.is_dir(),
            f"every={every!r} is not a finite number of seconds of at least 0": not 0 <= every < math.inf,
            f"{bad_labels} cannot be labels here: letters, digits and _, and none of our own names": bool(bad_labels),
        }
        for problem in (problem for problem, present in problems.items() if present):
            raise UsageError(f"PrometheusTextfile({os.fspath(path)!r}): {problem}")
        self._every, self._clock, self._wall = every, clock, wall
        self._size_readers: dict[str, SizeReader] = {}
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
            make = core.CounterMetricFamily if name.endswith("_total") else core.GaugeMetricFamily
            family = make(f"elastic_mbs_{name}", _METRICS[name].help, labels=[*self._labels, "name", *_METRICS[name].labels.split()])
            for values, number in samples.items():
                family.add_metric([*self._labels.values(), *values], number)
            yield family

    def _take(self, event: Event) -> None:
        self._count(event)
        self._waiting = True
        if self._clock() - self._written >= self._every:
            self._end()

    def _end(self) -> None:
        if self._waiting:
            self._written = self._clock()  # also where it fails: a full disk is not tried at every step
            self._client.write_to_textfile(str(self.path), self)
            self._waiting = False

    def _count(self, event: Event) -> None:
        for name, metric in _METRICS.items():
            if isinstance(event, metric.events):
                self._put(name, event, getattr(event, metric.value) if metric.value else 1)
        size = self._size_readers.setdefault(event.name, SizeReader()).read(event)
        self._put("micro_batch_size", event, size and size[1])
        self._put("last_event_timestamp_seconds", event, self._wall())
        if isinstance(event, SensorLost | SensorBack):
            self._put("memory_readable", event, isinstance(event, SensorBack))

    def _put(self, name: str, event: Event, value: float | None) -> None:
        if value is None:
            return
        labels = tuple(str(getattr(event, label, "optimizer")) for label in ("name", *_METRICS[name].labels.split()))  # its failures have no phase
        samples = self._values.setdefault(name, {})
        samples[labels] = value + (samples.get(labels, 0) if name.endswith("_total") else 0)
