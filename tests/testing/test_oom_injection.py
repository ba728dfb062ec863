"""The pytest plugin: a suite under out-of-memory errors at random places."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as stack

from elastic_mbs import ElasticMBS, LossError, MemoryBudget
from elastic_mbs.engine import hooks
from elastic_mbs.testing import InjectOOM
from elastic_mbs.testing.faults import PER_CALL, RandomFaults, is_chosen, noting_compile
from tests.helpers.steps import cross_entropy, elastic, loop, mlp, off_by, pairs, whole_gradient

SUITE = """
import pytest
import torch
from torch import nn

from elastic_mbs import ElasticMBS, MemoryOptions, Policy
from elastic_mbs.engine import hooks
from elastic_mbs.memory import NoSensor

torch.set_num_threads(1)
QUIET = MemoryOptions(monitor_interval=0, sensor=NoSensor("none"), wait_for_memory=0)

def run(calls=2, size=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    mbs = ElasticMBS(model, micro_batch_size=size, policy=Policy(grow=False), memory=QUIET)
    x = torch.randn(8, 6, dtype=torch.float64)
    model(x).square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    ooms = 0
    for _ in range(calls):
        model.zero_grad()
        ooms += mbs.backward(lambda b: model(b).square().mean(), x).ooms
        for p, grad in zip(model.parameters(), wanted):
            torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-12)
    return ooms
