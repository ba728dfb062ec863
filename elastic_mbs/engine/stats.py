"""Totals over the calls of one runtime."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic_mbs.engine.result import StepResult


@dataclass
class Stats:
    """What a runtime has been through since it was made.

    Attributes:
        calls: training calls that finished.
        samples: samples in them.
        pieces: micro-batches that committed.
        ooms: out-of-memory errors survived, those of `eval` too.
        replayed_samples: samples that were run again, those of `eval` too.
        sizes: how many calls ended at each micro-batch size.
    """

    calls: int = 0
    samples: int = 0
    pieces: int = 0
    ooms: int = 0
    replayed_samples: int = 0
    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, result: StepResult, samples: int, *, training: bool) -> None:
        """Counts one finished call."""
        self.ooms += result.ooms
        self.replayed_samples += result.replayed_samples
        if not training:
            return
        self.calls += 1
        self.samples += samples
        self.pieces += len(result.partition)
        self.sizes[result.micro_batch_size] = self.sizes.get(result.micro_batch_size, 0) + 1

    def copy(self) -> Stats:
        """A copy that does not change any more."""
        return replace(self, sizes=dict(self.sizes))
