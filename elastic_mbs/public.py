"""The names of the package, with everything behind them.

They are used as `elastic_mbs.<name>`: its `__getattr__` imports this module.
"""

from __future__ import annotations

from elastic_mbs.batch import cut
from elastic_mbs.batch.containers import register_splitter
from elastic_mbs.batch.counts import count_tokens
from elastic_mbs.batch.join import PerPiece
from elastic_mbs.controller.controller import Policy
from elastic_mbs.controller.size_model import SizeModel
from elastic_mbs.decorator import elastic_step
from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.engine.outcome.result import Stats, StepResult
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
    PeerError,
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
    Deescalated,
    Escalated,
    Event,
    OptimizerOutOfMemory,
    OutOfMemory,
    Resized,
    SensorBack,
    SensorLost,
    WaitingForMemory,
    Warned,
)
from elastic_mbs.memory import Headroom, Holder, MemoryBudget, MemorySensor, Unavailable
from elastic_mbs.noise_scale import NoiseScale
from elastic_mbs.options import (
    DistributedOptions,
    GradientOptions,
    MemoryOptions,
    RecoveryOptions,
)
from elastic_mbs.planning.report import PlannedSize, PlannedWay, PlanReport
from elastic_mbs.rehearsal.verify import VerifyReport
from elastic_mbs.runtime import ElasticMBS
from elastic_mbs.version import __version__

__all__ = [
    "BackwardInsideError",
    "BatchError",
    "CallDone",
    "CallFailed",
    "CountError",
    "Deescalated",
    "DistributedOptions",
    "ElasticMBS",
    "ElasticMBSError",
    "Escalated",
    "Event",
    "GradientOptions",
    "GradientsChangedError",
    "Headroom",
    "Holder",
    "IncompleteBatchError",
    "LossError",
    "MemoryBudget",
    "MemoryOptions",
    "MemorySensor",
    "MicroBatch",
    "MicroBatchFloorError",
    "MisuseError",
    "NestedCallError",
    "NoiseScale",
    "OptimizerInBackwardError",
    "OptimizerOutOfMemory",
    "OptimizerStepError",
    "OutOfMemory",
    "PeerError",
    "PerPiece",
    "PlanReport",
    "PlannedSize",
    "PlannedWay",
    "PoisonedDeviceError",
    "Policy",
    "RecoveryError",
    "RecoveryOptions",
    "ReplayUnsafeError",
    "Resized",
    "SensorBack",
    "SensorLost",
    "SizeModel",
    "Stats",
    "StepInsideError",
    "StepResult",
    "Unavailable",
    "UnsupportedError",
    "UsageError",
    "VerifyReport",
    "WaitingForMemory",
    "Warned",
    "__version__",
    "count_tokens",
    "cut",
    "elastic_step",
    "register_splitter",
]
