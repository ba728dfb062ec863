"""The limit of a GPU: in numbers on a card that is made up, and on a real one where it is there."""

import pytest
import torch

from elastic_mbs import UsageError
from stress.limits import Confined, CudaLimit
from stress.limits.neighbour import Neighbour

MEBI = 1 << 20


class Card:
    """A device of CUDA as far as torch asks for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int = 1000 * MEBI) -> None:
        self.total = 1000 * MEBI
        self.free = free
        self.ours = 0
        self.fraction = 1.0
        self.ooms = 2
        self.told = [0]
        for name, answer in {
            "is_available": lambda: True,
            "init": lambda: None,
            "current_device": lambda: 0,
            "mem_get_info": lambda device: (self.free - self.ours - self.told[-1], self.total),
            "empty_cache": lambda: None,
            "memory_reserved": lambda device: self.ours,
            "memory_allocated": lambda device: self.ours,
            "max_memory_allocated": lambda device: self.ours + MEBI,
            "reset_peak_memory_stats": lambda device: None,
            "memory_stats": lambda device: {"num_ooms": self.ooms},
            "set_per_process_memory_fraction": lambda fraction, device: setattr(
                self, "fraction", fraction
            ),
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(Neighbour, "__enter__", lambda neighbour: neighbour)
        monkeypatch.setattr(Neighbour, "__exit__", lambda neighbour, *error: self.told.append(-1))
        monkeypatch.setattr(Neighbour, "hold", self.hold)

    def hold(self, size: int) -> int:
        self.told.append(size)
        return size


def test_on_cuda_a_capacity_is_a_fraction_and_the_co_tenant_fills_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card(monkeypatch)
    memory = CudaLimit()
    assert memory.device == torch.device("cuda", 0)
    with memory:
        emptied: list[float] = []
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "empty_cache", lambda: emptied.append(card.fraction))
            memory.resize(400 * MEBI)
        assert emptied[0] == 1.0, (
            "torch asks the fraction only when it takes more: what is cached would go on as before"
        )
        assert card.fraction == 0.4
        assert card.told == [0], "no process yet"
        card.ours = 100 * MEBI
        memory.occupy(200 * MEBI)
        assert card.told[-1] == 800 * MEBI, "200 MiB are left to us, of which we have 100 already"
        assert memory.others() == 200 * MEBI
        memory.resize(500 * MEBI)
        assert card.told[-1] == 700 * MEBI
        memory.occupy(0)
        assert card.told[-1] == 0
        assert (memory.live(), memory.peak()) == (100 * MEBI, 101 * MEBI)
        memory.reset_peak()
        card.ooms += 3
        assert memory.failures() == 3
        memory.fragment(None)
        with pytest.raises(UsageError, match=r"2\.0 GiB is more than cuda:0 has"):
            memory.resize(2 << 30)
        memory.resize(None)
        assert card.fraction == 1.0
        memory.occupy(300 * MEBI)
        memory.resize(100 * MEBI)
    assert card.told[-1] == -1, "its process has ended"
    assert card.fraction == 1.0


def test_two_who_share_a_gpu_have_what_the_third_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, free=900 * MEBI)
    with Confined() as device:
        device.leave(300 * MEBI)
        assert card.told[-1] == 600 * MEBI
        with CudaLimit(shared=True) as memory:
            assert memory.others() == 0
            card.ours = 100 * MEBI
            assert memory.others() == 0, "what we have taken ourselves"
            card.free -= 50 * MEBI
            assert memory.others() == 50 * MEBI
            memory.share(400 * MEBI)
            assert card.free - card.ours - card.told[-1] == 150 * MEBI
            assert memory.others() == 400 * MEBI - 100 * MEBI - 150 * MEBI
        device.leave(300 * MEBI, held=100 * MEBI)
        assert card.told[-1] == 540 * MEBI, (
            "750 MiB are free, and 100 of the 300 are held already; in blocks of 20 MiB"
        )
        device.leave(None)
        assert card.told[-1] == 0
    assert card.told[-1] == -1


def test_a_gpu_that_others_use_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, free=700 * MEBI)
    with pytest.raises(UsageError, match=r"300\.0 MiB of cuda:1 are in use"):
        CudaLimit("cuda:1").__enter__()


@pytest.mark.gpu
def test_on_a_gpu_memory_is_broken_up_unless_segments_are_expandable() -> None:  # cuda-only
    def had(size: int) -> bool:
        try:
            torch.empty(size, dtype=torch.uint8, device=memory.device)
        except torch.OutOfMemoryError:
            return False
        return True

    with CudaLimit() as memory:
        torch.zeros(1, device=memory.device)
        memory.fragment(256 * MEBI)
        memory.resize(4 << 30)
        assert (
            torch.cuda.memory_reserved(memory.device) - memory.live() > 3 << 30
            or memory.expandable()
        )
        assert had(200 * MEBI)
        assert had(1 << 30) is memory.expandable()
        memory.fragment(None)
        assert had(3 << 30)


@pytest.mark.gpu
def test_on_a_gpu_the_limit_strikes_and_the_co_tenant_comes_and_goes() -> None:  # cuda-only
    with CudaLimit() as memory:
        torch.zeros(1, device=memory.device)
        memory.resize(1 << 30)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 << 30, dtype=torch.uint8, device=memory.device)
        assert memory.failures() == 1
        memory.occupy(512 * MEBI)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(768 * MEBI, dtype=torch.uint8, device=memory.device)
        memory.occupy(0)
        kept = torch.empty(768 * MEBI, dtype=torch.uint8, device=memory.device)
        assert memory.live() >= kept.numel()
        del kept
    assert torch.empty(2 << 30, dtype=torch.uint8, device=memory.device).numel() == 2 << 30
