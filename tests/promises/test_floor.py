"""The floor of a piece that cannot be cut: tried again where there is room, and honest figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import (
    CallFailed,
    ElasticMBS,
    Event,
    Headroom,
    MemoryBudget,
    MemoryOptions,
    MicroBatchFloorError,
    OutOfMemory,
)
from elastic_mbs.escalation.largest import LargestTensors, names_of
from elastic_mbs.events import format_bytes
from elastic_mbs.memory.budget import on_host
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import (
    FailOn,
    cross_entropy,
    elastic,
    failing,
    mlp,
    off_by,
    pairs,
    whole_gradient,
)
from tests.helpers.strikes import until_clean

MIB, KIB = 1024**2, 1024
CPU = torch.device("cpu")


class _Plenty:
    """A sensor that sees all memory free at every look."""

    def read(self) -> Headroom:
        return Headroom(1024 * MIB, 1024 * MIB, 0, "test", 0.0)


@pytest.mark.parametrize("failures", [2, 5])
def test_memory_that_is_short_for_a_moment_at_the_floor_ends_nothing(failures: int) -> None:
    # At every look all is free: a neighbour's peaks of some milliseconds.
    model, batch = mlp(), pairs(1)
    mbs = elastic(model, sensor=_Plenty(), wait_for_memory=30.0)
    naps = list[float]()
    mbs._resources.sleep = naps.append
    fail = FailOn(
        *range(1, failures + 1),
        error=lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB."),
    )
    assert mbs.backward(failing(model, fail), batch).ooms == failures
    assert naps == [0.25] * (failures - 1)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12


def test_figures_at_the_floor_do_not_contradict_each_other() -> None:
    # The look after the failure shows what the failed attempt had held as free.
    model, batch = nn.Linear(1000, 1000), torch.randn(1, 1000)
    with MemoryBudget("64MiB", track=(model, batch)) as budget:
        mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0, wait_for_memory=0))
        budget.limit = budget.live + 1_500_000

        def loss_fn(x: Tensor) -> Tensor:
            return sum((model(x).expand(200, -1).exp().sum() for _ in range(4)), x.sum())

        with pytest.raises(MicroBatchFloorError) as caught:
            mbs.backward(loss_fn, batch)
    text = str(caught.value)
    asked = re.search(r"asked for ([\d.]+) KiB on top of ([\d.]+) MiB that this process held", text)
    assert asked, text
    assert float(asked[1]) / 1024 + float(asked[2]) > budget.limit / MIB
    assert "; without the attempt 1.4 MiB of 64.0 MiB were free" in text
    assert "enough for it" not in text


@pytest.mark.no_oom_injection
def test_a_rollback_takes_no_memory_so_each_failure_has_its_event() -> None:
    survived = 0
    for inject in until_clean(lambda n: InjectOOM(at=range(n, n + 4)), stride=2, least=10):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
        events, batch = list[Event](), pairs(2)
        mbs = elastic(model, micro_batch_size=2, min_micro_batch_size=2, on_event=events.append)
        before = [buffer.clone() for buffer in model.buffers()]
        try:
            with inject:
                result = mbs.backward(cross_entropy(model), batch)
        except MicroBatchFloorError:
            failed = sum(event.ooms for event in events if isinstance(event, CallFailed))
            assert all(map(torch.equal, before, model.buffers()))
        else:
            failed = result.ooms
            survived += failed > 0
        assert sum(isinstance(event, OutOfMemory) for event in events) == failed, inject.hits
    assert survived > 3


# ---------------------------------------------------------------------- who took the memory

CLASSES, LENGTH = 1000, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(functional.gelu(self.up(x)))  # the line of Block
        return found


def words() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    body = nn.Sequential(*(Block() for _ in range(3)))
    model = nn.Sequential(nn.Embedding(CLASSES, 16), body, nn.Linear(16, CLASSES))
    return model, torch.randint(0, CLASSES, (1, LENGTH))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids)  # the line of the model
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())  # the line of the loss


def line_of(text: str) -> str:
    """Return the place of a line of this file, as an error names it."""
    source = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{1 + next(n for n, line in enumerate(source) if text in line)}"


def refused(limit: int, *escalate: str) -> str:
    """Return the text of the error where `limit` bytes are free beside the model."""
    model, ids = words()
    with MemoryBudget("1GiB", track=(model, ids)) as budget:
        mbs = elastic(model, escalate=escalate, sensor=None)
        budget.limit = budget.live + limit
        with pytest.raises(MicroBatchFloorError) as caught:
            mbs.backward(lambda piece: loss_of(model, piece), ids)
    return str(caught.value)


@pytest.mark.parametrize(
    ("limit", "module", "line"),
    [
        (2 * MIB, "'1.", "# the line of Block"),
        (4 * MIB, "'2'", "# the line of the model"),
        (6 * MIB, "", "# the line of the loss"),
    ],
)
def test_the_error_names_the_module_and_the_line_that_asked(
    limit: int, module: str, line: str
) -> None:
    asked = re.search(r"It asked for [^(]*\((.*?)\); without", refused(limit))
    assert asked
    assert module in asked[1]
    assert asked[1].endswith(line_of(line))


def test_an_error_in_backward_names_the_largest_tensors_and_where_they_are_from() -> None:
    text = refused(8 * MIB)
    assert "(in backward); without" in text
    largest = text.partition("The largest of its tensors: ")[2].partition(". ")[0].split("; ")
    logits = f"float32 ({LENGTH}, {CLASSES}), {LENGTH * CLASSES * 4 / MIB:.1f} MiB"
    assert largest[0].startswith(logits)
    assert largest[0].endswith(line_of("# the line of the loss"))
    hidden = f"float32 ({LENGTH}, 256), {LENGTH * 256 * 4 / KIB:.1f} KiB, module '1."
    assert largest[-1].startswith(hidden)
    assert largest[-1].endswith(line_of("# the line of Block"))


@pytest.mark.parametrize("door", ["evaluate", "backward"])
def test_an_error_without_a_line_of_the_user_says_in_backward_only_of_backward(door: str) -> None:
    model, x = nn.Sequential(nn.Linear(16, CLASSES)), torch.randn(1, LENGTH, 16)
    with MemoryBudget("1GiB", track=(model, x)) as budget:
        mbs = elastic(model, sensor=None)
        budget.limit = budget.live + MIB
        with pytest.raises(MicroBatchFloorError) as caught:
            getattr(mbs, door)(model, x)
    text = str(caught.value)
    assert "(module '0'); without" in text
    assert "in backward" not in text


@pytest.mark.parametrize(
    ("limit", "module", "values"),
    # a block's own: the activation and the sum, without the outputs of its layers; and of the head
    # the request alone, which failed
    [(2 * MIB, "1.0", LENGTH * (256 + 16)), (4 * MIB, "2", LENGTH * CLASSES)],
)
def test_the_error_says_what_one_sample_needs_in_one_module(
    limit: int, module: str, values: int
) -> None:
    share = f"One sample needs at least {format_bytes(4 * values)} in module {module!r} alone"
    assert share in refused(limit)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.all(x).chunk(3, -1)
        weights = (q @ k.mT).softmax(-1)  # the line of Attention
        found: Tensor = x + self.out(weights @ v)
        return found


def test_a_block_that_runs_again_in_backward_is_the_module_of_its_tensors() -> None:
    # Backward calls its forward by itself: no call of the module is on the stack.
    model, x = nn.Sequential(*(Attention() for _ in range(4))), torch.randn(1, LENGTH, 16)
    nbytes = LENGTH * LENGTH * 4
    with MemoryBudget("1GiB", track=(model, x)) as budget:
        mbs = elastic(model, escalate=("checkpoint",), sensor=None)
        budget.limit = budget.live + 5 * nbytes // 2
        with pytest.raises(MicroBatchFloorError) as caught:
            mbs.backward(lambda piece: model(piece).square().mean(), x)
    text = str(caught.value)
    assert "checkpoint (4 of 4 blocks)" in text
    largest = text.partition("The largest of its tensors: ")[2].partition("; ")[0]
    assert f"float32 (1, {LENGTH}, {LENGTH}), {format_bytes(nbytes)}, module '3' at" in largest
    assert largest.endswith(line_of("# the line of Attention"))
    share = re.search(r"One sample needs at least (.*?) MiB in module '3' alone", text)
    assert share
    assert float(share[1]) >= 1


def test_the_error_says_what_each_way_would_need() -> None:
    limit = 3 * MIB // 2
    text = refused(limit, "logits", "checkpoint")
    model, _ = words()
    held = sum(parameter.nbytes for parameter in model.parameters()) + LENGTH * 8
    needs = re.search(r"This process needs at least (.*?)\. Ways out", text)
    assert needs
    sizes, ways = zip(*(each.split(" MiB") for each in needs[1].split(", ")), strict=True)
    parts = [f" with logits and checkpoint ({count} of 3 blocks)" for count in (1, 2, 3)]
    assert list(ways) == ["", " with logits", *parts]
    assert all(float(size) * MIB > held + limit - MIB // 20 for size in sizes)


def test_a_look_at_the_tensors_changes_no_gradient_and_keeps_nothing_alive() -> None:
    peaks, found = [], []
    for looked in (False, True):
        model, ids = words()
        look = LargestTensors(lambda model=model: names_of([model]), [CPU])  # type: ignore[misc]
        with MemoryBudget("1GiB", track=(model, ids)) as budget:
            if looked:
                look.__enter__()
            loss_of(model, ids).backward()
            look.__exit__(None, None, None)
            look.__exit__(None, None, None)
            peaks.append(budget.peak)
            found.append([parameter.grad for parameter in model.parameters()])
        assert {tensor.origin.line for tensor in look.alive()} == ({""} if looked else set())
    assert peaks[0] == peaks[1]
    assert all(map(torch.equal, *found))


def test_copies_on_the_host_are_none_of_the_largest_tensors() -> None:
    look = LargestTensors(dict, [CPU])
    with MemoryBudget("1GiB"), look:
        kept = [torch.empty(512), torch.empty(2048, device="meta")]
        with on_host():
            kept.append(torch.empty(1024))
    assert [tensor.shape for tensor in look.alive()] == [(512,)]
    assert len(kept) == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_failure_at_the_floor_is_told_as_it_is_where_a_step_makes_nested_tensors() -> None:
    def step(rows: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor([torch.ones(512), torch.ones(1024)])
        raise torch.OutOfMemoryError(f"out of memory, with {nested.numel()} values nested")

    with pytest.raises(MicroBatchFloorError, match="1536 values nested"):
        elastic(nn.Linear(1, 1)).evaluate(step, torch.ones(1, 1))


def test_offloaded_tensors_are_not_named_among_the_largest() -> None:
    text = refused(3 * MIB // 2, "offload")
    largest = text.partition("The largest of its tensors: ")[2].partition(". ")[0].split("; ")
    # The head asks for its logits. The activations of the blocks before it wait on the host.
    assert len(largest) == 1
    assert largest[0].startswith(f"float32 (1, {LENGTH}, 16), {LENGTH * 16 * 4 / KIB:.1f} KiB")


def test_nothing_is_looked_at_before_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LargestTensors) -> None:
        raise AssertionError

    monkeypatch.setattr(LargestTensors, "__enter__", refuse)
    model, batch = mlp(), pairs(8)
    fail = FailOn(1, 2, 3)  # at 8, 4 and 2 samples
    assert elastic(model).backward(failing(model, fail), batch).ooms == 3
    with pytest.raises(AssertionError):
        elastic(model).backward(failing(model, FailOn(1, 2, 3, 4)), batch)
