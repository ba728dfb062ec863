import contextlib
import gc
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs.rollback.saved_tensors import SavedTensorTable, close_checkpoints
from tests.helpers.steps import elastic, off_by, there, whole_gradient
from tests.helpers.strikes import AtLine, until_clean

pytestmark = pytest.mark.injectable

F64 = torch.float64


def held(table: SavedTensorTable) -> int:
    """Return the number of tensors that are held now."""
    return sum(
        1
        for reference in table._slots
        if (slot := reference()) is not None and slot.tensor is not None
    )


class OnCpu(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            # torch has no annotation there
            return super().forward(x)  # type: ignore[no-untyped-call]


# models that the exhaustive steps lack, whose loops use the table, too
MODELS: dict[str, Callable[[], nn.Module]] = {
    "in-place": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3), nn.ELU(inplace=True)
    ),
    "save-on-cpu": lambda: nn.Sequential(
        nn.Linear(4, 4), OnCpu(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_with_and_without_the_table(name: str) -> None:
    torch.manual_seed(0)
    model, x, table = MODELS[name]().double(), torch.randn(5, 4, dtype=F64), SavedTensorTable()
    expected = whole_gradient(model, lambda twin: twin(x).square().sum())
    with table:
        loss = model(x).square().sum()
    loss.backward()
    assert off_by(model, expected) == 0
    assert held(table) == 0  # backward frees saved tensors one by one, as it does without the table


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
def test_a_change_in_place_is_noticed_as_autograd_notices_it(
    step: Callable[[Tensor, Tensor], Tensor],
) -> None:
    for table in (None, SavedTensorTable()):
        w = torch.full((3,), 2.0, dtype=F64, requires_grad=True)
        with contextlib.nullcontext() if table is None else table:
            loss = step(w, w * 3).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
        assert "[torch.DoubleTensor [3]]" in str(caught.value)
        assert "is at version 1; expected version 0 instead" in str(caught.value)


def test_a_retained_graph_can_be_used_twice() -> None:
    w = torch.randn(3, dtype=F64, requires_grad=True)
    table = SavedTensorTable()
    with table:
        loss = w.exp().square().sum()
    loss.backward(retain_graph=True)
    assert held(table) > 0
    loss.backward()
    assert torch.allclose(there(w.grad), 4 * (2 * w.detach()).exp(), rtol=1e-14)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_graphs_hold_no_cycle_and_the_table_nothing_of_one_that_died() -> None:
    w, table = torch.ones(3, requires_grad=True), SavedTensorTable()
    gc.disable()
    try:
        with table:
            y = w.exp()  # the node saves its own output
            alive, before = weakref.ref(y), held(table)
            del y
            assert (alive(), before, held(table)) == (None, 1, 0)
    finally:
        gc.enable()


def test_the_table_keeps_nothing_of_earlier_blocks() -> None:
    w, table = torch.ones(3, requires_grad=True), SavedTensorTable()
    for _ in range(50):
        with table:
            w.exp().sum().backward()
    assert len(table._slots) <= 2


def test_the_use_of_an_emptied_graph_is_explained() -> None:
    w = torch.ones(3, requires_grad=True)
    table = SavedTensorTable()
    with table:
        loss = w.exp().sum()
    table.empty()
    assert held(table) == 0  # although the loss is held
    with pytest.raises(
        RuntimeError, match=r"attempt that ran out of memory.*micro\.backward\(loss\)"
    ):
        loss.backward()
    assert w.grad is None
    with table:  # it can be entered again
        loss = w.exp().sum()
    assert held(table) == 1
    loss.backward()
    assert torch.equal(there(w.grad), w.detach().exp())


@pytest.mark.parametrize("own_graph", [True, False])
def test_a_function_transform_is_explained_and_works_without_the_table(
    own_graph: bool,
) -> None:
    model, batch = nn.Linear(4, 1).double(), torch.randn(4, 4, dtype=F64)
    mbs = elastic(model, micro_batch_size=2)
    with (
        pytest.raises(RuntimeError, match="saved tensor hooks")
        if own_graph
        else contextlib.nullcontext() as caught
    ):
        for micro in mbs.micro_batches(batch, own_graph=own_graph):
            with micro:
                slope = torch.func.grad(lambda y: y.square().sum())(micro.data)
                micro.backward((slope.sum() + model(micro.data).square().sum()) / len(micro))
    if caught is not None:
        assert any("own_graph=False" in note for note in caught.value.__notes__)
    wanted = whole_gradient(model, lambda twin: twin(batch).square().sum() / 4)
    assert off_by(model, [None, None] if own_graph else wanted) <= 1e-13


def test_an_interrupt_at_any_line_leaves_no_hooks_behind() -> None:
    top = torch._C._autograd._top_saved_tensors_default_hooks
    files = "rollback/saved_tensors.py", "autograd/graph.py"
    for strike in until_clean(lambda n: AtLine(n, *files), least=5):
        table = SavedTensorTable()
        with strike, contextlib.suppress(KeyboardInterrupt):
            table.__enter__()
            table.__exit__(None, None, None)
        table.__exit__(None, None, None)  # as a call does that ends
        assert top(True) is None, strike.hits
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            table.__exit__(None, None, None)
            assert top(True) is not None, "those of others stay"


KEPT: list[Any] = []

# torch's checkpoint as it was before 2.13, with a reference that keeps its generator alive
AS_BEFORE_TORCH_2_13 = """
def checkpoint(function, x):
    gen = around(function)
    KEPT.append(gen)
    next(gen)
    ret = function(x)
    next(gen, None)
    return ret

def around(function):
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        yield
"""


def test_hooks_of_a_checkpoint_that_fails_are_gone_when_its_attempt_is_over() -> None:
    torchs: dict[str, Any] = {
        "__name__": "torch.utils.checkpoint",
        "KEPT": KEPT,
        "saved_tensors_hooks": torch.autograd.graph.saved_tensors_hooks,
    }
    exec(AS_BEFORE_TORCH_2_13, torchs)
    inner, fails = nn.Linear(4, 4).double(), [True, True]

    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torchs["checkpoint"](lambda x: torchs["checkpoint"](self.run, x), x)

        def run(self, x: Tensor) -> Any:
            if fails:
                fails.pop()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            return inner(x)

    model, x = Nested(), torch.randn(4, 4, dtype=F64)
    wanted = whole_gradient(inner, lambda twin: twin(x).square().mean())
    mbs = elastic(nn.ModuleList([model, inner]), micro_batch_size=4)
    try:
        for micro in mbs.micro_batches(x):
            with micro:
                micro.backward(model(micro.data).square().mean())
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    finally:
        KEPT.clear()
    assert off_by(inner, wanted) <= 1e-12


def test_an_error_without_a_checkpoint_has_nothing_to_close() -> None:
    with pytest.raises(ValueError, match="other") as caught:
        raise ValueError("other")
    close_checkpoints(caught.value)


def test_an_error_keeps_no_input_of_a_checkpoint_alive() -> None:
    torchs: dict[str, Any] = {"__name__": "torch.utils.checkpoint"}
    exec("def checkpoint(function, x):\n    return function(x)", torchs)

    def fails(x: Tensor) -> Any:
        raise ValueError("other")

    x = torch.ones(3)
    seen = weakref.ref(x)
    with pytest.raises(ValueError, match="other") as caught:
        torchs["checkpoint"](fails, x)
    close_checkpoints(caught.value)
    traceback.clear_frames(caught.value.__traceback__)
    del x
    assert seen() is None
