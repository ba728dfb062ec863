"""What to do with rate, warm-up, BatchNorm and batch size when the batch grows: `docs/large-batches.md` says which applies when."""

from __future__ import annotations

from elastic_mbs.recipes.ghost_batchnorm import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d, convert_ghost_batchnorm

__all__ = ["GhostBatchNorm1d", "GhostBatchNorm2d", "GhostBatchNorm3d", "convert_ghost_batchnorm"]
