"""A sink that writes a textfile for Prometheus."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

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

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_PREFIX = "elastic_mbs_"
_METRICS: dict[str, tuple[str, str]] = {
    "calls_total": ("counter", "Calls that finished."),
    "samples_total": ("counter", "Samples in calls that finished."),
    "out_of_memory_total": ("counter", "Out-of-memory errors."),
    "replayed_samples_total": ("counter", "Samples that were run again."),
    "seconds_total": ("counter", "Time of calls that finished."),
    "lost_seconds_total": ("counter", "Time in attempts that ran out of memory."),
    "resizes_total": ("counter", "Changes of the micro-batch size between calls."),
    "waits_total": ("counter", "Waits for others to free memory."),
    "warnings_total": ("counter", "Warnings about probable mistakes."),
    "micro_batch_size": ("gauge", "Micro-batch size in samples."),
    "samples_per_second": ("gauge", "Throughput of the last call."),
    "loss": ("gauge", "Loss of the last training call."),
    "memory_allocated_bytes": ("gauge", "Bytes in live tensors when the last call ended."),
    "memory_reserved_bytes": ("gauge", "Bytes that the allocator held when the last call ended."),
    "memory_free_bytes": ("gauge", "Bytes that the process could still get."),
    "memory_held_by_others_bytes": ("gauge", "Bytes that the process cannot get because others have them."),
    "memory_total_bytes": ("gauge", "Bytes that the device has."),
    "memory_readable": ("gauge", "1 while there are memory readings, 0 while there are none."),
    "last_event_timestamp_seconds": ("gauge", "Unix time of the last event."),
}
Labels = tuple[tuple[str, str], ...]


class PrometheusTextfile(GuardedSink):
    """Keeps a file for the textfile collector of Prometheus' node_exporter.

    The file is replaced as a whole, so that nobody reads half of it. Counters begin at zero with the process.

    Args:
        path: the file; the collector reads names that end in ".prom".
        every: least seconds between two writes. What comes in between is written with the next event after them, or when the runtime is closed.
        labels: added to every sample, such as `{"rank": "0"}`; each process needs a file of its own.
        clock: monotonic seconds.
        wall: unix seconds.

    Raises:
        UsageError: an argument makes no sense.
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
        self.path = Path(path).absolute()
        if self.path.suffix != ".prom":
            raise UsageError(f"PrometheusTextfile({os.fspath(path)!r}): node_exporter reads names that end in .prom only; name it so")
        if not self.path.parent.is_dir() or self.path.is_dir():
            what = "this is a folder" if self.path.is_dir() else f"there is no folder {str(self.path.parent)!r}"
            raise UsageError(f"PrometheusTextfile({os.fspath(path)!r}): {what}")
        if isinstance(every, bool) or not isinstance(every, int | float) or not 0 <= every < math.inf:
            raise UsageError(f"PrometheusTextfile(every={every!r}) is not a finite number of seconds of at least 0")
        for label in labels or {}:
            if not _LABEL.fullmatch(label) or label.startswith("__") or label in {"name", "key", "mode", "kind", "phase", "reason"}:
                raise UsageError(
                    f"PrometheusTextfile(labels=...): {label!r} cannot be a label here: letters, digits and _, and none of our own names"
                )
        self._every, self._clock, self._wall = every, clock, wall
        self._labels: Labels = tuple((label, str(value)) for label, value in (labels or {}).items())
        self._size_readers: dict[str, SizeReader] = {}
        self._values: dict[str, dict[Labels, float]] = {}
        self._written: float | None = None
        self._waiting = False

    def __repr__(self) -> str:
        return f"PrometheusTextfile({str(self.path)!r})"

    def text(self) -> str:
        """The file's contents as of now, in the text format of Prometheus."""
        lines = []
        for metric, (kind, text) in _METRICS.items():
            samples = self._values.get(metric)
            if samples:
                lines += [f"# HELP {_PREFIX}{metric} {text}", f"# TYPE {_PREFIX}{metric} {kind}"]
                lines += [f"{_PREFIX}{metric}{_braces(labels)} {_value(value)}" for labels, value in samples.items()]
        return "".join(f"{line}\n" for line in lines)

    def _take(self, event: Event) -> None:
        self._count(event)
        self._set("last_event_timestamp_seconds", self._wall(), name=event.name)
        self._waiting = True
        if self._written is None or self._clock() - self._written >= self._every:
            self._end()

    def _end(self) -> None:
        if not self._waiting:
            return
        self._written = self._clock()  # also where it fails: a full disk is not asked at every step
        self._waiting = False
        beside = self.path.with_name(f".{self.path.name}.{self._pid}.tmp")  # the collector passes over it
        try:
            beside.write_text(self.text(), encoding="utf-8")
            beside.replace(self.path)
        except OSError:
            self._waiting = True
            beside.unlink(missing_ok=True)
            raise

    def _count(self, event: Event) -> None:
        name = event.name
        size = self._size_readers.setdefault(name, SizeReader()).read(event)
        if size is not None:
            self._set("micro_batch_size", size[1], name=name, key=size[0])
        if isinstance(event, CallDone):
            self._count_call(event)
        elif isinstance(event, OutOfMemory):
            self._add("out_of_memory_total", 1, name=name, phase=event.phase, kind=event.kind)
        elif isinstance(event, OptimizerOutOfMemory):
            self._add("out_of_memory_total", 1, name=name, phase="optimizer", kind=event.kind)
        elif isinstance(event, Resized):
            self._add("resizes_total", 1, name=name, reason=event.reason)
        elif isinstance(event, WaitingForMemory):
            self._add("waits_total", 1, name=name)
        elif isinstance(event, Warned):
            self._add("warnings_total", 1, name=name)
        elif isinstance(event, SensorLost | SensorBack):
            self._set("memory_readable", float(isinstance(event, SensorBack)), name=name)

    def _count_call(self, call: CallDone) -> None:
        name, mode = call.name, call.mode
        self._add("calls_total", 1, name=name, mode=mode)
        self._add("samples_total", call.samples, name=name, mode=mode)
        self._add("replayed_samples_total", call.replayed_samples, name=name, mode=mode)
        self._add("seconds_total", call.seconds or 0.0, name=name, mode=mode)
        self._add("lost_seconds_total", call.seconds_lost, name=name, mode=mode)
        self._set("samples_per_second", call.rate, name=name, mode=mode)
        self._set("loss", call.loss, name=name)
        for metric in ("allocated", "reserved", "free", "held_by_others", "total"):
            self._set(f"memory_{metric}_bytes", getattr(call, metric), name=name)

    def _add(self, metric: str, value: float, **labels: str) -> None:
        samples = self._values.setdefault(metric, {})
        key = (*self._labels, *labels.items())
        samples[key] = samples.get(key, 0) + value

    def _set(self, metric: str, value: float | None, **labels: str) -> None:
        if value is not None:
            self._values.setdefault(metric, {})[(*self._labels, *labels.items())] = value


def _braces(labels: Labels) -> str:
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels)
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
