"""Running out under a MemoryBudget: which operations fail, what they leave, and training under it."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from elastic_mbs import ElasticMBS, RecoveryOptions
from elastic_mbs.errors import UsageError
from elastic_mbs.memory import MemoryBudget

KIB = 1024
MIB = 1024**2


def block(kib: int = 1) -> Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def net(width: int = 64, depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def test_the_operation_that_passes_the_limit_raises_and_leaves_nothing() -> None:
    with MemoryBudget("10MiB") as budget:
        kept = torch.empty(9 * MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(2 * MIB, dtype=torch.uint8)
        assert str(caught.value) == "virtual device out of memory. Tried to allocate 2.00 MiB. Budget 10.00 MiB, of which 9.00 MiB is in use."
        assert budget.live == budget.peak == 9 * MIB
        assert budget.ooms == 1
        assert torch.empty(MIB, dtype=torch.uint8).numel() == MIB  # exactly full is not over
        del kept


@pytest.mark.parametrize(("size", "words"), [(100, "100 bytes"), (1536, "1.50 KiB"), (3 * 1024**3, "3.00 GiB")])
def test_the_message_has_a_unit_that_fits(size: int, words: str) -> None:
    text = re.escape(f"allocate {words}. Budget 10 bytes, of which 0 bytes is in use")
    with MemoryBudget(10, device="meta"), pytest.raises(torch.OutOfMemoryError, match=text):
        torch.empty(size, dtype=torch.uint8, device="meta")


def test_the_error_keeps_no_tensor_of_the_operation() -> None:
    def fail() -> BaseException:
        x = torch.empty(KIB)
        gone.append(weakref.ref(x))
        try:
            (x * 2).unsqueeze(0)
        except torch.OutOfMemoryError as error:
            return error
        raise AssertionError("nothing failed")

    gone: list[weakref.ref[Tensor]] = []
    with MemoryBudget("6KiB") as budget:
        error = fail()
        trace, seen = error.__traceback__, 0
        while trace is not None:
            if trace.tb_frame.f_code.co_name == "__torch_dispatch__":
                seen += 1
                assert not {name for name, value in trace.tb_frame.f_locals.items() if isinstance(value, Tensor | tuple | list)} - {"types"}
            trace = trace.tb_next
        assert seen == 1
        error.__traceback__ = None
        assert gone[0]() is None
        assert budget.live == 0


def test_outputs_in_lists_are_dropped_too() -> None:
    x = torch.empty(2, KIB)
    with MemoryBudget("12KiB", track=x) as budget:
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 8\.00 KiB"):
            torch._foreach_mul([x[0], x[1]], 2.0)
        assert budget.live == 8 * KIB


def test_operations_in_place_never_raise() -> None:
    x = block(8)
    with MemoryBudget(1, track=x) as budget:
        x.add_(1).zero_().fill_(2)
        x[:4].copy_(x[4:8])
        torch._foreach_add_([x], 1)
        torch.add(x, 1, out=x)
        assert x[0].t().view(1).shape == (1,)  # views bring no bytes either
    assert budget.ooms == 0
    assert int(x[0]) == 4


def test_a_storage_resized_without_an_operation_does_not_fail_the_write_into_it() -> None:
    x = block(1)
    with MemoryBudget("4KiB", track=x) as budget:
        x.untyped_storage().resize_(8 * KIB)  # as FSDP does before it gathers
        x.zero_()
        assert (budget.live, budget.ooms) == (8 * KIB, 0)
        with pytest.raises(torch.OutOfMemoryError):
            block()


def _sparse(*rows: int) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), torch.ones(len(rows), 2), (6, 2), check_invariants=False)


ENLARGING: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], object]]] = {
    "add_ of sparse": (lambda: _sparse(1, 3), lambda x: x.add_(_sparse(2, 3))),
    "add_ of sparse, coalesced": (lambda: _sparse(1, 3).coalesce(), lambda x: x.sub_(_sparse(2, 3).coalesce())),
    "copy_ of sparse": (lambda: _sparse(1), lambda x: x.copy_(_sparse(2, 3))),
    "out= of sparse": (lambda: _sparse(1), lambda x: torch.add(_sparse(2), _sparse(3), out=x)),
    "resize_": (lambda: torch.ones(3, 2).t(), lambda x: x.resize_(9)),
    "resize_as_": (lambda: torch.ones(3), lambda x: x.resize_as_(torch.empty(9))),
    "set_": (lambda: torch.ones(3), lambda x: x.set_(torch.UntypedStorage(40), 0, (10,), (1,))),
    "out=": (lambda: torch.empty(0), lambda x: torch.add(torch.ones(5), 1, out=x)),
    "two out=": (lambda: torch.empty(0), lambda x: torch.max(torch.ones(5, 2), dim=1, out=(x, torch.empty(0, dtype=torch.long)))),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(("make", "enlarge"), ENLARGING.values(), ids=ENLARGING)
def test_an_operation_that_is_refused_leaves_what_it_was_to_enlarge_as_it_was(
    make: Callable[[], Tensor], enlarge: Callable[[Tensor], object]
) -> None:
    wanted = make()
    enlarge(wanted)
    with MemoryBudget(MIB) as budget:
        x = make()
        before, strides, rest = x.clone(), x.stride() if x.layout is torch.strided else (), budget.live
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError), _Full(budget):
                enlarge(x)
            assert (x.stride() if x.layout is torch.strided else ()) == strides
            assert torch.equal(x.to_dense(), before.to_dense())
            assert budget.live == rest
        enlarge(x)
        assert x.shape == wanted.shape
        assert x.layout is torch.strided or torch.equal(x.to_dense(), wanted.to_dense())


class _Full(TorchDispatchMode):
    """Lets nothing more in once an operation begins that writes to what it may enlarge."""

    def __init__(self, budget: MemoryBudget) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._budget = budget

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        self._budget.limit = 0
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._budget.limit = MIB


class _RefusesSparse(_Full):
    """The same for the first addition to a sparse tensor only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._budget.ooms or func._schema.name != "aten::add_" or not args[0].is_sparse:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("replay", ["auto", "isolate"])
