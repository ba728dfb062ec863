"""Training that survives out-of-memory errors: same batch, same gradients, no restart. The user picks the batch, the runtime the micro-batch."""

from __future__ import annotations

from elastic_mbs.accumulate import count_tokens
from elastic_mbs.batch import fields, items, register_splitter, whole
from elastic_mbs.controller import Policy
from elastic_mbs.decorator import elastic_step
from elastic_mbs.errors import (
    BackwardInsideError,
    BatchError,
    CountError,
    ElasticMBSError,
    GradientsChangedError,
    IncompleteBatchError,
    LossError,
    MicroBatchFloorError,
    MisuseError,
    NestedCallError,
    OptimizerInBackwardError,
    OptimizerStepError,
    PoisonedDeviceError,
    RecoveryError,
    ReplayUnsafeError,
    StepInsideError,
    UnsupportedError,
    UsageError,
)
from elastic_mbs.events import (
    CallDone,
    CallFailed,
    Event,
    OptimizerOutOfMemory,
    OutOfMemory,
    Resized,
    SensorBack,
    SensorLost,
    WaitingForMemory,
    Warned,
)
from elastic_mbs.join import PerPiece
from elastic_mbs.memory import Headroom, Holder, MemoryBudget, MemorySensor, Unavailable
from elastic_mbs.micro_batch import MicroBatch
from elastic_mbs.result import StepResult
from elastic_mbs.runtime import ElasticMBS
from elastic_mbs.stats import Stats
from elastic_mbs.verify import VerifyReport

__version__ = "0.1.0"

__all__ = [
    "BackwardInsideError",
    "BatchError",
    "CallDone",
    "CallFailed",
    "CountError",
    "ElasticMBS",
    "ElasticMBSError",
    "Event",
    "GradientsChangedError",
    "Headroom",
    "Holder",
    "IncompleteBatchError",
    "LossError",
    "MemoryBudget",
    "MemorySensor",
    "MicroBatch",
    "MicroBatchFloorError",
    "MisuseError",
    "NestedCallError",
    "OptimizerInBackwardError",
    "OptimizerOutOfMemory",
    "OptimizerStepError",
    "OutOfMemory",
    "PerPiece",
    "PoisonedDeviceError",
    "Policy",
    "RecoveryError",
    "ReplayUnsafeError",
    "Resized",
    "SensorBack",
    "SensorLost",
    "Stats",
    "StepInsideError",
    "StepResult",
    "Unavailable",
    "UnsupportedError",
    "UsageError",
    "VerifyReport",
    "WaitingForMemory",
    "Warned",
    "count_tokens",
    "elastic_step",
    "fields",
    "items",
    "register_splitter",
    "whole",
]
