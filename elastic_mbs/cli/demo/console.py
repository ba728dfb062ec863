"""What the demo prints: a line per step and event, and the comparison at the end."""

from __future__ import annotations

from collections import Counter

import torch

from elastic_mbs.cli.demo.compare import Outcome, Setting
from elastic_mbs.cli.demo.record import Step
from elastic_mbs.cli.demo.run import POLICY
from elastic_mbs.cli.demo.tenant import Move
from elastic_mbs.events import Event, OutOfMemory, format_bytes

BAR = 24
ROWS = 12


class Lines:
    """Prints the run as it goes.

    Args:
        setting: what is run.
    """

    def __init__(self, setting: Setting) -> None:
        self._steps = setting.options.steps
        self._budget = setting.budget

    def step(self, step: Step) -> None:
        """`step 12/36  loss 3.5999   0.7 s  micro-batch  8 × 122 tokens  |███████████·▒▒▒▒▒▒▒▒▒▒▒▒| 36.4 MiB of 38.3 MiB`, its memory at the peak."""
        assert step.result is not None
        peak = step.peak
        memory = "" if peak is None else f"{memory_bar(peak.used, peak.limit, self._budget)} {format_bytes(peak.used)} of {format_bytes(peak.limit)}"
        print(
            f"step {step.index + 1:>{len(str(self._steps))}}/{self._steps}  loss {step.loss:.4f}  {step.ended - step.began:4.1f} s  "
            f"micro-batch {step.result.micro_batch_size:2} × {step.length:3} tokens  {memory}",
            flush=True,
        )

    def event(self, event: Event) -> None:
        """The event's own line."""
        print(f"    {event.line()}", flush=True)

    def move(self, move: Move) -> None:
        """What the co-tenant does."""
        left = f"{format_bytes(move.left)} of {format_bytes(self._budget)}"
        print(f"  * {move.what}, in {move.phase} of micro-batch {move.micro_batch} of step {move.step + 1}: {left} left for us", flush=True)


def memory_bar(used: int, limit: int, budget: int) -> str:
    """Used, free, and taken by others: `|████····▒▒▒▒|`."""
    mine = min(BAR, round(BAR * used / budget))
    others = min(BAR - mine, round(BAR * max(0, budget - limit) / budget))
    return f"|{'█' * mine}{'·' * (BAR - mine - others)}{'▒' * others}|"


def introduction(setting: Setting) -> str:
    """What is about to happen."""
    options = setting.options
    text = "Python's standard library" if options.text is None else str(options.text)
    if options.device.type == "cuda":  # cuda-only
        where, limit = torch.cuda.get_device_name(options.device), "a memory fraction of the device, and a ballast process as co-tenant"
    else:
        where, limit = f"the CPU (threads: {torch.get_num_threads()})", "a MemoryBudget, moved by a script"
    return (
        f"A GPT of {sum(parameter.numel() for parameter in setting.model.parameters()):,} parameters on {text}, "
        f"{str(options.dtype).removeprefix('torch.')} on {where}.\n"
        f"{options.steps} steps of {options.batch} documents. The whole batch at once would need {format_bytes(setting.needs.whole)}; "
        f"there are {format_bytes(setting.budget)} ({limit}).\n"
        f"Growth is less patient here than by default, to be seen in a minute: patience {POLICY.patience} calls, cooldown {POLICY.cooldown:g} s.\n"
    )


def table(outcome: Outcome) -> str:
    """Both loss curves side by side, at most about a dozen rows of them."""
    steps, differences = outcome.steps, outcome.differences
    every = -(-len(steps) // ROWS)
    shown = sorted({*range(0, len(steps), every), len(steps) - 1})
    lines = ["step  micro-batch   loss, limited        loss, unlimited      relative difference"]
    for i in shown:
        step = steps[i]
        assert step.result is not None
        lines.append(f"{i + 1:4}  {step.result.micro_batch_size:11}   {step.loss:<18.15f}   {outcome.reference[i]:<18.15f}   {differences[i]:.1e}")
    return "\n".join(lines)


def summary(outcome: Outcome, setting: Setting) -> str:
    """What it survived, and what it cost."""
    options, needs, rounding = setting.options, setting.needs, outcome.rounding
    failures = Counter(event.phase for step in outcome.steps for _, event in step.events if isinstance(event, OutOfMemory))
    phases = ", ".join(f"{count} in {phase}" for phase, count in sorted(failures.items())) or "none"
    replayed, samples = sum(step.result.replayed_samples for step in outcome.steps if step.result is not None), options.steps * options.batch
    sizes = ", ".join(map(str, sorted({size for step in outcome.steps for _, size in step.sizes})))
    lost = sum(step.lost for step in outcome.steps)
    largest = max(outcome.differences)
    worst = outcome.differences.index(largest) + 1
    excess = needs.whole / setting.budget
    rows = {
        "largest difference": f"{largest:.1e} of the loss (step {worst}), {outcome.weight:.1e} of a weight at the end",
        "counts as rounding": f"up to {rounding.loss:.0e} of the loss, {rounding.weight:.0e} of a weight",
        "out-of-memory errors": f"{outcome.ooms} survived ({phases})",
        "samples replayed": f"{replayed} of {samples} ({replayed / samples:.1%})",
        "micro-batch sizes": f"{sizes} (of a batch of {options.batch})",
        "memory": f"{format_bytes(setting.budget)}; the whole batch would need {format_bytes(needs.whole)}, {excess:.1f} times that",
        "time lost to replays": f"{lost:.2f} s ({lost / outcome.seconds:.1%}): attempts that failed, from their forward's start until undone",
        "time": f"{outcome.seconds:.1f} s within the budget, {outcome.reference_seconds:.1f} s without limits",
    }
    return "\n".join(f"{name:<22}{value}" for name, value in rows.items())


def verdict(outcome: Outcome) -> str:
    """The last line."""
    if not outcome.equal:
        return "DIFFERENT: the runs differ by more than rounding."
    if not outcome.ooms:
        return "NOTHING SHOWN: no out-of-memory error happened. Give a smaller --budget, or a larger --batch."
    return "EQUAL within rounding: the run that kept running out of memory trained the same model."