def test_a_sparse_gradient_whose_addition_was_refused_is_added_once(replay: Literal["auto", "isolate"]) -> None:
    # the gradient had the piece already when the limit was seen to be passed, and the replay added it again
    found = []
    for refuses in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(20, 5, sparse=True).double()
        mbs = ElasticMBS(model, micro_batch_size=4, recovery=RecoveryOptions(replay=replay))
        with MemoryBudget("1GiB") as budget, mbs, _RefusesSparse(budget) if refuses else nullcontext():
            mbs.backward(lambda x, model=model: model(x).square().mean(), torch.arange(24).reshape(8, 3) % 20)
        assert budget.ooms == refuses
        assert model.weight.grad is not None
        found.append(model.weight.grad.to_dense())
    torch.testing.assert_close(*found)


def test_the_limit_moves_while_training_runs() -> None:
    with MemoryBudget("4KiB") as budget:
        x = block(3)
        budget.limit = "2KiB"
        assert budget.limit == 2 * KIB
        x.add_(1)
        with pytest.raises(torch.OutOfMemoryError):
            block()
        budget.limit = 8 * KIB
        assert block(5).numel() == 5 * KIB
        with pytest.raises(UsageError, match="-5 bytes"):
            budget.limit = -5
        assert budget.limit == 8 * KIB


def test_the_limit_moves_from_another_thread() -> None:
    failed = threading.Event()
    with MemoryBudget("1GiB") as budget:
        mover = threading.Timer(0.02, lambda: setattr(budget, "limit", 100))
        mover.start()
        while not failed.is_set():
            try:
                block()
            except torch.OutOfMemoryError:
                failed.set()
        mover.join()
    assert budget.ooms == 1


# training


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
