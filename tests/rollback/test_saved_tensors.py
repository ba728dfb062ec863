from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elastic_mbs import ElasticMBS, MemoryOptions
from elastic_mbs.memory import MemoryBudget
from elastic_mbs.rollback.saved_tensors import SavedTensorTable

pytestmark = pytest.mark.injectable

F64 = torch.float64
MIB = 1024**2


def held(table: SavedTensorTable) -> int:
    """How many tensors are held now."""
    return sum(1 for reference in table._slots if (slot := reference()) is not None and slot.tensor is not None)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x.unsqueeze(0)).chunk(3, -1)
        return functional.scaled_dot_product_attention(q, k, v).squeeze(0)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return torch.tanh(out)


class OnCpu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: Tensor = self.inner(x)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)),
    "in-place": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3), nn.ELU(inplace=True)),
    "norms": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.LayerNorm(6)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)),
    "attention": Attention,
    "checkpoint": lambda: nn.Sequential(nn.Linear(4, 4), Checkpointed(False)),
    "reentrant": lambda: nn.Sequential(nn.Linear(4, 4), Checkpointed(True)),
    "save-on-cpu": lambda: nn.Sequential(nn.Linear(4, 4), OnCpu(), nn.Linear(4, 2)),
}


def gradients(build: Callable[[], nn.Module], table: SavedTensorTable | None) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(5, 4, dtype=F64)
    with contextlib.nullcontext() if table is None else table:
        loss = model(x).square().sum()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_with_and_without_the_table(name: str) -> None:
    table = SavedTensorTable()
    expected, found = gradients(MODELS[name], None), gradients(MODELS[name], table)
    assert len(expected) == len(found) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert held(table) == 0  # backward frees saved tensors one by one, as it does without the table


def test_a_table_can_be_entered_again_after_it_was_emptied() -> None:
    table = SavedTensorTable()
    w = torch.ones(3, dtype=F64, requires_grad=True)
    with table:
        failed = w.exp().sum()
    table.empty()
    with table:
        loss = w.exp().sum()
    assert held(table) == 1
    loss.backward()
    assert w.grad is not None
    assert torch.equal(w.grad, w.detach().exp())
    del failed


def test_outside_the_block_nothing_is_kept() -> None:
    table = SavedTensorTable()
    w = torch.ones(3, requires_grad=True)
    with table:
        pass
    loss = w.exp().sum()
    table.empty()
    loss.backward()
    assert w.grad is not None


def test_the_block_lets_errors_through() -> None:
    with pytest.raises(KeyError), SavedTensorTable():
        raise KeyError
    assert torch.ones(1, requires_grad=True).exp().grad_fn is not None


# ---------------------------------------------------------------------- what autograd promises


def changed_input(w: Tensor, y: Tensor) -> Tensor:
    z = y.square()
    y.add_(1)
    return z


def changed_output(w: Tensor, y: Tensor) -> Tensor:
    z = y.exp()
    z.mul_(2)
    return z


def changed_leaf(w: Tensor, y: Tensor) -> Tensor:
    z = y * w
    with torch.no_grad():
        w.add_(1)
    return z


@pytest.mark.parametrize("step", [changed_input, changed_output, changed_leaf])
def test_a_change_in_place_is_noticed_as_autograd_notices_it(step: Callable[[Tensor, Tensor], Tensor]) -> None:
    messages = []
    for table in (None, SavedTensorTable()):
        w = torch.full((3,), 2.0, dtype=F64, requires_grad=True)
        with contextlib.nullcontext() if table is None else table:
            loss = step(w, w * 3).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
        messages.append(str(caught.value))
    assert "[torch.DoubleTensor [3]]" in messages[0]
    assert "is at version 1; expected version 0 instead" in messages[0]
    assert "[torch.DoubleTensor [3]]" in messages[1]
    assert "is at version 1; expected version 0 instead" in messages[1]


