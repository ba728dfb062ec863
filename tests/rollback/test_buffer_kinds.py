"""Buffers of every kind: what is not changed is left alone, and what is changed in an unusual way is put back all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs.rollback.buffers import BufferCopies
from tests.helpers.buffers import F64, Holder, numbers
from tests.helpers.steps import elastic, off_by


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return numbers(1, 2)


KINDS: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.tensor(1.0),
    "integers": lambda: torch.arange(3),
    "booleans": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1j]),
    "empty": lambda: torch.zeros(0),
    "infinite": lambda: torch.full((2, 2), float("-inf")).triu(1),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "inference": inference_tensor,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_of_any_kind_that_stays_as_it_is_does_no_harm(kind: str) -> None:
    module = Holder(table=KINDS[kind]())
    before = module["table"].to_dense().tolist()
    copies = BufferCopies()
    for _ in range(2):
        copies.begin_call([module])
        assert not copies.changed()
        assert copies.restore(to_call_start=False) is None
        assert not copies.end_clean_piece()
        copies.begin_piece()
        assert copies.restore(to_call_start=True) is None
        assert module["table"].to_dense().tolist() == before


def test_a_buffer_that_holds_nan_is_not_taken_to_change() -> None:
    module = Holder(scale=numbers(float("nan")))
    copies = BufferCopies()
    copies.begin_call([module])
    assert not copies.changed()
    assert not copies.end_clean_piece()


def grow_by_data(buffer: Tensor) -> None:
    buffer.data = torch.ones(4, dtype=F64)


@pytest.mark.parametrize("grow", [grow_by_data, lambda buffer: buffer.resize_(5)], ids=["data", "resize"])
def test_a_buffer_that_changed_its_shape_has_the_old_shape_and_value_again(grow: Callable[[Tensor], object]) -> None:
    module = Holder(cache=torch.tensor(1.0, dtype=F64))
    copies = BufferCopies()
    copies.begin_call([module])
    grow(module["cache"])
    assert copies.restore(to_call_start=False) is None
    assert torch.equal(module["cache"], torch.tensor(1.0, dtype=F64))


def test_restoring_buffers_that_did_not_change_leaves_other_graphs_valid() -> None:
    module = Holder(table=numbers(1, 2))
    w = torch.ones(2, dtype=F64, requires_grad=True)
    other = (w * module["table"]).sum()  # a loss of the user's, made before the call
    copies = BufferCopies()
    copies.begin_call([module])
    copies.restore(to_call_start=False)
    other.backward()
    assert w.grad is not None
    assert w.grad.tolist() == [1, 2]


def test_modules_without_buffers_cost_nothing() -> None:
    modules: Sequence[nn.Module] = [nn.Linear(2, 2), nn.Tanh()]
    copies = BufferCopies()
    copies.begin_call(modules)
    copies.begin_piece()
    assert not copies.changed()
    assert not copies.end_clean_piece()
    assert copies.restore(to_call_start=True) is None


class Normalised(nn.Module):
    """Running statistics as a person writes them: a new tensor each time, and a count beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))
        self.running_mean: Tensor
        self.register_buffer("running_mean", torch.zeros(3, dtype=torch.float64))
        self.count = 0
        self.fails = [-1]  # in a list, which does not go back

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.fails[0] == self.count:
            self.fails[0] = -1
            raise torch.OutOfMemoryError("CUDA out of memory. in the middle")
        self.running_mean = 0.5 * self.running_mean + 0.5 * x.detach().mean(0) * self.count
        return (x - self.running_mean) * self.w


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("piece", [1, 2, 3, 4])
def test_running_statistics_of_a_module_of_the_users_go_back_with_all_that_belongs_to_them(piece: int) -> None:
    """Everything named `running_mean` was taken for torch's own: written to in place, and with nothing beside it."""
    torch.manual_seed(0)
    x = torch.randn(8, 3, dtype=torch.float64)

    def trained(fail: bool) -> Normalised:
        module = Normalised()
        mbs = elastic(module, micro_batch_size=2, min_micro_batch_size=2, grow=False)
        for call in range(4):
            module.zero_grad()
            if fail and call == 3:
                module.fails[0] = module.count + piece
            result = mbs.backward(lambda b: module(b).pow(2).mean(), x)
            assert result.partition == ((0, 2), (2, 4), (4, 6), (6, 8))
        assert mbs.stats.ooms == int(fail)
        return module

    clean, failed = trained(fail=False), trained(fail=True)
    assert failed.count == clean.count
    assert torch.equal(failed.running_mean, clean.running_mean)
    assert off_by(failed, [clean.w.grad] if clean.w.grad is not None else []) <= 1e-12
