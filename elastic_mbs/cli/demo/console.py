"""What the demo prints before and after the runs."""

from __future__ import annotations

from collections import Counter

import torch

from elastic_mbs.cli.demo.compare import Outcome, Setting
from elastic_mbs.cli.demo.run import POLICY
from elastic_mbs.events import OutOfMemory, format_bytes

ROWS = 12  # of the table


def introduction(setting: Setting) -> str:
    """What is about to happen."""
    options = setting.options
    text, dtype = options.text or "Python's standard library", str(options.dtype).removeprefix("torch.")
    where, limit = f"the CPU (threads: {torch.get_num_threads()})", "a MemoryBudget, moved by a script"
    if options.device.type == "cuda":  # cuda-only
        where, limit = torch.cuda.get_device_name(options.device), "a memory fraction of the device, and a ballast process as co-tenant"
    return (
        f"A GPT of {sum(parameter.numel() for parameter in setting.model.parameters()):,} parameters on {text}, {dtype} on {where}.\n"
        f"{options.steps} steps of {options.batch} documents. The whole batch at once would need {format_bytes(setting.needs.whole)}; "
        f"there are {format_bytes(setting.budget)} ({limit}).\n"
        f"Growth is less patient here than by default, to be seen in a minute: patience {POLICY.patience} calls, cooldown {POLICY.cooldown:g} s.\n"
    )


def table(outcome: Outcome) -> str:
    """Both loss curves side by side, at most about a dozen rows of them."""
    steps, differences = outcome.notes.steps, outcome.differences
    shown = sorted({*range(0, len(steps), -(-len(steps) // ROWS)), len(steps) - 1})
    lines = ["step  micro-batch   loss, limited        loss, unlimited      relative difference"]
    for i in shown:
        size, loss = steps[i].result.micro_batch_size, steps[i].loss
        lines.append(f"{i + 1:4}  {size:11}   {loss:<18.15f}   {outcome.reference[i]:<18.15f}   {differences[i]:.1e}")
    return "\n".join(lines)


def summary(outcome: Outcome, setting: Setting) -> dict[str, str]:
    """What the run survived, and what that cost, by name."""
    options, needs, rounding, notes = setting.options, setting.needs, outcome.rounding, outcome.notes
    failures = Counter(event.phase for event in notes.events if isinstance(event, OutOfMemory))
    phases = ", ".join(f"{count} in {phase}" for phase, count in sorted(failures.items())) or "none"
    replayed, samples = sum(step.result.replayed_samples for step in notes.steps), options.steps * options.batch
    sizes = ", ".join(map(str, sorted({step.result.micro_batch_size for step in notes.steps})))
    largest = max(outcome.differences)
    worst = outcome.differences.index(largest) + 1
    excess, lost = needs.whole / setting.budget, notes.seconds_lost
    return {
        "largest difference": f"{largest:.1e} of the loss (step {worst}), {outcome.weight:.1e} of a weight at the end",
        "counts as rounding": f"up to {rounding.loss:.0e} of the loss, {rounding.weight:.0e} of a weight",
        "out-of-memory errors": f"{outcome.ooms} survived ({phases})",
        "samples replayed": f"{replayed} of {samples} ({replayed / samples:.1%})",
        "micro-batch sizes": f"{sizes} (of a batch of {options.batch})",
        "memory": f"{format_bytes(setting.budget)}; the whole batch would need {format_bytes(needs.whole)}, {excess:.1f} times that",
        "time lost to replays": f"{lost:.2f} s ({lost / outcome.seconds:.1%}): failed attempts, from the start of their forward until undone",
        "time": f"{outcome.seconds:.1f} s within the budget, {outcome.reference_seconds:.1f} s without limits",
    }


def verdict(outcome: Outcome) -> str:
    """The last line."""
    if not outcome.equal:
        return "DIFFERENT: the runs differ by more than rounding."
    if not outcome.ooms:
        return "NOTHING SHOWN: no out-of-memory error happened. Give a smaller --budget, or a larger --batch."
    return "EQUAL within rounding: the run that kept running out of memory trained the same model."
