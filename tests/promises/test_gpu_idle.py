"""Costs of a call without failures, and the device's own figures, on a GPU or the CPU."""

import gc
import json
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, Headroom, MemoryOptions, Policy, count_tokens
from elastic_mbs.batch import transfer
from elastic_mbs.dispatch import VersionedMode, run
from elastic_mbs.engine import edits
from elastic_mbs.memory import CudaSensor
from elastic_mbs.memory.nvml import NoAnswer, NvmlDevice
from elastic_mbs.memory.processes import pids_are_ours
from stress.reference.state import error_of
from tests.helpers.room import (
    MEBI,
    ROOT,
    Neighbour,
    Pair,
    Room,
    batch_on,
    by_hand,
    loss_of,
    scale,
    wide,
)
from tests.helpers.steps import elastic, grads, through

# torch warns at the first set_sync_debug_mode that it does not see every synchronisation
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")


# ---------------------------------------------------------------------- costs without failures


def idle_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Dropout(0.1), nn.Linear(256, 4)
    ).to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["device", "host", "pinned"])
@pytest.mark.parametrize("door", [1, 3])
def test_an_idle_step_never_waits_for_the_device(gpu: torch.device, place: str, door: int) -> None:
    model = idle_model(gpu)
    batch = batch_on(gpu if place == "device" else torch.device("cpu"), 32, dtype=torch.float32)
    if place == "pinned":
        batch = (batch[0].pin_memory(), batch[1].pin_memory())
    with ElasticMBS(model, micro_batch_size=8, policy=Policy(max_micro_batch_size=8)) as mbs:
        for i in range(8):
            model.zero_grad()
            # the first call compares every buffer
            torch.cuda.set_sync_debug_mode("error" if i >= 2 else "default")
            result = through(
                door, mbs, lambda piece: (loss_of(model, piece), model(piece[0]).argmax(1)), batch
            )
            torch.cuda.set_sync_debug_mode("default")
        assert result.ooms == 0
        assert len(result.partition) == 4
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchroniz"):  # the check itself works
        float(result)


