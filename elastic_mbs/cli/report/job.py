"""A job of several ranks as one run of a report: their logs, put together on one time axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from elastic_mbs.cli.report.data import Memory, RunData, read_run, tiles_of
from elastic_mbs.cli.report.scale import Point
from elastic_mbs.sinks.log_reader import Run, Totals


def by_job(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in order, those of the ranks of one job together."""
    found: dict[object, list[Run]] = {}
    for run in runs:
        found.setdefault(run.header.get("job", run.id), []).append(run)
    return [sorted(job, key=_rank) for job in found.values()]


def read_job(runs: Sequence[Run]) -> RunData:
    """Return the runs of a job's ranks as one, or the only run."""
    if len(runs) == 1:
        return read_run(runs[0])
    began = min(_began(run) for run in runs)
    ranks = {
        f"rank {_rank(run)}": _later(read_run(run), _began(run) - began, f"rank {_rank(run)}")
        for run in runs
    }
    first, *_ = ranks.values()
    sizes = {key: line for each in ranks.values() for key, line in each.sizes.items()}
    totals = _added(runs)
    present = ", ".join(str(_rank(run)) for run in runs)
    about = dict(first.about) | {"ranks": f"{present} of {runs[0].header.get('ranks', '?')}"}
    del about["run"]
    return replace(
        first,
        about=tuple(about.items()),
        tiles=tiles_of(totals, [], sizes),
        seconds=max(each.seconds for each in ranks.values()),
        sizes=sizes,
        rates={f"{mode}, {name}": line for name, mode, line in _rates(ranks)},
        marks=sorted(
            (mark for each in ranks.values() for mark in each.marks), key=lambda mark: mark.t
        ),
        events=sum(each.events for each in ranks.values()),
        ranks=ranks,
    )


def _rank(run: Run) -> int:
    rank = run.header.get("rank")
    return rank if isinstance(rank, int) else 0


def _began(run: Run) -> float:
    time = run.header.get("time")
    return float(time) if isinstance(time, int | float) else 0.0


def _rates(ranks: Mapping[str, RunData]) -> Iterator[tuple[str, str, Sequence[Point]]]:
    for name, run in ranks.items():
        for mode, line in run.rates.items():
            yield name, mode, line


def _later(run: RunData, seconds: float, name: str) -> RunData:
    """Return a rank's run on the time axis of the job, with its name on all that is its own."""

    def moved(points: Sequence[Point]) -> list[Point]:
        return [(t + seconds, value) for t, value in points]

    memory = run.memory
    return replace(
        run,
        seconds=run.seconds + seconds,
        memory=Memory(
            total=memory.total,
            allocated=moved(memory.allocated),
            reserved=moved(memory.reserved),
            peak=moved(memory.peak),
            capacity=moved(memory.capacity),
            margin=moved(memory.margin),
        ),
        sizes={f"{name}, {key}": moved(line) for key, line in run.sizes.items()},
        rates={mode: moved(line) for mode, line in run.rates.items()},
        lost=moved(run.lost),
        loss=moved(run.loss),
        marks=[
            replace(
                mark,
                t=mark.t + seconds,
                title=f"{name}: {mark.title}",
                line=f"{name}: {mark.line}",
                key=mark.key and f"{name}, {mark.key}",
            )
            for mark in run.marks
        ],
    )


def _added(runs: Sequence[Run]) -> Totals:
    """Return the sums over all ranks; calls and their time are those of the longest rank."""
    every = [run.totals for run in runs]
    events = Counter[str]()
    for each in every:
        events.update(each.events)
    modes = {mode for each in every for mode in each.least}
    return Totals(
        calls=max(each.calls for each in every),
        evaluations=max(each.evaluations for each in every),
        samples=sum(each.samples for each in every),
        replayed=sum(each.replayed for each in every),
        survived=sum(each.survived for each in every),
        seconds=max(each.seconds for each in every),
        ended_seconds=sum(each.ended_seconds for each in every),
        lost=sum(each.lost for each in every),
        peak=max((each.peak for each in every if each.peak is not None), default=None),
        sizes={_key(run, key): size for run in runs for key, size in run.totals.sizes.items()},
        modes={_key(run, key): mode for run in runs for key, mode in run.totals.modes.items()},
        least={mode: min(t.least[mode] for t in every if mode in t.least) for mode in modes},
        most={mode: max(t.most[mode] for t in every if mode in t.most) for mode in modes},
        events=dict(events),
    )


def _key(run: Run, key: str) -> str:
    return f"rank {_rank(run)}, {key}"
