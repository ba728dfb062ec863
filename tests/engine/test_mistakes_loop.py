"""Mistakes in the loop of door 3: blocks left, skipped, entered twice or without their backward are named, and the runtime stays usable."""

import gc

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, IncompleteBatchError, LossError
from tests.helpers.steps import FailOn, cross_entropy, elastic, mlp, pairs, still_works

pytestmark = pytest.mark.injectable


def _leave_early(mbs: ElasticMBS, model: nn.Module, how: str) -> None:
    for i, micro in enumerate(mbs.micro_batches(pairs())):
        if how == "before the block" and i == 1:
            break
        with micro:
            micro.backward(cross_entropy(model)(micro.data))
        if how == "after the block":
            break


LEFT = ["after the block", "before the block"]


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("by", ["the next call", "the optimizer", "the end of the with block", "another runtime", "another, itself dropped"])
@pytest.mark.parametrize("how", LEFT)
def test_a_loop_left_early_is_named_once_by_what_comes_next(model: nn.Module, how: str, by: str) -> None:
    mbs, optimizer, net = elastic(model, micro_batch_size=4), torch.optim.SGD(model.parameters(), lr=1.0), mlp(seed=5)
    other = elastic(net, micro_batch_size=4)
    _leave_early(mbs, model, how)
    if by == "another, itself dropped":
        del mbs
        gc.collect()
    with pytest.raises(IncompleteBatchError, match="4:8"):
        if by == "the next call":
            mbs.backward(cross_entropy(model), pairs())
        elif by == "the optimizer":
            optimizer.step()
        elif by == "the end of the with block":
            mbs.__exit__(None, None, None)
        else:
            other.backward(cross_entropy(net), pairs())
    assert all(p.grad is None for p in model.parameters())
    assert still_works(other, net)
    optimizer.step()


def test_the_with_block_ends_with_its_own_error_even_if_a_loop_was_left_early(model: nn.Module, mbs: ElasticMBS) -> None:
    with pytest.raises(ValueError, match="mine"), mbs:
        _leave_early(mbs, model, "after the block")
        raise ValueError("mine")


def test_a_micro_batch_that_is_not_entered(model: nn.Module, mbs: ElasticMBS) -> None:
    with pytest.raises(IncompleteBatchError, match="with micro:"):
        for micro in mbs.micro_batches(pairs()):
            cross_entropy(model)(micro.data)


@pytest.mark.parametrize("when", ["again", "later", "inside itself"])
def test_a_micro_batch_that_is_entered_twice(model: nn.Module, mbs: ElasticMBS, when: str) -> None:
    kept = None
    with pytest.raises(IncompleteBatchError, match="once"):
        for micro in mbs.micro_batches(pairs()):
            if when == "later" and kept is not None:
                with kept:
                    pass
            with micro:
                if when == "inside itself":
                    with micro:
                        pass
                micro.backward(cross_entropy(model)(micro.data))
            kept = micro
            if when == "again":
                with micro:
                    pass
    mbs.close()


def test_a_block_without_backward(model: nn.Module, mbs: ElasticMBS) -> None:
    with pytest.raises(LossError, match=r"without micro.backward"):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                cross_entropy(model)(micro.data)


@pytest.mark.parametrize("where", ["twice", "outside", "of an older one"])
def test_backward_not_once_and_not_inside_its_block(model: nn.Module, mbs: ElasticMBS, where: str) -> None:
    older = None
    with pytest.raises(LossError, match="inside its own"):
        for micro in mbs.micro_batches(pairs()):
            if where == "outside":
                micro.backward(cross_entropy(model)(micro.data))
            with micro:
                loss = cross_entropy(model)(micro.data)
                (older or micro).backward(loss)
                if where == "twice":
                    micro.backward(cross_entropy(model)(micro.data))
            older = micro if where == "of an older one" else None
    mbs.close()


def test_the_loss_of_a_failed_attempt_handed_to_the_next(model: nn.Module) -> None:
    mbs, losses, fail = elastic(model, micro_batch_size=8), list[Tensor](), FailOn(1)
    with pytest.raises(RuntimeError, match="ran out of memory, and its saved tensors are gone"):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                losses.append(cross_entropy(model)(micro.data))
                fail()
                micro.backward(losses[0])
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)
