"""`backward_embeddings` refuses input that it cannot take by name, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import (
    ElasticMBS,
    IncompleteBatchError,
    LossError,
    MicroBatchFloorError,
    MisuseError,
    NestedCallError,
    ReplayUnsafeError,
    StepInsideError,
    UsageError,
)
from elastic_mbs.errors import BackwardInsideError
from elastic_mbs.testing import InjectOOM
from stress.streams import Streams
from tests.helpers.steps import FailOn, elastic, grads, mlp, off_by, pairs, whole_gradient

X = pairs(8)[0]


def gram(z: Tensor) -> Tensor:
    return (z @ z.T).square().mean()


def refused(
    error: type[Exception],
    match: str,
    model: nn.Module,
    embed: Callable[..., Any],
    over: Any,
    mbs: ElasticMBS | None = None,
) -> None:
    mbs = mbs or elastic(model, micro_batch_size=3)
    streams, buffers = Streams.now(), [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(error, match=match):
        mbs.backward_embeddings(embed, over, X)
    assert off_by(model, [None] * len(list(model.parameters()))) == 0
    assert Streams.now().same(streams)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    result = mbs.backward_embeddings(lambda b: model(b), gram, X)
    assert off_by(model, whole_gradient(model, lambda net: gram(net(X)))) <= 1e-12, (
        "the next call is as any other"
    )
    assert result.ooms == 0


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (lambda z: z.mean(), r"of shape \(\) for 3 samples: .*shape \(3, \.\.\.\)"),
        (lambda z: z.T, r"float64 of shape \(4, 3\) for 3 samples"),
        (
            lambda z: (z, z.mean(0)),
            r"a tuple with torch.float64 of shape \(3, 4\), torch.float64 of shape \(4,\)",
        ),
        (lambda z: None, "a NoneType with no tensor"),
        (lambda z: [], "a list with no tensor"),
        (lambda z: {"ids": torch.arange(len(z))}, r"a dict with torch.int64 of shape \(3,\)"),
        (lambda z: z.tolist(), "a list with no tensor"),
    ],
)
def test_an_embed_fn_that_returns_nothing_per_sample(
    value: Callable[[Tensor], Any], match: str
) -> None:
    model = mlp()
    refused(LossError, match, model, lambda b: value(model(b)), gram)


def test_embeddings_that_differ_in_shape_from_piece_to_piece() -> None:
    model = mlp()
    refused(LossError, r"a PerPiece with .*\(3, 3\)", model, lambda b: model(b)[:, : len(b)], gram)


@pytest.mark.parametrize(
    ("over", "error", "match"),
    [
        (3, UsageError, "backward_embeddings\\(embed_fn, loss_fn, batch\\).*got a int"),
        (lambda z: None, LossError, "returned None"),
        (lambda z: z @ z.T, LossError, "must be a scalar"),
        (lambda z: gram(z.detach()), LossError, "has no graph"),
        (
            lambda z: gram(nn.Parameter(torch.ones(2, 2))),
            LossError,
            "does not depend on the embeddings",
        ),
        (lambda z: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_a_loss_that_is_none(over: Any, error: type[Exception], match: str) -> None:
    model = mlp()
    refused(error, match, model, lambda b: model(b), over)


def test_embeddings_without_anything_to_train() -> None:
    model = mlp()
    refused(LossError, "nothing to train in embed_fn", model, lambda b: model(b).detach(), gram)


def test_samples_that_are_changed_in_place_are_the_pieces_own() -> None:
    model, x = mlp(), X.clone()

    def embed(b: Tensor) -> Any:
        b += 1
        return model(b)

    mbs = elastic(model, micro_batch_size=3)
    for _ in range(2):
        model.zero_grad()
        mbs.backward_embeddings(embed, gram, x)
        assert torch.equal(x, X)
        assert off_by(model, whole_gradient(model, lambda net: gram(net(X + 1)))) <= 1e-12


@pytest.mark.parametrize(
    ("inside", "error"),
    [
        (lambda mbs, model: mbs.evaluate(model, X), NestedCallError),
        (lambda mbs, model: mbs.backward(lambda b: model(b).mean(), X), NestedCallError),
        (lambda mbs, model: mbs.verify(lambda b: model(b).mean(), X), NestedCallError),
        (lambda mbs, model: torch.optim.SGD(model.parameters(), 0.1).step(), StepInsideError),
        (lambda mbs, model: model(X).mean().backward(), BackwardInsideError),
    ],
)
def test_calls_steps_and_backwards_inside_the_loss_are_refused(
    inside: Callable[[ElasticMBS, nn.Module], object], error: type[Exception]
) -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=3)

    def over(z: Tensor) -> Tensor:
        inside(mbs, model)
        return gram(z)

    refused(error, "step function", model, lambda b: model(b), over, mbs)


def test_a_loss_that_changes_a_buffer() -> None:
    """A queue of negatives is such a buffer.

    The second pass would begin with the queue as it was before the loss.
    """
    model = mlp()
    model.register_buffer("queue", torch.zeros(8, 4).double())

    def over(z: Tensor) -> Tensor:
        with torch.no_grad():
            model.get_buffer("queue").copy_(z)
        return gram(z)

    refused(MisuseError, "loss_fn changed a buffer", model, lambda b: model(b), over)


def test_a_leaf_of_the_loss_whose_hook_would_run_twice() -> None:
    model, scale = mlp(), torch.tensor(2.0, requires_grad=True)
    scale.register_hook(lambda grad: grad * 0.1)
    refused(
        UsageError,
        "has a hook on its gradient",
        model,
        lambda b: model(b),
        lambda z: gram(z * scale),
    )
    assert scale.grad is None


def test_an_embed_fn_that_draws_other_numbers_when_it_runs_again() -> None:
    model = mlp()
    refused(
        ReplayUnsafeError,
        "drew other random numbers",
        model,
        lambda b: model(b) + (0 * torch.rand(()) if torch.is_grad_enabled() else 0),
        gram,
    )


def test_a_loss_that_does_not_fit_says_that_no_micro_batch_helps() -> None:
    model = mlp()
    fails = FailOn(2, 3, 4)

    def over(z: Tensor) -> Tensor:
        fails()
        return gram(z)

    mbs = elastic(model, micro_batch_size=3)
    mbs.backward_embeddings(lambda b: model(b), over, X)
    model.zero_grad()
    refused(
        MicroBatchFloorError,
        "loss_fn over the embeddings of 8 samples, whose memory no micro-batch changes",
        model,
        lambda b: model(b),
        over,
        mbs,
    )
    fails.calls = frozenset({fails.count + 1})
    model.zero_grad()
    mbs.backward_embeddings(lambda b: model(b), over, X)
    assert off_by(model, whole_gradient(model, lambda net: gram(net(X)))) <= 1e-12, (
        "one failure is recovered from"
    )


def test_a_gradient_outside_the_model_that_is_not_empty_is_added_to() -> None:
    model, scale = mlp(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    gram(model(X) * scale).backward()
    wanted = [None if grad is None else 2 * grad for grad in grads([*model.parameters(), scale])]
    with InjectOOM(at=[60]) as inject:
        elastic(model, micro_batch_size=3).backward_embeddings(
            lambda b: model(b), lambda z: gram(z * scale), X
        )
    assert inject.hits
    assert off_by([*model.parameters(), scale], wanted) <= 1e-12


def test_a_loop_left_early_is_said_by_the_next_call() -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=3)
    for micro in mbs.micro_batches(X):
        with micro:
            micro.backward(model(micro.data).mean())
        break
    with pytest.raises(IncompleteBatchError):
        mbs.backward_embeddings(lambda b: model(b), gram, X)


def test_a_loss_that_switches_a_modules_mode() -> None:
    model = mlp()

    def over(z: Tensor) -> Tensor:
        model.eval()
        return gram(z)

    refused(MisuseError, "loss_fn switched a module's mode", model, lambda b: model(b), over)


def test_an_embed_fn_that_draws_from_a_generator_that_is_not_named() -> None:
    model, mine = mlp(), torch.Generator()

    def masks(z: Tensor) -> Tensor:
        return torch.rand(z.shape, generator=mine, dtype=z.dtype) > 0.5

    state = mine.get_state()
    result = elastic(model, micro_batch_size=3).backward_embeddings(
        lambda b: model(b) * masks(model(b)), gram, X
    )
    after = mine.get_state()
    mine.set_state(state)
    with torch.no_grad():
        drawn = torch.cat([masks(model(X[start:stop])) for start, stop in result.partition])
    assert off_by(model, whole_gradient(model, lambda net: gram(net(X) * drawn))) <= 1e-12
    assert torch.equal(mine.get_state(), after)


def test_embeddings_edited_by_a_loss_are_restored_for_its_next_run() -> None:
    """The loss gets embeddings that it may edit, in a graph and without one.

    Without a restore the second run of the loss would edit the edited embeddings.
    """
    model, fails = mlp(), FailOn(1)

    def over(z: Tensor) -> Tensor:
        with torch.no_grad():
            z += 1
        z /= 2
        fails()
        return gram(z)

    assert elastic(model, micro_batch_size=3).backward_embeddings(model, over, X).partition == (
        (0, 3),
        (3, 6),
        (6, 8),
    )
    assert off_by(model, whole_gradient(model, lambda net: gram((net(X) + 1) / 2))) <= 1e-12


def test_without_the_runtime_a_loss_over_embeddings_counts_nothing_either() -> None:
    model = mlp()
    mbs = elastic(
        model,
        enabled=False,
        count={"one": lambda b: torch.ones(len(b)), "two": lambda b: torch.ones(len(b))},
    )
    assert float(mbs.backward_embeddings(model, gram, X)) == pytest.approx(
        float(gram(model(X)).detach())
    )
    assert off_by(model, whole_gradient(model, lambda net: gram(net(X)))) <= 1e-12
