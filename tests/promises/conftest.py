"""Devices for the tests that run on a GPU, and on the CPU in its place."""

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    chosen = torch.device("cuda", torch.cuda.current_device())
    yield chosen
    with warnings.catch_warnings():  # the first time in a process it warns of being a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_per_process_memory_fraction(1.0, chosen)
    torch.cuda.empty_cache()


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_sync_debug_mode("default")
