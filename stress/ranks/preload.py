"""The modules that every rank of a job needs, imported once for all jobs."""

import gc

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel

from . import round

__all__ = ["round", "torch"]

gc.collect()
gc.freeze()  # or each collection of a recovery would walk torch's compiler
