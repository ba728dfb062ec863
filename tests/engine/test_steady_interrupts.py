"""Ctrl-C at the lines where a call of a known loss function begins, hooks go or come, and a call ends."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from elastic_mbs.rollback.graph import CommitLog
from tests.helpers.interrupts import interrupt_at
from tests.helpers.settled import hooks_on, settled
from tests.helpers.steps import cross_entropy, mlp, pairs, still_works

pytestmark = pytest.mark.no_oom_injection


@pytest.mark.parametrize("line", ["leave_call(self)", "if getattr(_thread", "del _running[place]"])
def test_an_interrupt_while_a_finished_call_leaves_refuses_no_later_step(line: str) -> None:
    model, batch = mlp(), pairs()
    mbs = settled(model, cross_entropy(model), batch, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with interrupt_at(line), pytest.raises(KeyboardInterrupt):
        mbs.backward(cross_entropy(model), batch)
    optimizer.step()
    assert still_works(mbs, model)
    optimizer.step()


def test_an_interrupt_while_a_call_begins_leaves_the_thread_outside_of_calls() -> None:
    model, batch = mlp(), pairs()
    mbs = settled(model, cross_entropy(model), batch, 1)
    with interrupt_at("_running.append(call)"), pytest.raises(KeyboardInterrupt):
        mbs.backward(cross_entropy(model), batch)
    assert still_works(mbs, model)


def test_an_interrupt_while_hooks_come_off_leaves_no_leaf_that_is_taken_for_watched() -> None:
    """A leaf without a hook would get a piece twice that had committed before a backward ran out."""
    leaves = [torch.ones(1, requires_grad=True) for _ in range(3)]
    log = CommitLog()
    log.watch(leaves)
    log.watch_guests([guest := torch.ones(1, requires_grad=True)])
    for leave in (log.rest, log.forget_guests):
        for lines in range(2, 12):
            log.listen()
            log.watch_guests([guest])
            with interrupt_at("", "graph.py", lines), suppress(KeyboardInterrupt):
                leave()
            log.listen()
            log.watch_guests([guest])
            log.clear()
            torch.stack([*leaves, guest]).sum().backward()
            assert {id(leaf) for leaf in log.fired} == {id(leaf) for leaf in [*leaves, guest]}


def test_an_interrupt_while_new_leaves_are_met_leaves_none_unwatched() -> None:
    model, batch = mlp(), pairs()
    model[0].requires_grad_(False)
    mbs = settled(model, cross_entropy(model), batch, 1)
    model[0].requires_grad_(True)
    with interrupt_at("parts.commits.watch(parts.inventory.leaves)"), pytest.raises(KeyboardInterrupt):
        mbs.backward(cross_entropy(model), batch)
    assert still_works(mbs, model)
    assert hooks_on(model) == len(list(model.parameters()))


@pytest.mark.parametrize("line", ["if self.finished:", "try:"])
def test_an_interrupt_between_the_lines_of_the_loop_written_out_ends_its_call_at_once(line: str) -> None:
    model, batch = mlp(), pairs()
    mbs = settled(model, cross_entropy(model), batch, 3)
    with pytest.raises(KeyboardInterrupt):
        for number, micro in enumerate(mbs.micro_batches(batch)):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
            if number == 1:
                interrupting = interrupt_at(line, "call.py")
                interrupting.__enter__()
    interrupting.__exit__(None, None, None)
    assert all(leaf.grad is None for leaf in model.parameters())
    assert still_works(mbs, model)
