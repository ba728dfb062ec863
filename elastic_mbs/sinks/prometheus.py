"""The sink for Prometheus: a textfile for node_exporter's collector."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_mbs.error_bases import UsageError
from elastic_mbs.events import Event, GuardedSink, SensorBack, SensorLost


@dataclass(frozen=True)
class Metric:
    """A metric, and the events that it is made from.

    Attributes:
        help: one sentence for people.
        labels: names of its labels besides the runtime's name; they are fields of the events.
        events: class names of the events that change it; empty where `_take` sets it by itself.
        value: field of the events that is its value; empty where the events are counted.
    """

    help: str
    labels: tuple[str, ...] = ()
    events: tuple[str, ...] = ("CallDone",)
    value: str = ""


# By name. A name that ends in "_total" is a counter, to which values add up; others are gauges.
METRICS = {
    "calls_total": Metric("Calls that finished.", ("mode",)),
    "samples_total": Metric("Samples in calls that finished.", ("mode",), value="samples"),
    "out_of_memory_total": Metric(
        "Out-of-memory errors.", ("phase", "kind"), ("OutOfMemory", "OptimizerOutOfMemory")
    ),
    "replayed_samples_total": Metric(
        "Samples that were run again.", ("mode",), value="replayed_samples"
    ),
    "seconds_total": Metric("Time of calls that finished.", ("mode",), value="seconds"),
    "lost_seconds_total": Metric(
        "Time in attempts that ran out of memory.", ("mode",), value="seconds_lost"
    ),
    "resizes_total": Metric(
        "Changes of the micro-batch size between calls.", ("reason",), ("Resized",)
    ),
    "waits_total": Metric("Waits for others to free memory.", events=("WaitingForMemory",)),
    "warnings_total": Metric("Warnings about probable mistakes.", events=("Warned",)),
    "micro_batch_size": Metric(
        "Micro-batch size in samples when the last call ended.", ("key",), value="micro_batch_size"
    ),
    "samples_per_second": Metric("Throughput of the last call.", ("mode",), value="rate"),
    "loss": Metric("Loss of the last training call.", value="loss"),
    "memory_allocated_bytes": Metric(
        "Bytes in live tensors when the last call ended.", value="allocated"
    ),
    "memory_reserved_bytes": Metric(
        "Bytes that the allocator held when the last call ended.", value="reserved"
    ),
    "memory_free_bytes": Metric("Bytes that the process could still get.", value="free"),
    "memory_held_by_others_bytes": Metric(
        "Bytes that the process cannot get because others have them.", value="held_by_others"
    ),
    "memory_total_bytes": Metric("Bytes that the device has.", value="total"),
    "memory_readable": Metric(
        "1 while there are memory readings, 0 while there are none.", events=()
    ),
    "last_event_timestamp_seconds": Metric("Unix time of the last event.", events=()),
}


class PrometheusTextfile(GuardedSink):
    """A sink that keeps a file for the textfile collector of Prometheus' node_exporter.

    Needs `pip install 'elastic-mbs[prometheus]'`.

    The file is replaced as a whole. Counters begin at zero with the process; each process needs a
    file of its own.

    Args:
        path: the file; the collector reads names that end in ".prom".
        every: least seconds between two writes. Events in between are written with the next one
            after them, or when the runtime is closed.
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
        problem = _problem_with(self.path, every, self._labels)
        if problem is not None:
            raise UsageError(f"PrometheusTextfile({os.fspath(path)!r}): {problem}")
        self._every = every
        self._values: dict[str, dict[tuple[str, ...], float]] = {}  # by metric and label values
        self._written = -math.inf  # when, by the monotonic clock
        self._waiting = False  # events that are not written yet

    def __repr__(self) -> str:
        return f"PrometheusTextfile({str(self.path)!r})"

    def text(self) -> str:
        """Return the file's contents as of now, in the text format of Prometheus."""
        return str(self._client.generate_latest(self).decode())

    def collect(self) -> Iterator[Any]:
        """Yield the metrics as prometheus_client reads them."""
        core = self._client.core
        for name, samples in self._values.items():
            metric = METRICS[name]
            make = core.CounterMetricFamily if name.endswith("_total") else core.GaugeMetricFamily
            labels = [*self._labels, "name", *metric.labels]
            family = make(f"elastic_mbs_{name}", metric.help, labels=labels)
            for values, number in samples.items():
                family.add_metric([*self._labels.values(), *values], number)
            yield family

    def _take(self, event: Event) -> None:
        for name, metric in METRICS.items():
            if type(event).__name__ in metric.events:
                self._put(name, event, getattr(event, metric.value) if metric.value else 1)
        self._put("last_event_timestamp_seconds", event, time.time())
        if isinstance(event, SensorLost | SensorBack):
            self._put("memory_readable", event, isinstance(event, SensorBack))
        self._waiting = True
        if time.monotonic() - self._written >= self._every:
            self._end()

    def _end(self) -> None:
        if self._waiting:
            # Set before the write, which can fail: a full disk is not tried at every step.
            self._written = time.monotonic()
            self._client.write_to_textfile(str(self.path), self)
            self._waiting = False

    def _put(self, name: str, event: Event, value: float | None) -> None:
        """Set a gauge, or add to a counter; None is no value."""
        if value is None:
            return
        # The failures of an optimizer have no phase: that label is "optimizer".
        labels = tuple(
            str(getattr(event, label, "optimizer")) for label in ("name", *METRICS[name].labels)
        )
        samples = self._values.setdefault(name, {})
        if name.endswith("_total"):
            value += samples.get(labels, 0)
        samples[labels] = value


def _problem_with(path: Path, every: float, labels: Mapping[str, str]) -> str | None:
    """Return the first problem with the arguments of a textfile; None where there is none."""
    if path.suffix != ".prom":
        return "node_exporter reads names that end in .prom only; name it so"
    if not path.parent.is_dir():
        return f"there is no folder {str(path.parent)!r}"
    if not 0 <= every < math.inf:
        return f"every={every!r} is not a finite number of seconds of at least 0"
    ours = {"name"}.union(*(metric.labels for metric in METRICS.values()))
    bad = [
        label
        for label in labels
        if label in ours or not re.fullmatch(r"(?!__)[a-zA-Z_]\w*", label, re.ASCII)
    ]
    if bad:
        return f"{bad} cannot be labels here: letters, digits and _, and none of our own names"
    return None