def test_a_retained_graph_can_be_used_twice() -> None:
    w = torch.randn(3, dtype=F64, requires_grad=True)
    table = SavedTensorTable()
    with table:
        loss = w.exp().square().sum()
    loss.backward(retain_graph=True)
    assert held(table) > 0
    loss.backward()
    assert w.grad is not None
    assert torch.allclose(w.grad, 4 * (2 * w.detach()).exp(), rtol=1e-14)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_gives_the_same_gradients() -> None:
    found = []
    for table in (None, SavedTensorTable()):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double(), torch.randn(3, 4, dtype=F64, requires_grad=True)
        with contextlib.nullcontext() if table is None else table:
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 2
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_graphs_hold_no_cycle() -> None:
    w = torch.ones(3, requires_grad=True)
    gc.disable()
    try:
        with SavedTensorTable():
            y = w.exp()  # the node saves its own output
        alive = weakref.ref(y)
        del y
        assert alive() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------- letting go


@pytest.mark.parametrize("owned", [False, True], ids=["without", "with"])
def test_emptying_frees_the_memory_although_the_loss_is_held(owned: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    x = torch.randn(2048, 64)  # half a MiB for each activation
    table = SavedTensorTable()
    with MemoryBudget("1GiB", track=(model, x)) as budget:
        rest = budget.live
        with table if owned else contextlib.nullcontext():
            loss = model(x).square().sum()
        assert budget.live - rest >= 4 * MIB // 2
        table.empty()
        assert held(table) == 0
        if owned:
            assert budget.live - rest <= 64  # the loss itself
        else:
            assert budget.live - rest >= 4 * MIB // 2
    assert loss.grad_fn is not None


def test_what_save_on_cpu_saved_is_not_in_the_table() -> None:
    w = torch.randn(3, dtype=F64, requires_grad=True)
    table = SavedTensorTable()
    with table, torch.autograd.graph.save_on_cpu():
        loss = w.exp().sum()
    assert held(table) == 0
    table.empty()
    loss.backward()
    assert w.grad is not None
    assert torch.equal(w.grad, w.detach().exp())


def test_the_use_of_an_emptied_graph_is_explained() -> None:
    w = torch.ones(3, requires_grad=True)
    table = SavedTensorTable()
    with table:
        loss = w.exp().sum()
    table.empty()
    with pytest.raises(RuntimeError, match="attempt that ran out of memory") as caught:
        loss.backward()
    assert "micro.backward(loss)" in str(caught.value)
    assert w.grad is None


def test_a_table_holds_nothing_of_a_graph_that_died() -> None:
    w = torch.ones(3, requires_grad=True)
    table = SavedTensorTable()
    with table:
        loss = w.exp().sum()
        alive = held(table)
        del loss
        assert (alive, held(table)) == (1, 0)


# ---------------------------------------------------------------------- the door that installs it


def transformed(model: nn.Module, x: Tensor) -> Tensor:
    slope: Tensor = torch.func.grad(lambda y: y.square().sum())(x)
    out: Tensor = model(x)
    return slope.sum() + out.square().sum()


def test_a_function_transform_inside_the_block_says_what_is_wrong() -> None:
    model = nn.Linear(4, 1).double()
    with (
        ElasticMBS(model, micro_batch_size=2, memory=MemoryOptions(monitor_interval=0)) as mbs,
        pytest.raises(RuntimeError, match="saved tensor hooks") as caught,
    ):
        for micro in mbs.micro_batches(torch.randn(4, 4, dtype=F64)):
            with micro:
                micro.backward(transformed(model, micro.data) / 2)
    assert any("own_graph=False" in note for note in caught.value.__notes__)
    assert all(p.grad is None for p in model.parameters())


def test_a_function_transform_works_without_the_table() -> None:
    model, batch = nn.Linear(4, 1).double(), torch.randn(4, 4, dtype=F64)
    with ElasticMBS(model, micro_batch_size=2, memory=MemoryOptions(monitor_interval=0)) as mbs:
        for micro in mbs.micro_batches(batch, own_graph=False):
            with micro:
                micro.backward(transformed(model, micro.data) / len(micro))
    found = model.weight.grad
    model.weight.grad = None
    (model(batch).square().sum() / 4).backward()
    assert found is not None
    assert model.weight.grad is not None
    assert torch.allclose(found, model.weight.grad, rtol=1e-13)
