"""The text of the demo before and after the runs, and its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from pathlib import Path

import torch

from elastic_mbs.cli.demo.compare import Outcome, Setting
from elastic_mbs.cli.demo.run import POLICY
from elastic_mbs.cli.report.data import Mark
from elastic_mbs.cli.report.job import by_job, read_job
from elastic_mbs.cli.report.page import document, section
from elastic_mbs.events import CallDone, OutOfMemory, format_bytes
from elastic_mbs.sinks.log_reader import files_of, read_log

ROWS = 12  # of the table


def introduction(setting: Setting) -> str:
    """Return the introduction: model, batch, memory, co-tenant."""
    options = setting.options
    text, dtype = (
        options.text or "Python's standard library",
        str(options.dtype).removeprefix("torch."),
    )
    where, limit = f"the CPU (threads: {torch.get_num_threads()})", "a MemoryBudget"
    if options.device.type == "cuda":  # cuda-only
        where, limit = torch.cuda.get_device_name(options.device), "a memory fraction of the device"
    return (
        f"A GPT of {sum(parameter.numel() for parameter in setting.model.parameters()):,} "
        f"parameters on {text}, {dtype} on {where}.\n"
        f"{options.steps} steps of {options.batch} documents. The whole batch at once would need "
        f"{format_bytes(setting.whole)}; "
        f"there are {format_bytes(setting.budget)} ({limit}, moved by a script).\n"
        "Growth is less patient here than by default, to be seen in a minute: patience "
        f"{POLICY.patience} calls, cooldown {POLICY.cooldown:g}.\n"
    )


def table(outcome: Outcome) -> str:
    """Return both loss curves side by side, in about a dozen rows at most."""
    results, differences = outcome.notes.results, outcome.differences
    shown = sorted({*range(0, len(results), -(-len(results) // ROWS)), len(results) - 1})
    rows = (
        f"{i + 1:4}  {results[i].micro_batch_size:11}   {float(results[i]):<18.15f}   "
        f"{outcome.reference[i]:<18.15f}   {differences[i]:.1e}"
        for i in shown
    )
    return "\n".join(
        ["step  micro-batch   loss, limited        loss, unlimited      relative difference", *rows]
    )


def summary(outcome: Outcome, setting: Setting) -> dict[str, str]:
    """Return what the run survived and its cost, as figures by name."""
    options, rounding, notes = setting.options, outcome.rounding, outcome.notes
    failures = Counter(event.phase for event in notes.events if isinstance(event, OutOfMemory))
    phases = ", ".join(f"{count} in {phase}" for phase, count in sorted(failures.items())) or "none"
    replayed, samples = (
        sum(result.replayed_samples for result in notes.results),
        options.steps * options.batch,
    )
    sizes = ", ".join(map(str, sorted({result.micro_batch_size for result in notes.results})))
    largest = max(outcome.differences)
    worst = outcome.differences.index(largest) + 1
    lost = sum(event.seconds_lost for event in notes.events if isinstance(event, CallDone))
    return {
        "largest "
        "difference": f"{largest:.1e} of the loss (step {worst}), {outcome.weight:.1e} of a "
        "weight at the end",
        "counts as "
        "rounding": f"up to {rounding.loss:.0e} of the loss, {rounding.weight:.0e} of a weight",
        "out-of-memory errors": f"{outcome.ooms} survived ({phases})",
        "samples replayed": f"{replayed} of {samples} ({replayed / samples:.1%})",
        "micro-batch sizes": f"{sizes} (of a batch of {options.batch})",
        "time lost to "
        "replays": f"{lost:.2f} s ({lost / outcome.seconds:.1%}): failed attempts, from the start "
        "of their forward until undone",
        "time": f"{outcome.seconds:.1f} s within the budget, {outcome.reference_seconds:.1f} s "
        "without limits",
    }


def verdict(outcome: Outcome) -> str:
    """Return the last line."""
    if not outcome.equal:
        return "DIFFERENT: the runs differ by more than rounding."
    if not outcome.ooms:
        return (
            "NOTHING SHOWN: no out-of-memory error happened. Give a smaller --budget, or a larger "
            "--batch."
        )
    return "EQUAL within rounding: the run that kept running out of memory trained the same model."


def page(outcome: Outcome, rows: Mapping[str, str], log: Path) -> str:
    """Return the report of the log's last run as a page.

    It has the co-tenant's moves, the losses of the run without limits, and the figures of the
    summary.
    """
    job = by_job([run for file in files_of(log) for run in read_log(file)])[-1]
    data = read_job(job)
    began = min(float(run.header["time"]) for run in job)
    left = [(at - began, move.what, format_bytes(move.left)) for at, move in outcome.notes.moves]
    moves = [
        Mark(t, "note", what, (("left for us", size),), f"{what}: {size} left for us")
        for t, what, size in left
    ]
    data = replace(
        data,
        title="The run with elastic_mbs",
        marks=sorted([*data.marks, *moves], key=lambda mark: mark.t),
        reference=[(t, loss) for (t, _), loss in zip(data.loss, outcome.reference, strict=False)],
    )
    note = "".join(
        f"<span><b>{escape(name)}</b> {escape(value)}</span>" for name, value in rows.items()
    )
    return document(
        "elastic_mbs demo",
        verdict(outcome),
        section(data, remark=data.about[0][1], opened=True, note=f'<p class="about">{note}</p>'),
    )
