"""The simulated devices, for tests of faults that no card can be made to have."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stress.limits import run_child, simcuda
from stress.limits.simcuda import Simulation


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    if not simcuda.inside():
        pytest.skip("needs the simulated CUDA: pytest --simcuda")
    with Simulation() as devices:
        yield devices


@pytest.fixture
def apart(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., None]:
    """Return a function that runs a job in its own process, on its own devices.

    It is called as `apart(job, argument=…, SIMCUDA_TOTAL=…)`, and raises the job's error.
    """

    def run(job: Callable[..., object], **given: Any) -> None:
        for name in list(filter(str.isupper, given)):
            monkeypatch.setenv(name, str(given.pop(name)))
        monkeypatch.setenv("SIMCUDA_FILE", str(tmp_path / "devices"))
        for _ in run_child("simcuda", job, given, deadline=120):
            pass

    return run
