"""The figures of a runtime: its sizes, errors, memory and progress, for people and programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from elastic_mbs.controller.size_model import SizeModel
from elastic_mbs.doors.calls import Calls
from elastic_mbs.doors.disabled import DisabledCalls
from elastic_mbs.engine.outcome.result import Stats, StepResult
from elastic_mbs.engine.shared.knowledge import Knowledge
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.shared.running import running_call
from elastic_mbs.errors import MisuseError, UsageError
from elastic_mbs.events import format_bytes
from elastic_mbs.memory import Headroom, Reading
from elastic_mbs.rehearsal.rehearsal import Rehearsal
from elastic_mbs.sinks.notebook import memory_bar, runtime_html, sentence
from elastic_mbs.sinks.progress import progress_bar


class RuntimeFigures:
    """The part of `ElasticMBS` that tells of its calls and changes none of them.

    Attributes:
        enabled: False makes each call a plain pass over the whole batch.
    """

    enabled: bool
    _resources: Resources
    _knowledge: Knowledge
    _calls: Calls | DisabledCalls
    _rehearsal: Rehearsal

    def __repr__(self) -> str:
        """Return name, model, size, errors and headroom, without a new memory reading."""
        settings = self._resources.settings
        models = ", ".join(type(root).__name__ for root in self._resources.model.roots)
        head = f"ElasticMBS {settings.name!r} of {models}"
        if not self.enabled:
            return f"<{head}: disabled>"
        last = self.last_result
        size = settings.micro_batch_size if last is None else last.micro_batch_size
        return f"<{head}: {self.stats.calls} calls, micro-batch {size}, {self._progress()}>"

    def _repr_html_(self) -> str:
        """Return a notebook's view: the sizes of the last calls, their errors, and memory."""
        stats = self.stats
        facts = {
            "calls": stats.calls,
            "samples": stats.samples,
            "out of memory": stats.ooms,
            "replayed samples": stats.replayed_samples,
        }
        memory = _memory_html(self._resources.monitor.cached())
        return runtime_html(repr(self).strip("<>"), facts, self._calls.history, memory)

    def progress(self, iterable: Iterable[Any] | None = None, /, **options: Any) -> Any:
        """Return a `tqdm` progress bar with micro-batch, out-of-memory errors and headroom.

        ```python
        for batch in mbs.progress(loader):
            mbs.backward(loss_fn, batch)
        ```

        Needs `pip install 'elastic-mbs[progress]'`. The figures are read when the bar is drawn,
        and cost a step nothing.

        Args:
            iterable: as for `tqdm`.
            **options: passed on to `tqdm`.

        Raises:
            UsageError: tqdm is not installed.
        """

        def postfix() -> str:
            last = self.last_result
            size = [] if last is None else [f"micro-batch {last.micro_batch_size}"]
            return ", ".join([*size, self._progress()])

        return progress_bar(iterable, postfix, options)

    def _progress(self) -> str:
        """Return the errors survived and the headroom, where it is known, in words."""
        ooms = self._calls.stats.ooms
        seen = self._resources.monitor.cached()
        free = f", {format_bytes(seen.free)} free" if isinstance(seen, Headroom) else ""
        return f"{ooms} OOM{'s' * (ooms != 1)}{free}"

    def state_dict(self) -> dict[str, object]:
        """Return what was learned of sizes and memory, as JSON; save it with the optimizer's."""
        return {"version": 1, "controller": self._knowledge.controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what another run has learned.

        Raises:
            MisuseError: a batch runs, or was left early.
            UsageError: the state is malformed or of another version; nothing has changed.
        """
        self._calls.check_complete()
        if running_call() is not None:
            raise MisuseError(
                "load_state_dict() ran while a batch runs, whose sizes it would replace: load "
                "between two batches"
            )
        if not (
            isinstance(state, Mapping)
            and state.get("version") == 1
            and isinstance(state.get("controller"), dict)
        ):
            raise UsageError(
                f"this is no state of ElasticMBS version 1: {str(state)[:80]!r}; start without "
                "it, sizes are learned again"
            )
        self._knowledge.controller.load_state_dict(state["controller"])

    @property
    def last_result(self) -> StepResult | None:
        """The result of the latest training call."""
        return self._calls.last_result

    @property
    def size_models(self) -> dict[str, SizeModel]:
        """Peak memory and time as functions of the micro-batch, as far as they are known.

        There is one for each kind of call: by function, mode and shape class.
        """
        return self._knowledge.controller.models()

    @property
    def speeds(self) -> tuple[float, ...]:
        """Samples per second of each rank in its last call, without its waits for the others.

        The same on every rank. 0 where it is not known yet: on CUDA it is that of one or two calls
        before. Empty for one process, and before the first call.
        """
        return self._resources.peers.speeds

    @property
    def stats(self) -> Stats:
        """The totals over all calls so far, as a copy."""
        stats = self._calls.stats
        return replace(stats, sizes=dict(stats.sizes))

    @property
    def total(self) -> Any:
        """The counts of the batch that is running, for a `loss_fn` that normalises by itself.

        A number, or a dict where losses have names. Of all ranks' batches for a sum and for losses
        with names, else of this process's.
        """
        for total in (self._calls.total, self._rehearsal.total):
            if total is not None:
                return total
        raise UsageError("mbs.total is known only while a batch runs: read it inside loss_fn")

    @property
    def headroom(self) -> Reading:
        """The latest memory reading."""
        return self._resources.monitor.latest()


def _memory_html(seen: Reading) -> str:
    if isinstance(seen, Headroom):
        return memory_bar(seen.held_by_others, seen.capacity - seen.free, seen.free)
    return sentence(seen.in_words())
