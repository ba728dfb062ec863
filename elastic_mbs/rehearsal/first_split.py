"""The comparison that runs by itself, after the first call of each kind that was split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from elastic_mbs.batch.reader import BatchReader
from elastic_mbs.engine.parts import CallParts
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.shared.running import running_call
from elastic_mbs.errors import CountError, ElasticMBSError, UsageError
from elastic_mbs.events import logger
from elastic_mbs.memory import oom
from elastic_mbs.rehearsal.samples import Signs, TooManyTokensError
from elastic_mbs.rehearsal.verify import VerifyReport, verify

TRIES = 3  # of a comparison that finds no room, or no label
_FEW, _MORE = 8, 6  # samples at most; samples on which the reason for a difference is looked for
_NUMBERS = "A field with the numbers of samples has to be said, with cut.ragged(..., by=...)"
_WHOLE = (
    "Does it read something of the whole batch beside the piece that it gets (targets, a length)? "
    "Then the gradient just made is wrong: put it into the batch"
)
_OFF = 'GradientOptions(verify="off") leaves this check out'

LossFn = Callable[[Any], Any]


class FirstSplit:
    """The comparison of whole and pieces that nobody has asked for (`GradientOptions.verify`).

    It runs when a call has ended: gradients, buffers, random streams and modes are as if it had
    not.
    """

    def __init__(self, resources: Resources, batches: BatchReader) -> None:
        self.total: Any = None  # the counts of the samples that are compared
        self._resources = resources
        self._batches = batches
        self._mode = resources.settings.gradients.verify
        self._tries: Counter[object] = Counter()  # by the loss function

    def __call__(self, parts: CallParts, loss_fn: LossFn) -> None:
        """Compare the losses of a few samples of a call that has ended, once for its function.

        Raises:
            UsageError: the loss is wrong, and `verify="error"`.
        """
        kind = parts.batch.name, parts.batch.identity
        if self._mode == "off" or self._tries[kind] >= TRIES:
            parts.profile.learn_compared()
            return
        if running_call() is not None:
            return
        self._tries[kind] += 1
        found = self._try(parts, loss_fn)
        if found is not None:
            self._tries[kind] = TRIES
        if self._tries[kind] >= TRIES:
            parts.profile.learn_compared()
        if not found:
            return
        text = f"the pieces of a batch do not make up the loss of {parts.batch.name}: {found}"
        if self._mode == "error":
            raise UsageError(f"{text}. {_OFF}")
        self._warn(parts.batch.name, text)

    def _warn(self, name: str, text: str) -> None:
        again = "mbs.verify(loss_fn, batch) compares again"
        self._resources.warn(f"verify {name}", f"{text}. {again}, and {_OFF}")

    def _try(self, parts: CallParts, loss_fn: LossFn) -> str | None:
        """Return what was found, or None where there was no room, or nothing to compare."""
        name = parts.batch.name
        try:
            report = self._compare(parts, loss_fn)
            if report.ok and not report.compared:
                self._warn(name, f"the pieces of {name}: {'; '.join(report.findings)}")
            if report.ok:
                return ""
            return "; ".join(report.findings) if report.compared else None
        except (CountError, TooManyTokensError):  # none of the samples counts, or they are too long
            return None  # those of another batch will do
        except Exception as error:
            verdict = oom.classify(error, self._resources.settings.recovery.is_oom)
            hint = _NUMBERS if isinstance(error, IndexError) else _WHOLE
            problem = f"{type(error).__name__}: {error}. {hint}"
        finally:
            self.total = None
        # Outside of the handler, because the error keeps the tensors of its frames alive.
        if verdict is not None:
            self._resources.release(thorough=False)
            logger.info("the loss of %s was not compared: %s", name, verdict.message)
            return None
        self._warn(name, f"the loss of {name} could not be compared on a few samples: {problem}")
        return ""

    def _compare(self, parts: CallParts, loss_fn: LossFn) -> VerifyReport:
        batch = parts.batch
        limits = self._resources.settings.limits
        signs = Signs(batch.view, batch.counts, limits, parts.progress.schedule.budget)
        least = min(parts.progress.size, _FEW)  # as many as fit for sure
        report = self._verify(parts, loss_fn, signs.fewest(least, _FEW))
        if report.ok:
            return report
        # More samples tell more of the reason; what they do not bear out is no finding.
        try:
            return self._verify(parts, loss_fn, signs.telling(_MORE))
        except ElasticMBSError:
            return report
        except Exception as error:
            if oom.classify(error, self._resources.settings.recovery.is_oom) is None:
                raise
            return report

    def _verify(self, parts: CallParts, loss_fn: LossFn, samples: tuple[int, int]) -> VerifyReport:
        few, counts = self._batches.some(parts.batch.view, *samples)
        self.total = counts.total
        return verify(self._resources, few, counts, loss_fn, tries=False)
