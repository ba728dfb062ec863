"""A GPU's driver and runtime that are not there."""

import pytest

from tests.helpers.fake_nvml import FakeCuda, FakeDriver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver(monkeypatch)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)
