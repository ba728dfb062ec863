"""Rate, warm-up, BatchNorm and batch size when the batch grows; batches for unequal ranks.

Which recipe applies when: `docs/large-batches.md`; unequal ranks: `docs/distributed.md`.
"""

from __future__ import annotations

from elastic_mbs.recipes.batch_sampler import ElasticBatchSampler
from elastic_mbs.recipes.batch_schedule import BatchSchedule
from elastic_mbs.recipes.ghost_batchnorm import (
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    convert_ghost_batchnorm,
)
from elastic_mbs.recipes.rate import gradual_warmup, linear_scaling
from elastic_mbs.recipes.share_sampler import ShareSampler

__all__ = [
    "BatchSchedule",
    "ElasticBatchSampler",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "ShareSampler",
    "convert_ghost_batchnorm",
    "gradual_warmup",
    "linear_scaling",
]
