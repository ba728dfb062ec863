"""Devices by one trait, as far as no device is needed; on_other_device.py trains on one."""

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic_mbs.batch.transfer import choose_device
from elastic_mbs.device import Accelerator, accelerator_of, with_index
from elastic_mbs.errors import UnsupportedError, UsageError
from elastic_mbs.memory import Unavailable, oom, sensor_for
from elastic_mbs.rollback.random_streams import RandomStreams

HPU = torch.device("hpu", 0)  # torch has its name, and no module without Intel's package


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    accelerator_of.cache_clear()
    yield
    accelerator_of.cache_clear()


def module_of(device: torch.device, monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    module = types.SimpleNamespace(**functions)
    monkeypatch.setattr(torch, "get_device_module", {device.type: module}.__getitem__)


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_memory_of_the_host_is_no_accelerator(name: str) -> None:
    assert accelerator_of(torch.device(name)) is None
    assert with_index(torch.device(name)) == torch.device(name)


def test_a_device_has_one_accelerator() -> None:
    assert accelerator_of(HPU) is accelerator_of(torch.device("hpu:0"))
    assert accelerator_of(HPU) is not accelerator_of(torch.device("hpu:1"))


def test_a_device_without_a_module_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"device 'hpu:0'.*enabled=False"):
        RandomStreams([], [HPU])
    with pytest.raises(UnsupportedError, match=r"device 'hpu:0'.*running out of memory"):
        oom.refuse_unrecognised([torch.device("cpu"), HPU])
    reading = sensor_for(HPU)[0].read()
    assert isinstance(reading, Unavailable)
    assert reading.reason == "hpu:0: UnsupportedError: torch.hpu has no memory_reserved"
    assert sensor_for(HPU)[1].usage() is None


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_the_default_generators_of_torchs_own_devices_are_read_and_put_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, inits = torch.Generator().manual_seed(3), list[str]()
    if kind == "xpu":
        functions: dict[str, Any] = {
            "init": lambda: inits.append("init"),
            "default_generators": (torch.Generator(), generator),
        }
    else:
        functions = {
            "get_rng_state": lambda device: generator.get_state(),
            "set_rng_state": lambda state, device: generator.set_state(state),
        }
    device = torch.device(kind, 1)
    module_of(device, monkeypatch, **functions)
    streams = RandomStreams([], [device])
    state = streams.read()
    first = torch.rand(3, generator=generator).tolist()
    assert streams.moved(state)
    streams.restore(state)
    assert not streams.moved(state)
    assert torch.rand(3, generator=generator).tolist() == first
    assert inits == (["init"] if kind == "xpu" else [])


def test_a_device_of_the_users_gets_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    module_of(torch.device("xpu"), monkeypatch, current_device=lambda: 2)
    assert choose_device("xpu", []) == torch.device("xpu:2")
    assert choose_device("xpu:1", []) == torch.device("xpu:1")


def test_a_device_that_is_not_there_is_refused_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_device() -> int:
        raise AssertionError("Torch not compiled with XPU enabled")

    module_of(torch.device("xpu"), monkeypatch, current_device=current_device)
    with pytest.raises(UsageError, match="device='xpu' is not there"):
        choose_device("xpu", [])


def test_figures_are_asked_of_the_devices_module(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied, device = list[bool](), torch.device("xpu", 0)
    module_of(
        device,
        monkeypatch,
        mem_get_info={device: (3, 10)}.__getitem__,
        memory_reserved=lambda where: 4,
        get_device_name=lambda where: "Arc",
        empty_cache=lambda: emptied.append(True),
        is_current_stream_capturing=lambda: True,
    )
    accelerator = Accelerator(device)
    assert accelerator.memory_info() == (3, 10)
    assert accelerator.memory_reserved() == 4
    assert accelerator.memory_fraction() == 1.0
    assert accelerator.name() == "xpu:0 (Arc)"
    assert accelerator.is_capturing()
    accelerator.empty_cache()
    assert emptied == [True]
    with pytest.raises(UnsupportedError, match="has no memory_stats"):
        accelerator.memory_stats()


def test_the_error_of_a_lost_device_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: object) -> int:
        raise torch.AcceleratorError("device lost")

    module_of(torch.device("xpu"), monkeypatch, memory_reserved=lost)
    with pytest.raises(torch.AcceleratorError, match="device lost"):
        Accelerator(torch.device("xpu", 0)).memory_reserved()
