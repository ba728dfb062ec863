"""The errors that this package raises by itself, with one branch for each decision of a caller.

```
ElasticMBSError
├── UsageError                      an argument is wrong: fix the call          (a ValueError)
│   ├── BatchError
│   ├── CountError
│   └── LossError
├── MisuseError                     the training loop is wrong: fix it          (a RuntimeError)
│   ├── NestedCallError
│   ├── StepInsideError
│   ├── BackwardInsideError
│   ├── GradientsChangedError
│   ├── OptimizerInBackwardError
│   └── IncompleteBatchError
├── UnsupportedError                leave out a mode of torch                   (a RuntimeError)
└── RecoveryError                   memory ran out                              (a RuntimeError)
    ├── MicroBatchFloorError        (a torch.OutOfMemoryError)
    ├── ReplayUnsafeError
    ├── OptimizerStepError          (a torch.OutOfMemoryError)
    ├── PoisonedDeviceError
    └── PeerError
```

After any of them, gradients that were empty at the start of the call are empty again, and buffers
and random streams are as they were at its start. Where a gradient was not empty, the error carries
a note that `zero_grad()` is needed.
"""

from __future__ import annotations

import torch

from elastic_mbs.error_bases import (
    ElasticMBSError,
    MisuseError,
    RecoveryError,
    UnsupportedError,
    UsageError,
)

__all__ = [
    "BackwardInsideError",
    "BatchError",
    "CountError",
    "ElasticMBSError",
    "GradientsChangedError",
    "IncompleteBatchError",
    "LossError",
    "MicroBatchFloorError",
    "MisuseError",
    "NestedCallError",
    "OptimizerInBackwardError",
    "OptimizerStepError",
    "PeerError",
    "PoisonedDeviceError",
    "RecoveryError",
    "ReplayUnsafeError",
    "StepInsideError",
    "UnsupportedError",
    "UsageError",
]


class BatchError(UsageError):
    """The batch cannot be cut: an unknown container, lengths that disagree, or no samples."""


class CountError(UsageError):
    """Counts are negative, not finite, of the wrong length, or all zero."""


class LossError(UsageError):
    """The loss that `loss_fn` returned is no scalar, has no graph, or is missing."""


class NestedCallError(MisuseError):
    """A call was started while another one on the same thread was still running."""


class StepInsideError(MisuseError):
    """An optimizer or a scheduler stepped before every piece of the batch had been accumulated."""


class BackwardInsideError(MisuseError):
    """The step function called `backward()` by itself, which is the engine's part."""


class GradientsChangedError(MisuseError):
    """`.grad` was cleared or edited between two pieces of one batch."""


class OptimizerInBackwardError(MisuseError):
    """A leaf lost its gradient during backward: an optimizer steps inside backward."""


class IncompleteBatchError(MisuseError):
    """The loop over `micro_batches` ended before every piece had run."""


class MicroBatchFloorError(RecoveryError, torch.OutOfMemoryError):
    """The smallest micro-batch allowed does not fit.

    It is also a `torch.OutOfMemoryError`, so that existing handlers see it.
    """


class ReplayUnsafeError(RecoveryError):
    """A replay would not give the exact gradient; the message says why and what to change."""


class OptimizerStepError(RecoveryError, torch.OutOfMemoryError):
    """A guarded optimizer step does not fit.

    Parameters and state are as they were before it, unless the message says otherwise.
    """


class PoisonedDeviceError(RecoveryError):
    """The device or its allocator cannot be trusted any more.

    Save everything that can still be read, and restart the process.
    """


class PeerError(RecoveryError):
    """Another rank of the job could not finish the batch or its optimizer's step, or is gone.

    Where the others answer, all ranks have undone it and may go on. Where the message says that
    they cannot be reached, end the process: torchrun starts the job again.
    """
