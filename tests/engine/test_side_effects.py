"""What a step does besides its gradient: it edits gradients, the batch or its outputs, switches modes, or ends older graphs."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import whole
from elastic_mbs.errors import BatchError, GradientsChangedError, UsageError
from tests.helpers.steps import FailOn, cross_entropy, elastic, grads, mlp, off_by, pairs, whole_gradient

pytestmark = pytest.mark.no_oom_injection


@pytest.mark.parametrize("edit", ["clip", "zero_grad", "backward"])
def test_gradients_edited_inside_the_block_after_backward_are_refused(edit: str) -> None:
    """The versions that the edit moved passed for a number of commits that is new."""
    model = mlp()
    edits: dict[str, Callable[[], object]] = {
        "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
        "zero_grad": model.zero_grad,
        "backward": lambda: next(model.parameters()).square().sum().backward(),
    }
    mbs = elastic(model, micro_batch_size=4)
    for known in range(3):
        for _ in range(known):
            mbs.backward(cross_entropy(model), pairs(8))
            model.zero_grad()
        for last in (4, 8):
            with pytest.raises(GradientsChangedError):
                for micro in mbs.micro_batches(pairs(8)):
                    with micro:
                        micro.backward(cross_entropy(model)(micro.data))
                        if micro.stop == last:
                            edits[edit]()
            assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_edited_inside_a_block_that_then_runs_out_of_memory_are_refused() -> None:
    model = mlp()
    with pytest.raises(GradientsChangedError):
        for micro in elastic(model, micro_batch_size=4).micro_batches(pairs(8)):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
                model.zero_grad()
                raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_loss_term_made_before_the_loop_keeps_its_graph_after_a_failure() -> None:
    """Every term of the failed attempt was detached, also one whose graph is older than the attempt."""
    model, wanted = mlp(), list[Tensor | None]()

    def ones(batch: Any) -> Tensor:
        return torch.ones(len(batch[1]))

    mbs = elastic(model, micro_batch_size=4, count={"main": ones, "regular": ones})
    for fails in (False, False, True):
        model.zero_grad()
        regular, hook = torch.stack([p.sum() for p in model.parameters()]).sum(), FailOn(1)
        for micro in mbs.micro_batches(pairs(8)):
            with micro:
                scores = model(micro.data[0])
                if fails:
                    scores.register_hook(lambda grad, hook=hook: hook())
                micro.backward({"main": functional.cross_entropy(scores, micro.data[1]), "regular": regular})
        wanted = wanted or grads(model)
    assert off_by(model, wanted) <= 1e-12


def test_training_mode_comes_back_after_an_attempt_that_had_switched_it() -> None:
    """`was = model.training; model.eval(); …; model.train(was)`: the replay read the mode that the failed attempt had left."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.1)).double()
    fail = FailOn(2)

    def loss_fn(batch: Any) -> Tensor:
        was = model.training
        model.eval()
        with torch.no_grad():
            fail()
            target = model(batch[0])
        model.train(was)
        return functional.mse_loss(model(batch[0]), target + 1)

    elastic(model, micro_batch_size=4).backward(loss_fn, pairs(8))
    assert model.training


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), ValueError("of the user's own")], ids=["replayed", "passed on"])
def test_modes_are_those_of_the_calls_start_where_the_batch_starts_over_or_ends_by_an_error(error: Exception) -> None:
    """They were those of the failed attempt's start, so a batch that started over ran its first piece in the mode that it had left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    mbs, fail, seen = elastic(model, micro_batch_size=4), FailOn(2, error=lambda: error), list[bool]()

    def loss_fn(batch: Any) -> Tensor:
        seen.append(model[1].training)
        hidden = model[:2](batch[0])
        model[1].eval()
        hidden.register_hook(lambda grad: fail())  # the last layer has committed by then
        loss: Tensor = functional.cross_entropy(model[2](hidden), batch[1])
        return loss

    with suppress(ValueError):
        mbs.backward(loss_fn, pairs(8))
    replayed = mbs.last_result is not None
    assert seen == [True, False, *([True, False, False, False] if replayed else [])]
    assert model[1].training is not replayed


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), ValueError("of the user's own")], ids=["replayed", "passed on"])
def test_gradients_are_enabled_again_after_an_attempt_that_had_disabled_them(error: Exception) -> None:
    model, fail = mlp(), FailOn(1, error=lambda: error)

    def loss_fn(batch: Any) -> Tensor:
        was = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        fail()
        torch.set_grad_enabled(was)
        loss: Tensor = functional.cross_entropy(model(batch[0]), batch[1])
        return loss

    with suppress(ValueError):
        elastic(model, micro_batch_size=4).backward(loss_fn, pairs(8))
    assert torch.is_grad_enabled()


def test_a_whole_tensor_of_the_batch_that_is_edited_in_place_is_seen_once() -> None:
    """Pieces share what passes whole, so later pieces saw it edited."""
    model, (x, y) = mlp(), pairs(8)

    def weighted(of: nn.Module) -> Any:
        def loss_fn(batch: Any) -> Tensor:
            batch["w"].mul_(2)
            each: Tensor = functional.cross_entropy(of(batch["x"]), batch["y"], reduction="none") * batch["w"][batch["y"]]
            return each.mean()

        return loss_fn

    def batch() -> dict[str, Tensor]:
        return {"x": x, "y": y, "w": torch.ones(4, dtype=torch.float64)}

    wanted = whole_gradient(model, lambda twin: weighted(twin)(batch()))
    mbs, loss_fn = elastic(model, micro_batch_size=4, dims=whole("w")), weighted(model)
    for _ in range(2):
        with pytest.raises(BatchError, match="work on a copy"):
            mbs.backward(loss_fn, batch())
    assert all(parameter.grad is None for parameter in model.parameters())
    elastic(model, micro_batch_size=8, dims=whole("w")).backward(loss_fn, batch())
    assert off_by(model, wanted) <= 1e-12


def test_an_evaluation_that_returns_its_own_buffer_again_and_again_is_refused_or_has_every_row() -> None:
    """On the device views of the buffer are kept, which the next piece overwrites."""
    model, buffer, x = nn.Linear(2, 2).double(), torch.zeros(8, 2, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)

    def fn(rows: Tensor) -> Tensor:
        return buffer[: len(rows)].copy_(model(rows))

    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(UsageError, match=r"output\.clone\(\)"):
        mbs.eval(fn, x)
    assert torch.equal(mbs.eval(fn, x, to="cpu"), model(x))


def test_outputs_are_given_once() -> None:
    """Those of `backward` took the place of those that `keep` was given, and a second `keep` that of the first."""
    model = mlp()
    mbs = elastic(model, micro_batch_size=4)
    for micro in mbs.micro_batches(pairs(8)):
        with micro:
            micro.keep(micro.data[0])
            micro.backward({"loss": cross_entropy(model)(micro.data)})
    assert mbs.last_result is not None
    assert torch.equal(mbs.last_result.outputs, pairs(8)[0])
    with pytest.raises(UsageError, match="has outputs already"):
        for micro in mbs.micro_batches(pairs(8)):
            with micro:
                micro.keep(micro.data[0])
                micro.keep(micro.data[1])


def test_gradients_cleared_after_the_call_began_are_this_calls_own() -> None:
    """They were held for the user's still, so two gradients that autograd makes in one memory were not given memory of their own."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(2, 3, dtype=torch.float64)), nn.Parameter(torch.randn(3, 2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            """Both meet in one addition, each through a view."""
            return ((self.a.view(6) + self.b.view(6)) * x).sum(1).square().mean()

    torch.manual_seed(0)
    model, x = Two(), torch.randn(8, 6, dtype=torch.float64)
    wanted = whole_gradient(model, lambda twin: twin(x))
    mbs = elastic(model, micro_batch_size=3)
    for _ in range(3):
        pieces = mbs.micro_batches(x)
        model.zero_grad()
        for micro in pieces:
            with micro:
                micro.backward(model(micro.data))
        assert off_by(model, wanted) <= 1e-12


def test_statistics_that_a_flag_of_the_users_own_begins_to_move_go_back_with_a_failed_piece() -> None:
    """The module stays in one mode, and eager batch norm moves no version: the failed attempt's statistics stayed in the buffers."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trains = False
            self.register_buffer("running_mean", torch.zeros(4, dtype=torch.float64))
            self.register_buffer("running_var", torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            mean, var = self.buffers()
            return functional.batch_norm(x, mean, var, training=self.trains)

    norm, fail = Norm(), FailOn(7)
    model = nn.Sequential(nn.Linear(6, 4).double(), norm)

    def loss_fn(batch: Any) -> Tensor:
        scores = model(batch[0])
        fail()
        loss: Tensor = functional.cross_entropy(scores, batch[1])
        return loss

    mbs = elastic(model, micro_batch_size=4)
    for norm.trains in (False, False, False, True):
        model.zero_grad()
        mbs.backward(loss_fn, pairs(8))
    assert mbs.last_result is not None
    twin = Norm()
    twin.trains = True
    for start, stop in mbs.last_result.partition:
        twin(model[0](pairs(8)[0][start:stop]))
    torch.testing.assert_close(norm.running_mean, twin.running_mean, rtol=1e-12, atol=0)
