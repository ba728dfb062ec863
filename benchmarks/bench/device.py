"""CUDA devices for the benchmarks, real or simulated.

A limit that a script can move, and models whose pieces fill the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.workloads import Residuals, Workload, classifier, conv_net, pinned
from elastic_mbs import MemoryBudget, count_tokens
from elastic_mbs.cli.demo.gpt import GPT, GPTConfig, token_loss
from stress.limits.cuda import refusals


class MemoryFraction:
    """A limit on the bytes that torch's allocator reserves, with the interface of a `MemoryBudget`.

    Leaving the block lifts nothing: a runtime's monitor reads the limit at any time. `lift` does.

    Args:
        limit: bytes; more than the device has is no limit.
        device: with its index.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.device = device
        self._limit = 0
        self._refused_before = refusals(device)
        self.limit = limit

    @property
    def limit(self) -> int:
        """Limit in bytes.

        A change empties the allocator's cache, since torch asks the fraction only when it takes
        more.
        """
        return self._limit

    @limit.setter
    def limit(self, size: int) -> None:
        if size != self._limit:
            self._limit = size
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, size / torch.cuda.mem_get_info(self.device)[1]), self.device
            )

    def lift(self) -> None:
        """Leave all of the device to this process."""
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    @property
    def ooms(self) -> int:
        """Requests that the allocator has refused since the limit was made."""
        return refusals(self.device) - self._refused_before

    @property
    def live(self) -> int:
        """Bytes in tensors."""
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak(self) -> int:
        """Most bytes reserved since `reset_peak`: under a limit of that size nothing fails."""
        return torch.cuda.max_memory_reserved(self.device)

    def reset_peak(self) -> None:
        """Start a new interval, without cached memory."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def track(self, *objects: Any) -> None:
        """Do nothing: the allocator knows all tensors."""

    def __enter__(self) -> MemoryFraction:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def limit_on(
    device: torch.device, limit: int, track: tuple[Any, ...]
) -> MemoryBudget | MemoryFraction:
    """Return an object that holds a job to `limit` bytes.

    On a CPU it counts tensors, those to `track` from the start; on a CUDA device the allocator
    does.
    """
    return (
        MemoryFraction(limit, device) if device.type == "cuda" else MemoryBudget(limit, track=track)
    )


def settle(device: torch.device) -> None:
    """Give cuBLAS's workspaces, which stay, segments of their own.

    Else they are cut from a model's, and the rest of those is lost to the limit.
    """
    square = torch.ones(8, 8, device=device, requires_grad=True)
    with warnings.catch_warnings():
        # In autograd's thread torch warns, once in a process, that cuBLAS comes before anything
        # else.
        warnings.simplefilter("ignore")
        (square @ square).sum().backward()


def conv(samples: int, device: torch.device) -> Workload:
    """Return three convolutions with BatchNorm on 32 × 32 images.

    Each activation has 32 KiB a sample.
    """
    return classifier("conv net", conv_net(8, 2), torch.randn(samples, 3, 32, 32), samples, device)


def gpt(samples: int, device: torch.device) -> Workload:
    """Return two blocks on 64 tokens.

    They are counted in tokens, the last of which are padding.
    """
    model = GPT(GPTConfig(context=64, width=32, heads=2, layers=2)).to(device)
    tokens = torch.randint(0, 256, (samples, 64))
    labels = tokens.roll(-1, 1).masked_fill(
        torch.arange(64) >= 63 - torch.arange(samples)[:, None] % 16, -100
    )
    batch = {"tokens": pinned(tokens, device), "labels": pinned(labels, device)}
    return Workload(
        "GPT",
        model,
        lambda piece: token_loss(piece, model),
        batch,
        samples,
        device,
        count_tokens("labels"),
    )


def mlp(samples: int, device: torch.device) -> Workload:
    """Return eight residual layers, so narrow that they are memory more than work."""
    return classifier("deep MLP", Residuals(8, 64), torch.randn(samples, 64), samples, device)


DEVICE_MODELS: Mapping[str, tuple[Callable[[int, torch.device], Workload], int]] = {
    "conv": (conv, 768),
    "gpt": (gpt, 576),
    "mlp": (mlp, 65_536),
}
"""Name → maker of a workload, and the samples of a batch.

Even in seven pieces the largest activations have 2 to 5 MiB. There is little work for their memory,
because a simulated device computes on one core of the host. It has no kernel for an LSTM's cell.
"""
