"""What streaming costs is measured on the same pieces, and more than one piece of the batch on the device is found."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tools import streaming
from tools.streaming import Memory, on_device
from tools.workloads import MAKERS

CPU = torch.device("cpu")


def test_the_batch_on_the_device_is_a_copy_of_the_same_samples() -> None:
    workload = MAKERS["gpt"](2, CPU)
    there = on_device(workload)
    assert there.samples == workload.samples
    assert all(torch.equal(there.batch[key], tensor) and there.batch[key] is not tensor for key, tensor in workload.batch.items())


def test_bytes_are_those_of_all_tensors() -> None:
    assert streaming.nbytes({"a": torch.zeros(3), "b": (torch.zeros(129), 7)}) == 12 + 516


class Card:
    """An allocator's statistics for a batch of six pieces of 100 bytes, of which `there` lie on the device at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, there: int) -> None:
        self.held, self.there, self.highest = 5000, there, 0
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(
            torch.cuda, "memory_stats", lambda device: {"requested_bytes.all.current": self.held, "requested_bytes.all.peak": self.highest}
        )
        monkeypatch.setattr(streaming, "on_device", self.copy)
        monkeypatch.setattr(streaming, "nbytes", lambda batch: 100)

    def copy(self, workload: object) -> object:
        self.held += 600
        return workload

    def step(self, batch: object) -> None:
        on_host = self.held == 5000
        self.highest = self.held + 3000 + (100 * self.there if on_host else 0)


@pytest.mark.parametrize(("there", "fine"), [(0, True), (1, True), (2, False), (6, False)])
def test_more_than_a_piece_on_the_device_is_a_problem(there: int, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, card = MAKERS["tiny"](2, CPU), Card(monkeypatch, there)
    memory = streaming._memory(workload, card.step)
    assert memory == Memory(batch=600, piece=100, host=3000 + 100 * there, device=3600)
    assert memory.added == 100 * there
    assert (memory.problem() is None) is fine


def test_a_problem_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = streaming.measure
    monkeypatch.setattr(streaming, "measure", lambda *args, **kwargs: broken(real(*args, **kwargs)))

    def broken(result: streaming.Result) -> streaming.Result:
        memory = Memory(600, 100, 4000, 3600)
        return replace(result, memory=memory, problem=memory.problem())

    assert streaming.main(["tiny", "--pairs", "2", "--seconds", "0.1", "--step-ms", "0.1", "--json", str(tmp_path / "a" / "it.json")]) == 1
    assert "TOO MUCH" in capsys.readouterr().out
    assert "more than one piece" in (tmp_path / "a" / "it.json").read_text()


@pytest.mark.parametrize("arguments", [["nonsense"], ["--device", "cuda"]])
def test_what_cannot_be_measured_is_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        streaming.main(arguments)
