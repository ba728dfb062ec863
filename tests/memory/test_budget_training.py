from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from elastic_mbs.memory import MemoryBudget

KIB = 1024
MIB = 1024**2


def net(width: int = 64, depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_out_of_memory_in_a_step_returns_to_rest(phase: str) -> None:
    torch.manual_seed(0)
    model = net()
    x = torch.randn(256, 64)
    phases: list[str] = []

    def step() -> None:
        phases.append("forward")
        loss = model(x).square().mean()
        phases.append("backward")
        loss.backward()
        phases.append("done")

    with MemoryBudget("1GiB", track=(model, x)) as budget:
        step()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        rest = budget.live
        budget.reset_peak()
        with torch.no_grad():
            model(x)
        forward_alone = budget.peak
        budget.reset_peak()
        model(x).square().mean()
        with_graph = budget.peak
        budget.limit = forward_alone if phase == "forward" else with_graph
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                step()
            assert phases[-1] == phase
            model.zero_grad()
            assert budget.live == rest
        budget.limit = "1GiB"
        step()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None)
    assert budget.ooms == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_lowers_the_peak_and_may_fail_inside_the_recomputation(reentrant: bool) -> None:
    model = nn.ModuleList(net(depth=4) for _ in range(4))
    x = torch.randn(256, 64, requires_grad=True)

    def step(use: bool) -> None:
        h = x
        for layer in model:
            h = checkpoint(layer, h, use_reentrant=reentrant) if use else layer(h)
        h.sum().backward()

    with MemoryBudget("1GiB", track=(model, x)) as budget:
        peaks = []
        for use in (False, True):
            budget.reset_peak()
            step(use)
            peaks.append(budget.peak)
            model.zero_grad()
            x.grad = None
        assert peaks[1] < peaks[0]
        rest = budget.live
        budget.limit = peaks[1] - 1
        with pytest.raises(torch.OutOfMemoryError):
            step(True)
        model.zero_grad()
        x.grad = None
        assert budget.live == rest


def test_autocast_copies_are_counted() -> None:
    model = nn.Linear(64, 64)
    x = torch.randn(8, 64)
    with MemoryBudget(MIB, track=(model, x)) as budget:
        rest = budget.live
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
            assert budget.live >= rest + 8 * 64 * 2 + 64 * 64 * 2  # the output, and the weight's copy in the cache of autocast
        y.float().sum().backward()
        del y
        model.zero_grad()
        assert budget.live == rest


def test_torch_func_works_inside() -> None:
    x = torch.randn(5, 3)
    expected = torch.func.vmap(torch.func.grad(lambda r: (r * r).sum()))(x)
    with MemoryBudget(MIB, track=x) as budget:
        result = torch.func.vmap(torch.func.grad(lambda r: (r * r).sum()))(x)
        assert budget.live == 120
        jacobian = torch.func.jacrev(lambda r: r * 2)(x)
        assert jacobian.shape == (5, 3, 5, 3)
        with pytest.raises(torch.OutOfMemoryError):
            torch.func.vmap(lambda r: r.new_zeros(MIB) + r.sum())(x)
    assert torch.equal(result, expected)


def test_optimizer_state_made_inside_is_counted() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryBudget(MIB, track=(model, optimizer)) as budget:
        model(torch.randn(2, 64)).sum().backward()
        before = budget.live
        optimizer.step()
        parameters = sum(p.numel() for p in model.parameters())
        assert budget.live - before >= 2 * 4 * parameters
        assert MemoryBudget(MIB, track=(model, optimizer)).live == budget.live


class Squares(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        # a worker is another process: its scratch memory is not on the virtual device
        return torch.full((64, KIB), float(index)).mean(0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_works_inside(workers: int) -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=workers, multiprocessing_context="fork" if workers else None)
    with MemoryBudget("64KiB" if workers else "1MiB") as budget:
        assert [float(batch[1].mean() + 1) for batch in loader] == [2.0, 6.0]
    assert budget.ooms == 0


@pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
    reason="this torch takes no higher-order operator under a mode that it does not know",
)
def test_operators_that_torch_compiles_by_itself_work_inside() -> None:
    x = torch.ones(4)
    with MemoryBudget(MIB) as budget:
        assert torch.equal(torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)), x * 2)
    assert budget.ooms == 0


def test_compiled_functions_run_eagerly_inside() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    double: Callable[[Tensor], Tensor] = torch.compile(lambda x: x * 2, backend=backend)
    with MemoryBudget(MIB) as budget:
        y = double(torch.ones(256))
        assert budget.live == KIB
    assert not graphs
    assert float(y.sum()) == 512
