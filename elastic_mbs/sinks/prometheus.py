"""A sink that writes a textfile for Prometheus."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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

_METRICS: dict[str, tuple[str, str]] = {  # counters end in "_total", all others are gauges; the labels after "name"
    "calls_total": ("Calls that finished.", "mode"),
    "samples_total": ("Samples in calls that finished.", "mode"),
    "out_of_memory_total": ("Out-of-memory errors.", "phase kind"),
    "replayed_samples_total": ("Samples that were run again.", "mode"),
    "seconds_total": ("Time of calls that finished.", "mode"),
    "lost_seconds_total": ("Time in attempts that ran out of memory.", "mode"),
    "resizes_total": ("Changes of the micro-batch size between calls.", "reason"),
    "waits_total": ("Waits for others to free memory.", ""),
    "warnings_total": ("Warnings about probable mistakes.", ""),
    "micro_batch_size": ("Micro-batch size in samples.", "key"),
    "samples_per_second": ("Throughput of the last call.", "mode"),
    "loss": ("Loss of the last training call.", ""),
    "memory_allocated_bytes": ("Bytes in live tensors when the last call ended.", ""),
    "memory_reserved_bytes": ("Bytes that the allocator held when the last call ended.", ""),
    "memory_free_bytes": ("Bytes that the process could still get.", ""),
    "memory_held_by_others_bytes": ("Bytes that the process cannot get because others have them.", ""),
    "memory_total_bytes": ("Bytes that the device has.", ""),
    "memory_readable": ("1 while there are memory readings, 0 while there are none.", ""),
    "last_event_timestamp_seconds": ("Unix time of the last event.", ""),
}
_OWN_LABELS = {"name"}.union(*(labels.split() for _, labels in _METRICS.values()))


class PrometheusTextfile(GuardedSink):
    """Keeps a file for the textfile collector of Prometheus' node_exporter. Needs `pip install 'elastic-mbs[prometheus]'`.

    The file is replaced as a whole, so that no reader finds half of it. Counters begin at zero with the process.

    Args:
        path: the file; the collector reads names that end in ".prom".
        every: least seconds between two writes. What comes in between is written with the next event after them, or when the runtime is closed.
        labels: added to every sample, such as `{"rank": "0"}`; each process needs a file of its own.
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
        self._client = _client()
        self.path = Path(path).absolute()
        if self.path.suffix != ".prom":
            raise UsageError(f"PrometheusTextfile({os.fspath(path)!r}): node_exporter reads names that end in .prom only; name it so")
        if not self.path.parent.is_dir() or self.path.is_dir():
            what = "this is a folder" if self.path.is_dir() else f"there is no folder {str(self.path.parent)!r}"
            raise UsageError(f"PrometheusTextfile({os.fspath(path)!r}): {what}")
        if isinstance(every, bool) or not isinstance(every, int | float) or not 0 <= every < math.inf:
            raise UsageError(f"PrometheusTextfile(every={every!r}) is not a finite number of seconds of at least 0")
        self._labels = {label: str(value) for label, value in (labels or {}).items()}
        for label in self._labels:
            if not re.fullmatch(r"(?!__)[a-zA-Z_]\w*", label, re.ASCII) or label in _OWN_LABELS:
                raise UsageError(
                    f"PrometheusTextfile(labels=...): {label!r} cannot be a label here: letters, digits and _, and none of our own names"
                )
        self._every, self._clock, self._wall = every, clock, wall
        self._size_readers: dict[str, SizeReader] = {}
        self._values: dict[str, dict[tuple[str, ...], float]] = {metric: {} for metric in _METRICS}
        self._written = -math.inf
        self._waiting = False

    def __repr__(self) -> str:
        return f"PrometheusTextfile({str(self.path)!r})"

    def text(self) -> str:
        """The file's contents as of now, in the text format of Prometheus."""
        return str(self._client.generate_latest(self).decode())

    def collect(self) -> Iterator[Any]:
        """The metrics as prometheus_client has them: the sink may be registered in a `CollectorRegistry`, too."""
        families = self._client.core.CounterMetricFamily, self._client.core.GaugeMetricFamily
        for metric, samples in self._values.items():
            text, labels = _METRICS[metric]
            family = families[not metric.endswith("_total")](f"elastic_mbs_{metric}", text, labels=[*self._labels, "name", *labels.split()])
            for values, number in samples.items():
                family.add_metric([*self._labels.values(), *values], number)
            if samples:
                yield family

    def _take(self, event: Event) -> None:
        self._count(event)
        self._set("last_event_timestamp_seconds", self._wall(), event.name)
        self._waiting = True
        if self._clock() - self._written >= self._every:
            self._end()

    def _end(self) -> None:
        if self._waiting:
            self._written = self._clock()  # also where it fails: a full disk is not tried at every step
            self._client.write_to_textfile(str(self.path), self)
            self._waiting = False

    def _count(self, event: Event) -> None:
        name = event.name
        size = self._size_readers.setdefault(name, SizeReader()).read(event)
        if size is not None:
            self._set("micro_batch_size", size[1], name, size[0])
        if isinstance(event, CallDone):
            self._count_call(event)
        elif isinstance(event, OutOfMemory | OptimizerOutOfMemory):
            self._add("out_of_memory_total", 1, name, event.phase if isinstance(event, OutOfMemory) else "optimizer", event.kind)
        elif isinstance(event, Resized):
            self._add("resizes_total", 1, name, event.reason)
        elif isinstance(event, WaitingForMemory):
            self._add("waits_total", 1, name)
        elif isinstance(event, Warned):
            self._add("warnings_total", 1, name)
        elif isinstance(event, SensorLost | SensorBack):
            self._set("memory_readable", isinstance(event, SensorBack), name)

    def _count_call(self, call: CallDone) -> None:
        name, mode = call.name, call.mode
        self._add("calls_total", 1, name, mode)
        self._add("samples_total", call.samples, name, mode)
        self._add("replayed_samples_total", call.replayed_samples, name, mode)
        self._add("seconds_total", call.seconds or 0.0, name, mode)
        self._add("lost_seconds_total", call.seconds_lost, name, mode)
        self._set("samples_per_second", call.rate, name, mode)
        self._set("loss", call.loss, name)
        for metric in ("allocated", "reserved", "free", "held_by_others", "total"):
            self._set(f"memory_{metric}_bytes", getattr(call, metric), name)

    def _add(self, metric: str, value: float, *labels: str) -> None:
        samples = self._values[metric]
        samples[labels] = samples.get(labels, 0) + value

    def _set(self, metric: str, value: float | None, *labels: str) -> None:
        if value is not None:
            self._values[metric][labels] = value


def _client() -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise UsageError("PrometheusTextfile needs prometheus_client, which is not installed: pip install elastic-mbs[prometheus]") from error
    return prometheus_client