"""


def _told(out: str, word: str) -> list[str]:
    return [line for line in out.splitlines() if word in line]


def _train(faults: RandomFaults, calls: int = 4, door: int = 1) -> list[int]:
    """Train, check the gradient, and return the number of errors of each call."""
    model, batch = mlp(), pairs(8)
    mbs, ooms = elastic(model, micro_batch_size=4), []
    with faults:
        for _ in range(calls):
            model.zero_grad()
            ooms.append(
                (
                    mbs.backward(cross_entropy(model), batch)
                    if door == 1
                    else loop(mbs, cross_entropy(model), batch)
                ).ooms
            )
    assert off_by(model, whole_gradient(model, lambda twin: cross_entropy(twin)(batch))) <= 1e-12
    return ooms


@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize("always", [True, False])
def test_errors_strike_in_forward_and_backward_and_are_survived(door: int, always: bool) -> None:
    struck, met = set(), []
    for seed in range(12 if always else 40):
        met += _train(faults := RandomFaults(seed, "test", always=always), door=door)
        struck |= {hit.split(",")[0] for hit in faults.hits}
    assert {"aten::addmm", "aten::tanh_backward"} <= struck
    assert max(met) <= PER_CALL
    assert sum(met) > 24
    assert always or min(met) == 0, "some calls are spared"


def test_only_the_same_seed_and_name_repeat_the_same_errors() -> None:
    hits = []
    for seed, name in ((1, "a"), (1, "a"), (2, "a"), (1, "b")):
        _train(faults := RandomFaults(seed, name, always=True))
        hits.append(faults.hits)
    assert hits[0] == hits[1]
    assert hits[0] != hits[2]
    assert hits[0] != hits[3]


def test_about_half_of_the_tests_are_chosen_by_seed_and_name() -> None:
    chosen = [[is_chosen(seed, f"test[{number}]") for number in range(400)] for seed in (5, 5, 6)]
    assert 150 < sum(chosen[0]) < 250
    assert chosen[0] == chosen[1] != chosen[2]


def test_code_outside_of_attempts_is_never_hit() -> None:
    model, batch = mlp(), pairs(8)
    with RandomFaults(1, "test", always=True) as faults:
        mbs = elastic(model, micro_batch_size=4)
        for micro in mbs.micro_batches(batch):
            assert stack() == []
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
            assert stack() == []
        cross_entropy(model)(batch).backward()
    assert faults.hits
    assert hooks.fault_injector is None


def test_evaluation_and_optimizer_steps_are_hit_but_no_users_hook() -> None:
    """A hook is run once, so an error in it would pass through."""

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)

    batch, hits, steps = pairs(8), set(), 0
    for seed in range(10):
        model, plain = mlp(), mlp()
        optimizer, reference = (
            torch.optim.Adam(net.parameters(), lr=0.1, foreach=False) for net in (model, plain)
        )
        mbs = elastic(model, micro_batch_size=4)
        for net, its in ((model, optimizer), (plain, reference)):
            cross_entropy(net)(batch).backward()
            its.register_step_pre_hook(clip)
        with RandomFaults(seed, "step", always=True) as faults:
            mbs.optimizer_step(optimizer)
        reference.step()
        steps += len(faults.hits)
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        )
        with RandomFaults(seed, "eval", always=True) as faults:
            outputs = mbs.evaluate(partial(lambda net, b: net(b[0]), model), batch)
        hits |= {hit.split(",")[0] for hit in faults.hits}
        assert torch.allclose(outputs, model(batch[0]), rtol=1e-12, atol=1e-12)
    assert steps >= 5
    assert "aten::addmm" in hits


def test_other_threads_are_left_alone() -> None:
    model, batch = mlp(), pairs(8)
    mbs, ooms = elastic(model, micro_batch_size=4), []
    with RandomFaults(1, "test", always=True) as faults:
        thread = threading.Thread(
            target=lambda: ooms.append(mbs.backward(cross_entropy(model), batch).ooms)
        )
        thread.start()
        thread.join()
    assert (ooms, faults.hits, faults.attempts) == ([0], [], 0)


def test_a_test_that_injects_by_itself_says_what_fails() -> None:
    model, batch = mlp(), pairs(8)
    with RandomFaults(1, "test", always=True) as faults, InjectOOM(at=[3]) as inject:
        assert elastic(model, micro_batch_size=4).backward(cross_entropy(model), batch).ooms == 1
    assert (len(inject.hits), faults.hits) == (1, [])


def test_a_budget_in_the_test_counts_as_before() -> None:
    model, batch = mlp(), pairs(8)
    with (
        RandomFaults(3, "test", always=True) as faults,
        MemoryBudget("64MiB", track=[model, *batch]) as budget,
    ):
        before = budget.live
        ooms = elastic(model, micro_batch_size=4).backward(cross_entropy(model), batch).ooms
        model.zero_grad()
        assert budget.live == before
    assert ooms == len(faults.hits) > 0
    assert budget.ooms == 0


@pytest.mark.parametrize("how", ["in the test", "before it", "in place"])
def test_compiled_code_is_left_alone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled(nn.Sequential):
        """A result of torch.compile, without the wait for a compiler."""

    monkeypatch.setattr(torch, "compile", lambda module, **options: Compiled(module))
    monkeypatch.setattr(torch._dynamo, "OptimizedModule", Compiled)
    inner, batch = mlp(), pairs(8)
    model: nn.Module = Compiled(inner) if how == "before it" else inner
    if how == "in place":
        inner._compiled_call_impl = None
        inner.__dict__["_compiled_call_impl"] = inner._call_impl
    given = torch.compile
    with noting_compile(), RandomFaults(1, "test", always=True) as faults:
        if how == "in the test":
            compile_: Any = torch.compile
            model = compile_(inner)
        assert elastic(model, micro_batch_size=4).backward(cross_entropy(model), batch).ooms == 0
    assert torch.compile is given
    assert (faults.hits, faults.attempts) == ([], 2)


def test_an_attempt_that_was_left_open_ends_with_the_test() -> None:
    model, batch = mlp(), pairs(8)
    mbs = elastic(model, micro_batch_size=4)
    with RandomFaults(1, "test", always=True):
        micro = next(iter(mbs.micro_batches(batch)))
        micro.__enter__()
        assert len(stack()) == 1
    assert stack() == []
    with pytest.raises(LossError):
        micro.__exit__(None, None, None)


def test_a_call_inside_a_call_is_hit_and_both_are_survived() -> None:
    def weighted(model: nn.Module, batch: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
        return torch.mean(
            nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none") * weight
        )

    hits = 0
    for seed in range(10):
        model, other, batch = mlp(), mlp(seed=3), pairs(8)
        mbs, inner = elastic(model, micro_batch_size=4), elastic(other, micro_batch_size=2)

        def loss_fn(
            b: tuple[Tensor, Tensor],
            inner: ElasticMBS = inner,
            other: nn.Module = other,
            model: nn.Module = model,
        ) -> Tensor:
            weight = inner.evaluate(lambda part: other(part[0]), b).square().mean(1)
            return weighted(model, b, weight)

        with RandomFaults(seed, "test", always=True) as faults:
            mbs.backward(loss_fn, batch)
        hits += len(faults.hits)
        weight = other(batch[0]).detach().square().mean(1)
        wanted = whole_gradient(model, partial(weighted, batch=batch, weight=weight))
        assert off_by(model, wanted) <= 1e-12
    assert hits > 10


@pytest.fixture
def suite(pytester: pytest.Pytester) -> Iterator[pytest.Pytester]:
    pytester.makeconftest('pytest_plugins = ["elastic_mbs.testing"]')
    threads = torch.get_num_threads()
    yield pytester
    torch.set_num_threads(threads)


def test_always_strikes_every_test_but_those_that_are_marked(suite: pytest.Pytester) -> None:
    compile_ = torch.compile
    suite.makepyfile(
        SUITE
        + """
@pytest.fixture
def before():
    assert hooks.fault_injector is None
    assert run() == 0
    yield
    assert run() == 0

