"""Readings of a driver that falls silent: training goes on, and grows on sure figures only."""

from collections.abc import Callable

import psutil
import pytest
import torch

from elastic_mbs import (
    ElasticMBS,
    Event,
    Headroom,
    MemoryOptions,
    OutOfMemory,
    Policy,
    SensorBack,
    SensorLost,
)
from elastic_mbs.memory import CudaSensor, nvml
from stress.limits.simcuda import Simulation, control
from tests.helpers.room import MEBI, Room, batch_on, loss_of, needs, wide
from tests.helpers.steps import off_by, whole_gradient

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
EAGER = Policy(patience=1, jitter=0.0, cooldown=0.0, min_gain=0.0, seed=0)


def read() -> Headroom:
    found = CudaSensor(DEVICE).read()
    assert isinstance(found, Headroom)
    return found


class Training:
    """Calls on a batch of 128, whose gradient is right every time.

    A reading is taken before each decision.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.model, self.batch = wide(DEVICE), batch_on(DEVICE, 128)
        self.reference = whole_gradient(self.model, lambda twin: loss_of(twin, self.batch))
        memory = MemoryOptions(monitor_interval=0, wait_for_memory=0)
        self.mbs = ElasticMBS(
            self.model,
            micro_batch_size=16,
            policy=EAGER,
            on_event=self.events.append,
            memory=memory,
        )

    def sizes(self, calls: int) -> list[int]:
        return [self.size() for _ in range(calls)]

    def size(self) -> int:
        self.model.zero_grad()
        result = self.mbs.backward(lambda piece: loss_of(self.model, piece), self.batch)
        assert off_by(self.model, self.reference) <= 1e-12
        return max(stop - start for start, stop in result.partition)

    def seen(self, *kinds: type[Event]) -> list[type[Event]]:
        return [type(event) for event in self.events if isinstance(event, kinds)]


@pytest.mark.parametrize("error", [control.NVML_GPU_IS_LOST, control.NVML_UNKNOWN])
def test_growth_stops_when_the_driver_goes_away_and_returns_with_it(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(nvml, "RETRY_EVERY", 0.0)
    training = Training()
    assert training.size() == 16
    simulation.set("nvml_error", error)
    assert len(set(training.sizes(6)[1:])) == 1  # the move that was decided before is made
    assert training.seen(SensorLost, SensorBack) == [SensorLost]
    simulation.set("nvml_error", 0)
    assert training.sizes(8)[-1] == 128
    assert training.seen(SensorLost, SensorBack) == [SensorLost, SensorBack]


@pytest.mark.parametrize("fact", ["mig", "nvml_hides"])
def test_headroom_is_right_where_the_driver_names_no_processes(
    simulation: Simulation, fact: control.Fact
) -> None:
    simulation.set(fact, 1)
    simulation.foreign(1024 * MEBI)
    found = read()
    assert (found.source, found.free, found.holders, found.doubt) == (
        "nvml",
        simulation.free(),
        (),
        None,
    )
    assert found.held_by_others >= 1024 * MEBI
    assert found.capacity == found.free + torch.cuda.memory_reserved(DEVICE)


def board(line: Callable[[object], None]) -> None:
    Simulation().set("unified", 1)  # before torch looks at the device
    found = read()
    assert torch.cuda.get_device_properties(DEVICE).is_integrated
    assert (found.source, found.doubt) == ("host", None)
    assert found.total == psutil.virtual_memory().total
    assert found.capacity - found.free == torch.cuda.memory_reserved(DEVICE)


def test_on_a_board_that_shares_the_hosts_memory_headroom_is_what_the_host_has(
    apart: Callable[..., None],
) -> None:
    apart(board)


def test_a_size_grows_once_a_hidden_neighbour_has_left(
    simulation: Simulation,
) -> None:
    training = Training()
    with Room(DEVICE, training.model) as room:
        _, step = needs(room, training.model, training.batch)
    simulation.foreign(simulation.free() - step // 2)
    beside = training.sizes(10)
    assert 16 < max(beside) <= 64
    assert not training.seen(OutOfMemory)
    simulation.foreign(0)
    assert training.sizes(10)[-1] == 128
