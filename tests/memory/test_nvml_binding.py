"""The real pynvml, over a stub of the driver's library: what the in-process fakes assume about the binding is true.

Each runs in a process of its own (`tests/helpers/nvml_stub.py`), because the binding loads its library once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.nvml_stub import NvmlStub

A, B, M = "11111111-aaaa", "22222222-bbbb", "33333333-cccc"
TWO = f"""
gpu GPU-{B} 2000 20 1500
gpu GPU-{A} 1000 10 400
"""
BEGIN = f"""
from elastic_mbs.memory.nvml import NvmlDevice
A, B, M, TWO = {A!r}, {B!r}, {M!r}, {TWO!r}
clock = Clock()
device = NvmlDevice(A, clock=clock)
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    return NvmlStub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def old_stub(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    return NvmlStub(tmp_path_factory.mktemp("old-nvml"), old=True)


def answers(stub: NvmlStub, code: str, state: str = TWO) -> list[Any]:
    return [told["it"] for told in stub.run(state, BEGIN + code)]


def lost(name: str, words: str) -> dict[str, object]:
    return {"reason": f"NVML: NVMLError_{name}: {words}", "lost": True}


GOOD = {"free": 400, "total": 1000}


def test_devices_are_found_by_uuid_whatever_their_order(stub: NvmlStub) -> None:
    seen = answers(
        stub,
        """
other = NvmlDevice(B)
tell(it=[device.memory(), other.memory()])
driver("\\n".join(reversed(TWO.split("\\n"))))
tell(it=[device.memory(), other.memory()])
tell(it=[NvmlDevice(A).memory(), NvmlDevice(B).memory()])
driver(TWO.replace("1500", "700"))
tell(it=[device.memory(), other.memory()])
""",
    )
    both = [GOOD, {"free": 1500, "total": 2000}]
    assert seen == [both, both, both, [GOOD, {"free": 700, "total": 2000}]]


def test_a_library_without_the_new_calls_is_asked_in_the_old_way(old_stub: NvmlStub) -> None:
    state = TWO + f"process GPU-{A} compute 1 50\nprocess GPU-{A} graphics 2 N/A\n"
    code = "for _ in range(2): tell(it=[device.memory(), [(h.pid, h.bytes) for h in device.holders()]])"
    assert answers(old_stub, code, state) == [[GOOD, [[1, 50], [2, None]]]] * 2


@pytest.mark.parametrize(
    ("code", "name", "words"), [(15, "GpuIsLost", "GPU is lost"), (999, "Unknown", "Unknown Error"), (9, "DriverNotLoaded", "Driver Not Loaded")]
)
def test_a_failure_after_some_readings_is_latched_and_tried_again_later(stub: NvmlStub, code: int, name: str, words: str) -> None:
    seen = answers(
        stub,
        f"""
driver(TWO + "fail memory {code} 3\\n")
for _ in range(5): tell(it=device.memory())
clock.now = 5.0
tell(it=device.memory())
driver(TWO)
tell(it=device.memory())
clock.now = 15.0
tell(it=device.memory())
""",
    )
    assert seen == [GOOD] * 3 + [lost(name, words)] * 4 + [GOOD]


def test_after_the_driver_was_loaded_again_its_library_is_shut_down_and_opened_anew(stub: NvmlStub) -> None:
    """A stale reference would go on failing: the library looks for the driver only when it has none. Two devices hold one each."""
    seen = answers(
        stub,
        """
other = NvmlDevice(B, clock=clock)
def both(): tell(it=[device.memory(), other.memory()])
both()
driver(TWO + "fail init 9 0\\nepoch 1\\n")
both()
clock.now = 5.0
both()
driver(TWO + "epoch 1\\n")
both()
clock.now = 15.0
both()
""",
    )
    good = [GOOD, {"free": 1500, "total": 2000}]
    unknown, unloaded = [lost("Unknown", "Unknown Error")] * 2, [lost("DriverNotLoaded", "Driver Not Loaded")] * 2
    assert seen == [good, unknown, unloaded, unloaded, good]


def test_a_gpu_that_falls_off_the_bus_is_lost_alone(stub: NvmlStub) -> None:
    seen = answers(
        stub,
        """
other = NvmlDevice(B, clock=clock)
device.memory(), other.memory()
driver(TWO.split("gpu GPU-1")[0])
tell(it=[device.memory(), other.memory()])
clock.now = 5.0
tell(it=[device.memory(), other.memory()])
driver(TWO)
clock.now = 15.0
tell(it=[device.memory(), other.memory()])
""",
    )
    there = {"free": 1500, "total": 2000}
    assert seen == [[lost("GpuIsLost", "GPU is lost"), there], [lost("NotFound", "Not Found"), there], [GOOD, there]]


def test_without_the_library_the_real_binding_says_so(stub: NvmlStub, tmp_path: Path) -> None:
    told = stub.run(TWO, BEGIN + "tell(it=device.memory())", LD_LIBRARY_PATH=str(tmp_path))
    [answer] = [value["it"] for value in told]
    assert answer["reason"].startswith("NVML: NVMLError_")
    assert not answer["lost"]


def test_processes_are_listed_with_what_the_driver_tells(stub: NvmlStub) -> None:
    seen = answers(
        stub,
        """
device.memory()
ours = os.getpid()
processes = f"process GPU-{A} compute {ours} 5\\nprocess GPU-{A} compute 1 70\\nprocess GPU-{A} graphics 1 N/A\\n"
processes += f"process GPU-{A} graphics 4000000 N/A\\nprocess GPU-{B} compute 4000001 9\\n"
driver(TWO + processes)
tell(it=device.holders())
driver(TWO)
tell(it=device.holders())
clock.now = 5.0
tell(it=device.holders())
driver(TWO + processes + "fail processes 4 0\\n")
clock.now = 10.0
tell(it=[device.holders(), device.memory()])
""",
    )
    first = [(holder["pid"], holder["bytes"]) for holder in seen[0]]
    assert first == [(1, 70), (4000000, None)]
    assert seen[0][0]["name"], "our own PID is in the list, so these PIDs are the ones that we see, too"
    assert seen[1] == seen[0], "it is read every few seconds only"
    assert seen[2] == []
    assert seen[3] == [[], GOOD]


def test_errors_of_the_real_binding_cannot_be_compared_or_hashed(stub: NvmlStub) -> None:
    """What makes catching by class a must; if this ever fails, the note in nvml.py is out of date."""
    code = """
import pynvml
error = pynvml.NVMLError(3)
found = []
for check in (lambda: error == None, lambda: hash(error)):
    try:
        check()
    except Exception as trouble:
        found.append(type(trouble).__name__)
tell(it=found)
"""
    assert answers(stub, code) == [["AttributeError", "TypeError"]]


def test_a_training_jobs_sensor_goes_through_loss_and_return_with_the_real_binding(stub: NvmlStub) -> None:
    """The whole chain but for torch's own figures: monitor, CUDA sensor, pynvml, library."""
    told = stub.run(
        TWO,
        f"""
import torch
from elastic_mbs.memory import CudaSensor, Monitor
torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(uuid={A!r}, total_memory=900, is_integrated=False)
torch.cuda.memory_reserved = lambda _: 100
torch.cuda.get_per_process_memory_fraction = lambda _: 1.0
torch.cuda.mem_get_info = lambda _: (390, 900)
clock, changes = Clock(), []
monitor = Monitor(CudaSensor("cuda:0", clock=clock), interval=0, clock=clock, on_change=changes.append)
TWO = {TWO!r}
tell(it=monitor.latest())
driver(TWO + "fail memory 999 1\\nfail init 999 1\\n")
for second in range(1, 5):
    clock.now = second
    monitor.latest()
tell(it=monitor.latest())
driver(TWO)
for second in range(5, 12):
    clock.now = second
    monitor.latest()
tell(it=monitor.latest())
tell(it=[[change.at, change.source] for change in changes])
""",
        torch=True,
    )
    before, doubtful, after, changes = (value["it"] for value in told)
    assert (before["source"], before["free"], before["doubt"]) == ("nvml", 400, None)
    assert (doubtful["source"], doubtful["free"], doubtful["doubt"]) == ("cuda", 390, "NVML: NVMLError_Unknown: Unknown Error")
    assert (after["source"], after["free"], after["doubt"]) == ("nvml", 400, None)
    assert changes == [[1, "cuda"], [6, "nvml"]]