@pytest.mark.parametrize("number", range(3))
def test_struck(before, number, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    assert run() > 0

@pytest.mark.no_oom_injection
def test_marked():
    assert run() == 0
"""
    )
    done = suite.runpytest_inprocess(
        "--strict-markers", "--oom-injection=always", "--oom-injection-seed=7"
    )
    done.assert_outcomes(passed=4)
    assert _told(str(done.stdout), "oom injection: --oom-injection=always --oom-injection-seed=7")
    assert torch.compile is compile_, "which a test had patched"
    (summary,) = _told(str(done.stdout), "in 3 tests of 3 chosen")
    assert int(summary.split()[2]) >= 3


INEXACT = """
seen = []

def test_counts_its_own_runs():
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    mbs = ElasticMBS(model, micro_batch_size=4, policy=Policy(grow=False), memory=QUIET)

    def loss_fn(b):
        seen.append(len(b))
        return model(b).square().mean()

    for _ in range(4):
        mbs.backward(loss_fn, torch.ones(8, 6))
    assert sum(seen) == 32
"""


def test_inexact_code_fails_with_its_errors_and_the_command(
    suite: pytest.Pytester,
) -> None:
    suite.makepyfile(test_inexact=SUITE + INEXACT)
    free = suite.runpytest_inprocess()
    free.assert_outcomes(passed=1)
    assert not _told(str(free.stdout), "oom injection")
    done = suite.runpytest_inprocess("--oom-injection=always", "--oom-injection-seed=3")
    done.assert_outcomes(failed=1)
    out = str(done.stdout)
    assert _told(out, "injected out-of-memory errors")
    hits = _told(out, ", operation ")
    assert hits
    (command,) = _told(out, "repeat with: ")
    assert (
        command == "repeat with: pytest --oom-injection=always --oom-injection-seed=3 "
        "'test_inexact.py::test_counts_its_own_runs'"
    )
    again = suite.runpytest_inprocess(*[word.strip("'") for word in command.split()[3:]])
    again.assert_outcomes(failed=1)
    assert _told(str(again.stdout), ", operation ") == hits


def test_random_chooses_by_seed_and_the_command_chooses_again(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        SUITE
        + "\n@pytest.mark.parametrize('number', range(12))\ndef test_struck(number):\n    assert "
        "run(calls=4) == 0\n"
    )
    done = suite.runpytest_inprocess("--oom-injection=random", "--oom-injection-seed=11")
    outcomes = done.parseoutcomes()
    assert 0 < outcomes["failed"] < 12
    command = _told(str(done.stdout), "repeat with: ")[-1]
    assert "--oom-injection=random --oom-injection-seed=" in command
    suite.runpytest_inprocess(*[word.strip("'") for word in command.split()[3:]]).assert_outcomes(
        failed=1
    )


def test_property_tests_repeat_and_state_machines_are_left_alone(
    suite: pytest.Pytester,
) -> None:
    suite.makepyfile(
        SUITE
        + """
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

met = set()

class TestIn:
    @given(st.integers(1, 8))
    @settings(max_examples=25, database=None, deadline=None, derandomize=True)
    def test_survives(self, size):
        met.add(run(1, size))

def test_examples_differ():
    assert len(met) > 1

@given(st.integers(1, 8))
@settings(max_examples=25, database=None, deadline=None, derandomize=True)
def test_fails_where_struck(size):
    assert run(1, size) == 0

class Machine(RuleBasedStateMachine):
    @rule()
    def train(self):
        assert run(1) == 0

Machine.TestCase.settings = settings(
    max_examples=2, stateful_step_count=2, database=None, deadline=None
)
TestMachine = Machine.TestCase
"""
    )
    done = suite.runpytest_inprocess(
        "--oom-injection=always", "--oom-injection-seed=3", "-p", "no:randomly"
    )
    done.assert_outcomes(passed=3, failed=1)
    out = str(done.stdout)
    assert not _told(out, "Flaky")
    assert _told(out, "Failing test case") or _told(out, "Falsifying example")


def test_workers_have_the_seed_that_is_told(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        "import pytest\n@pytest.mark.parametrize('number', range(4))\ndef test_seed(number, "
        "pytestconfig):\n"
        "    print('seed', pytestconfig.option.oom_injection_seed)\n    assert False\n"
    )
    done = suite.runpytest_subprocess("-n1", "--oom-injection=random", "-p", "no:cacheprovider")
    done.assert_outcomes(failed=4)
    seeds = {line.split()[1] for line in str(done.stdout).splitlines() if line.startswith("seed ")}
    assert len(seeds) == 1
    assert _told(str(done.stdout), f"--oom-injection-seed={seeds.pop()}")


def test_the_package_is_imported_without_pytest() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None; "
        "import elastic_mbs.testing as t; print(t.InjectOOM.__name__)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "InjectOOM\n"
    )
