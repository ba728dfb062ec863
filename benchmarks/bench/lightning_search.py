"""Lightning's own search for a batch size, on a job's model under a job's budget."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from torch.utils.data import DataLoader, Dataset

from benchmarks.bench.job import Job


def search(job: Job) -> int:
    """Return the size that `BatchSizeFinder` finds by its defaults, at most the whole batch.

    A larger batch of a trial takes more memory.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.ERROR)
    module = _Module(job)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=0,  # the search makes its own steps; the run is not Lightning's
            callbacks=[BatchSizeFinder()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        whole = job.batch(0)
        # In a step of the run it is there.
        job.budget.track(list(whole.values()) if isinstance(whole, dict) else whole)
        with job.running():
            trainer.fit(module)
    return min(module.batch_size, job.samples)


class _Samples(Dataset[Any]):
    """The samples of the job's batches, one by one."""

    def __init__(self, job: Job) -> None:
        self.batch = job.workload.batch

    def __len__(self) -> int:
        return len(
            next(iter(self.batch.values())) if isinstance(self.batch, dict) else self.batch[0]
        )

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.batch, dict):
            return {name: tensor[index] for name, tensor in self.batch.items()}
        return tuple(tensor[index] for tensor in self.batch)


class _Module(lightning.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.model
        self.job = job
        self.batch_size = 2
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        """Make a step of the loop by hand, in one piece. Lightning knows errors by CUDA's words."""
        try:
            optimizer: Any = self.optimizers()
            replace(self.job.workload, batch=batch, size=self.batch_size).by_hand()
            optimizer.step()
            optimizer.zero_grad()
        except torch.OutOfMemoryError:
            failed = True
        else:
            failed = False
        if failed:
            self.job.optimizer.zero_grad()
            raise RuntimeError("CUDA out of memory.")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the job's optimizer."""
        return self.job.optimizer

    def train_dataloader(self) -> Iterable[Any]:
        """Return batches of the size that is tried."""
        return DataLoader(_Samples(self.job), batch_size=self.batch_size, shuffle=True)
