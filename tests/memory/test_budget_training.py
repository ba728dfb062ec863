"""Running out under a MemoryBudget: failing operations, training, nesting, threads and forks."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_mbs import ElasticMBS, RecoveryOptions
from elastic_mbs.errors import MisuseError
from elastic_mbs.memory import MemoryBudget, sensor_for
from tests.helpers.steps import there

KIB = 1024
MIB = 1024**2


def block(kib: int = 1) -> Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_the_operation_that_passes_the_limit_raises_and_leaves_nothing() -> None:
    with MemoryBudget("10MiB") as budget:
        kept = torch.empty(9 * MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(2 * MIB, dtype=torch.uint8)
        assert (
            str(caught.value)
            == "virtual device out of memory. Tried to allocate 2.0 MiB. Budget 10.0 MiB, of "
            "which 9.0 MiB is in use."
        )
        assert budget.live == budget.peak == 9 * MIB
        assert budget.ooms == 1
        assert torch.empty(MIB, dtype=torch.uint8).numel() == MIB  # exactly full is not over
        del kept
    x = torch.empty(2, KIB)
    with MemoryBudget("12KiB", track=x) as budget:
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 8\.0 KiB"):
            torch._foreach_mul([x[0], x[1]], 2.0)
        assert budget.live == 8 * KIB, "a list of outputs neither"


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
                assert not {
                    name
                    for name, value in trace.tb_frame.f_locals.items()
                    if isinstance(value, Tensor | tuple | list)
                } - {"types"}
            trace = trace.tb_next
        assert seen == 1
        error.__traceback__ = None
        assert gone[0]() is None
        assert budget.live == 0


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


def _sparse(*rows: int) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([rows]), torch.ones(len(rows), 2), (6, 2), check_invariants=False
    )


ENLARGING: dict[str, tuple[Callable[[], tuple[Tensor, ...]], Callable[..., object]]] = {
    "add_ of sparse": (lambda: (_sparse(1, 3), _sparse(2, 3)), lambda x, y: x.add_(y)),
    "copy_ of sparse": (lambda: (_sparse(1), _sparse(2, 3)), lambda x, y: x.copy_(y)),
    "out= of sparse": (
        lambda: (_sparse(1), _sparse(2), _sparse(3)),
        lambda x, y, z: torch.add(y, z, out=x),
    ),
    # as FSDP does before it gathers
    "resize_ of a storage": (
        lambda: (torch.zeros(3),),
        lambda x: (x.untyped_storage().resize_(900), x.zero_()),
    ),
    "resize_as_": (lambda: (torch.zeros(3), torch.zeros(9)), lambda x, y: x.resize_as_(y).zero_()),
    "out=": (lambda: (torch.empty(0), torch.ones(5)), lambda x, y: torch.add(y, 1, out=x)),
    "two out=": (
        lambda: (torch.empty(0), torch.ones(5, 2)),
        lambda x, y: torch.max(y, dim=1, out=(x, torch.empty(0, dtype=torch.long))),
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("make", "enlarge"), ENLARGING.values(), ids=ENLARGING)
def test_what_an_operation_enlarges_in_place_fails_the_next_allocation(
    make: Callable[[], tuple[Tensor, ...]], enlarge: Callable[..., object]
) -> None:
    wanted = make()
    enlarge(*wanted)
    with MemoryBudget(MIB) as budget:
        tensors = make()
        budget.limit = budget.live
        enlarge(*tensors)
        assert budget.peak >= budget.live > budget.limit
        assert budget.ooms == 0
        with pytest.raises(torch.OutOfMemoryError):
            block()
        budget.limit = MIB
        assert torch.equal(tensors[0].to_dense(), wanted[0].to_dense())


class _FullFromTheFirstAddition(TorchDispatchMode):
    """Leaves no room from the first addition to a sparse tensor to the first failure."""

    def __init__(self, budget: MemoryBudget) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._budget = budget

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._budget.ooms:
            self._budget.limit = "1GiB"
        elif func._schema.name == "aten::add_" and args[0].is_sparse:
            self._budget.limit = 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("replay", ["auto", "isolate"])
def test_a_sparse_gradient_whose_addition_passes_the_limit_is_added_once(
    replay: Literal["auto", "isolate"],
) -> None:
    # the gradient has the piece already when the limit is seen to be passed: a replay would add it
    # again
    found = []
    for refuses in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(20, 5, sparse=True).double()
        mbs = ElasticMBS(model, micro_batch_size=2, recovery=RecoveryOptions(replay=replay))
        with (
            MemoryBudget("1GiB") as budget,
            mbs,
            _FullFromTheFirstAddition(budget) if refuses else nullcontext(),
        ):
            mbs.backward(
                lambda x, model=model: model(x).square().mean(), torch.arange(24).reshape(8, 3) % 20
            )
        assert budget.ooms == refuses
        found.append(there(model.weight.grad).to_dense())
    torch.testing.assert_close(*found)


def test_torch_func_works_inside() -> None:
    x = torch.randn(5, 3)
    expected = torch.func.vmap(torch.func.grad(lambda r: (r * r).sum()))(x)
    with MemoryBudget(MIB, track=x) as budget:
        result = torch.func.vmap(torch.func.grad(lambda r: (r * r).sum()))(x)
        assert budget.live == 120
        with pytest.raises(torch.OutOfMemoryError):
            torch.func.vmap(lambda r: r.new_zeros(MIB) + r.sum())(x)
    assert torch.equal(result, expected)


class Squares(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        # a worker is another process: its scratch memory is not on the virtual device
        return torch.full((64, KIB), float(index)).mean(0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_works_inside(workers: int) -> None:
    loader = torch.utils.data.DataLoader(
        Squares(),
        batch_size=4,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
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


def test_a_budget_is_entered_once_at_a_time() -> None:
    budget = MemoryBudget(MIB)
    with budget, pytest.raises(MisuseError, match="already active in this thread"):
        budget.__enter__()
    with budget:  # one after the other is fine
        kept = block()
    beside = block(4)
    assert budget.live == KIB, "after the block nothing new is counted, and the old is followed"
    del kept, beside
    assert budget.live == 0
    with pytest.raises(MisuseError, match="not active in this thread"):
        budget.__exit__(None, None, None)


def test_budgets_nest_and_both_count() -> None:
    assert MemoryBudget.current() is None
    with MemoryBudget("8KiB") as outer:
        x = block(2)
        with MemoryBudget("4KiB") as inner:
            assert MemoryBudget.current() is inner
            y = block(3)
            assert (outer.live, inner.live) == (5 * KIB, 3 * KIB)
            with pytest.raises(torch.OutOfMemoryError, match=r"Budget 4\.0 KiB"):
                block(2)
            outer.limit = "5KiB"
            with pytest.raises(torch.OutOfMemoryError, match=r"Budget 5\.0 KiB"):
                block(1)
            assert (outer.live, inner.live) == (5 * KIB, 3 * KIB)
        assert MemoryBudget.current() is outer
        assert (outer.ooms, inner.ooms) == (1, 1)
        del x, y
        assert outer.live == inner.live == 0
    assert MemoryBudget.current() is None


def test_a_budget_is_the_sensor_and_meter_of_its_device() -> None:
    with MemoryBudget(MIB) as budget:
        assert sensor_for("cpu") == (budget, budget)
        assert sensor_for("cuda")[0] is not budget
    with MemoryBudget(MIB, device="cuda") as virtual:
        assert sensor_for("cuda:0") == (virtual, virtual)


def test_a_budget_dies_before_its_tensors() -> None:
    with MemoryBudget(MIB) as budget:
        x = block()
    gone = weakref.ref(budget)
    del budget
    assert gone() is None
    del x


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_not_counted() -> None:
    # in a subprocess of its own: fork and the threads of a test runner do not mix
    code = """
        import os, torch
        from elastic_mbs.memory import MemoryBudget
        with MemoryBudget(100) as budget:
            pid = os.fork()
            if pid == 0:
                x = torch.empty(1000)
                assert budget.live == 0 and MemoryBudget.current() is None
                with MemoryBudget(10_000) as own:
                    y = torch.empty(1000)
                    assert own.live == 4000 and MemoryBudget.current() is own
            else:
                assert os.waitpid(pid, 0)[1] == 0
                assert MemoryBudget.current() is budget
        os._exit(0) if pid == 0 else None  # it leaves the block as its parent does
        print("parent done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, "parent done\n"), done.stderr


def test_two_threads_count_into_one_budget() -> None:
    rounds, kept, errors = 300, [], []
    with MemoryBudget("1GiB") as budget:

        def work() -> None:
            try:
                with budget:
                    for i in range(rounds):
                        x = block()
                        if i % 10 == 0:
                            kept.append(x)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            block(2)
            if kept:
                kept.pop()
            assert budget.live >= 0
        for thread in threads:
            thread.join()
        assert not errors
        assert budget.live == len(kept) * KIB
        kept.clear()
        assert budget.live == 0


def test_the_collector_may_free_storages_inside_the_budget_itself() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me, self.data = self, block()

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with MemoryBudget("1GiB") as budget:
            for _ in range(300):
                Cycle()
            gc.collect()
            assert budget.live == 0
    finally:
        gc.set_threshold(*threshold)


def test_many_dead_storages_do_not_pile_up() -> None:
    x = torch.empty(1000)
    with MemoryBudget(MIB, track=x) as budget:
        for _ in range(1000):
            torch.empty(0)
            torch.empty(1)
        assert len(budget._storages._gone) < 200
        assert len(budget._storages._known) < 200
        assert budget.peak <= 4004
        assert budget.live == 4000