class CopiesToTheDevice(VersionedMode):
    """A log of the streams in which tensors of the host are copied to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Any] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        at = {"aten::copy_": 1, "aten::_to_copy": 0}.get(func._schema.name)
        if at is not None and args[at].device.type == "cpu":
            self.streams.append(torch.cuda.current_stream())
        return run(func, args, kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [True, "pin", False])
def test_the_next_piece_is_copied_ahead_in_a_stream_of_its_own(
    gpu: torch.device, prefetch: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a small batch the first call makes copies, and no small piece is copied ahead.
    monkeypatch.setattr(edits, "SMALL", 0)
    monkeypatch.setattr(transfer, "SMALL", 0)
    model, batch = wide(gpu), batch_on(torch.device("cpu"), 64)
    partition = tuple(pairwise(range(0, 80, 16)))
    wanted = by_hand(model, batch_on(gpu, 64), partition)
    if prefetch is True:
        batch = (batch[0].pin_memory(), batch[1].pin_memory())
    main = torch.cuda.current_stream()
    with elastic(model, micro_batch_size=16, prefetch=prefetch) as mbs:
        for _ in range(3):
            model.zero_grad()
            with CopiesToTheDevice() as copies:
                result = mbs.backward(lambda piece: loss_of(model, piece), batch)
            assert error_of(grads(model), wanted) <= 1e-12
    assert result.partition == partition
    ahead = [stream for stream in copies.streams if stream != main]
    assert len(copies.streams) >= 8
    assert len(ahead) == (6 if prefetch else 0)  # both tensors of all pieces but the first


@pytest.mark.gpu
@pytest.mark.parametrize(("place", "reads"), [("device", 1), ("host", 0)])
def test_counting_tokens_costs_one_read_if_the_batch_is_on_the_device(
    gpu: torch.device, place: str, reads: int
) -> None:
    model = nn.Linear(8, 4).to(gpu)
    labels = torch.randint(0, 4, (16, 5))
    labels[:, 3:] = -100
    where = gpu if place == "device" else torch.device("cpu")
    batch = {"x": torch.randn(16, 5, 8, device=where), "labels": labels.to(where)}

    def loss_fn(piece: dict[str, Tensor]) -> Tensor:
        # without ignore_index, which may read the number of labels from the device
        return functional.cross_entropy(
            model(piece["x"][:, :3]).flatten(0, 1), piece["labels"][:, :3].flatten()
        )

    with ElasticMBS(
        model,
        micro_batch_size=4,
        count=count_tokens("labels"),
        policy=Policy(max_micro_batch_size=4),
    ) as mbs:
        for _ in range(3):
            mbs.backward(loss_fn, batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            mbs.backward(loss_fn, batch)
            torch.cuda.set_sync_debug_mode("default")
    assert (
        len([each for each in caught if "synchronizing CUDA operation" in str(each.message)])
        == reads
    )


def test_an_idle_call_takes_no_more_memory_than_the_loop_by_hand(device: torch.device) -> None:
    model, batch = wide(device), batch_on(device, scale(device)[0])
    size = scale(device)[0] // 4
    partition = tuple(pairwise(range(0, 5 * size, size)))
    with Room(device, model) as room, elastic(model, micro_batch_size=size) as mbs:
        for _ in range(3):
            mbs.backward(lambda piece: loss_of(model, piece), batch)
            model.zero_grad()

        def call() -> None:
            result = mbs.backward(lambda piece: loss_of(model, piece), batch)
            assert result.partition == partition

        mine = room.need(call)
        model.zero_grad()
        other = room.need(lambda: by_hand(model, batch, partition))
        # a block of 512 bytes for each piece's loss; on the host, the state of the random stream
        assert mine <= other + 512 * len(partition) + (
            torch.get_rng_state().nbytes if device.type == "cpu" else 0
        )


def test_a_finished_call_lets_go_of_its_batch(device: torch.device) -> None:
    model = idle_model(device)
    gc.collect()
    # A device's memory must not wait for the garbage collector, which does not know of it.
    gc.disable()
    try:
        with ElasticMBS(model, micro_batch_size=8) as mbs:
            for _ in range(3):
                batch = batch_on(device, 32, dtype=torch.float32)
                kept = weakref.ref(batch[0])
                mbs.backward(lambda piece: loss_of(model, piece), batch)
                del batch
                assert kept() is None
    finally:
        gc.enable()


def test_outputs_come_to_the_host_without_waiting(device: torch.device) -> None:
    model, batch = idle_model(device).eval(), batch_on(device, 32, dtype=torch.float32)

    def loss_fn(piece: Pair) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(piece[0])
        return functional.cross_entropy(logits, piece[1]), {"logits": logits}

    with ElasticMBS(
        model, micro_batch_size=8, outputs="cpu", policy=Policy(max_micro_batch_size=8)
    ) as mbs:
        for i in range(4):
            if device.type == "cuda" and i == 3:
                torch.cuda.set_sync_debug_mode("error")
            result = mbs.backward(loss_fn, batch)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        logits = result.outputs["logits"]
    assert logits.device.type == "cpu"
    assert not logits.requires_grad
    assert torch.allclose(logits, model(batch[0]).detach().cpu(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- the device's own figures


@pytest.mark.gpu
def test_nvml_and_cuda_agree_on_what_is_free(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = torch.empty(256 * MEBI, dtype=torch.uint8, device=gpu)
    by_nvml = CudaSensor(gpu).read()
    monkeypatch.setattr(NvmlDevice, "memory", lambda self: NoAnswer("NVML is not here"))
    by_cuda = CudaSensor(gpu).read()
    assert isinstance(by_nvml, Headroom)
    assert isinstance(by_cuda, Headroom)
    assert (by_nvml.source, by_cuda.source) == ("nvml", "cuda")
    assert by_nvml.total == by_cuda.total
    assert abs(by_nvml.free - by_cuda.free) <= 64 * MEBI
    assert by_nvml.capacity >= by_nvml.free + block.nbytes


@pytest.mark.gpu
def test_the_monitor_sees_a_memory_fraction_and_a_neighbour(gpu: torch.device) -> None:
    model = wide(gpu)
    with (
        Room(gpu, model) as room,
        Neighbour(room) as neighbour,
        ElasticMBS(model, memory=MemoryOptions(monitor_interval=0.02)) as mbs,
    ):

        def free_when(right: Callable[[int], bool]) -> int:
            # The driver wipes returned memory before it counts as free. A whole card takes a while.
            deadline = time.monotonic() + 10
            while True:
                time.sleep(0.1)
                found = mbs.headroom
                if isinstance(found, Headroom) and (
                    right(found.free) or time.monotonic() > deadline
                ):
                    return found.free
                assert time.monotonic() < deadline, found

        alone = free_when(lambda free: free > 0)
        neighbour.come(left=1024 * MEBI)
        assert free_when(lambda free: free <= 1200 * MEBI) <= 1200 * MEBI
        neighbour.go()
        assert abs(free_when(lambda free: abs(free - alone) <= 1024 * MEBI) - alone) <= 1024 * MEBI
        room.allow(512 * MEBI)
        assert (
            abs(free_when(lambda free: abs(free - 512 * MEBI) <= 8 * MEBI) - 512 * MEBI) <= 8 * MEBI
        )


@pytest.mark.gpu
def test_a_neighbour_is_known_by_its_pid_and_size(gpu: torch.device) -> None:
    model = wide(gpu)
    with Room(gpu, model) as room, Neighbour(room) as neighbour:
        neighbour.come(left=1024 * MEBI)
        found = CudaSensor(gpu).read()
        pid = neighbour.pid
        neighbour.go()
    assert isinstance(found, Headroom)
    if pids_are_ours():
        [size] = [holder.bytes for holder in found.holders if holder.pid == pid]
        sizes = [size]
    else:  # in a container the list is empty, or has the host's PIDs and this process, too
        sizes = [holder.bytes for holder in found.holders][:1]
    assert all(size is None or size > found.held_by_others // 2 for size in sizes)


def test_the_doctor_judges_the_machine_that_runs_the_tests(
    device: torch.device,
) -> None:
    command = [
        sys.executable,
        "-m",
        "elastic_mbs",
        "doctor",
        "--json",
        *(["--allocate"] if device.type == "cuda" else []),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert not done.stderr
    told = json.loads(done.stdout)
    assert done.returncode == (0 if told["healthy"] else 1)
    if device.type == "cuda":
        [seen] = [
            found for found in told["facts"]["torch"]["devices"] if found["index"] == device.index
        ]
        assert seen["allocation"] == "worked"
        assert seen["total"] == torch.cuda.get_device_properties(device).total_memory
        assert told["healthy"], told["findings"]


@pytest.mark.gpu
def test_step_times_come_from_the_device_without_waiting_for_it(gpu: torch.device) -> None:
    model, batch = wide(gpu), batch_on(gpu, 1024)
    with ElasticMBS(model, micro_batch_size=256, policy=Policy(max_micro_batch_size=256)) as mbs:
        for _ in range(3):
            mbs.backward(lambda piece: loss_of(model, piece), batch)
            model.zero_grad()
        torch.cuda.synchronize(gpu)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        mbs.backward(lambda piece: loss_of(model, piece), batch)
        end.record()
        torch.cuda.synchronize(gpu)
        # the next call reads the times that are known by then
        mbs.backward(lambda piece: loss_of(model, piece), batch)
        state: Any = mbs.state_dict()["controller"]
    [[_, seconds]] = state["tracks"][0]["time"]
    assert 0 < seconds <= start.elapsed_time(end) / 1000  # a piece is not longer than the call
