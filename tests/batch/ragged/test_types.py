"""Jagged tensors, batches of graphs and TensorDicts are cut by samples."""

import gc
import weakref
from collections import UserDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs import ElasticMBS
from elastic_mbs.batch.containers import map_tensors
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError
from elastic_mbs.testing import InjectOOM
from tests.helpers.ragged import LENGTHS

WARNING = "ignore:The PyTorch API of nested tensors"


class Graph:
    """A graph as PyTorch Geometric has it, as far as it matters here."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Graphs(Graph):
    """A batch of them."""

    ptr: Tensor
    num_graphs: int = 0

    @classmethod
    def from_data_list(cls, graphs: list[Graph], follow_batch: list[str] | None = None) -> "Graphs":
        assert not follow_batch
        new = cls(torch.cat([each.x for each in graphs]), torch.cat([each.y for each in graphs]))
        lengths = torch.tensor([0] + [len(each.x) for each in graphs])
        new.ptr, new.num_graphs = lengths.cumsum(0), len(graphs)
        return new

    def index_select(self, places: range) -> list[Graph]:
        ends = self.ptr.tolist()
        return [Graph(self.x[ends[i] : ends[i + 1]], self.y[i : i + 1]) for i in places]

    def keys(self) -> list[str]:
        return ["x", "y", "ptr"]

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.keys()}

    def apply(self, fn: Callable[[Tensor], Tensor]) -> "Graphs":
        for name in self.keys():
            setattr(self, name, fn(getattr(self, name)))
        return self


def graphs(lengths: list[int], new: Any = Graph, batch: Any = Graphs) -> Any:
    made, row = [], 0
    for number, length in enumerate(lengths):
        x = torch.arange(row, row + length).double()[:, None]
        made.append(new(x=x, y=torch.tensor([float(number)])))
        row += length
    return batch.from_data_list(made)


def test_a_batch_of_graphs_is_cut_by_graphs() -> None:
    view = BatchView(graphs([2, 0, 3]))
    assert view.length == 3
    piece = view.piece(1, 3)
    assert piece.y.tolist() == [1, 2]
    assert piece.x[:, 0].tolist() == [2, 3, 4]
    assert [len(tensor) for tensor in view.tensors] == [5, 3, 4]
    assert view.worth == 2  # 5 nodes, of which the largest graph has 3


def test_graphs_are_moved_as_copies() -> None:
    batch = graphs([2, 1])
    moved = map_tensors(batch, torch.Tensor.clone)
    assert moved.x is not batch.x
    assert torch.equal(moved.x, batch.x)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_batches_of_torch_geometric_are_joined_bit_for_bit(
    lengths: list[int], data: st.DataObject
) -> None:
    pyg = pytest.importorskip("torch_geometric.data")

    def graph(x: Tensor, y: Tensor) -> Any:
        ring = torch.arange(len(x))
        return pyg.Data(x=x, y=y, edge_index=torch.stack([ring, ring.roll(1)]), name="graph")

    batch = graphs(lengths, graph, pyg.Batch)
    view = BatchView(batch)
    cuts = sorted({0, len(lengths), *data.draw(st.lists(st.integers(0, len(lengths))))})
    pieces = [view.piece(start, stop) for start, stop in pairwise(cuts)]
    joined = pyg.Batch.from_data_list([each for piece in pieces for each in piece.to_data_list()])
    names = list(batch.keys())
    assert sorted(joined.keys()) == sorted(names)
    assert all(torch.equal(joined[key], batch[key]) for key in names if key != "name")
    assert joined.name == batch.name


def test_a_list_of_graphs_holds_one_item_per_sample() -> None:
    made = [Graph(torch.zeros(n, 2), torch.zeros(1)) for n in (3, 1, 2)]
    assert BatchView(made).piece(1, 3) == made[1:]


class Dict:
    """A TensorDict, as far as it matters here."""

    device = None
    batch_size: Sequence[int] = ()
    batch_dims = 0

    def __init__(self, parts: dict[str, Tensor], batch_size: Sequence[int]) -> None:
        self.parts, self.batch_size, self.batch_dims = parts, batch_size, len(batch_size)

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any: ...

    def auto_batch_size_(self, dims: int) -> None:
        first = next(iter(self.parts.values()))
        self.batch_size, self.batch_dims = list(first.shape[:dims]), dims

    def __getitem__(self, some: slice) -> "Dict":
        parts = {name: part[some] for name, part in self.parts.items()}
        return Dict(parts, [len(next(iter(parts.values())))])

    def to_dict(self) -> dict[str, Tensor]:
        return dict(self.parts)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> "Dict":
        return Dict({name: fn(part) for name, part in self.parts.items()}, self.batch_size)


def _tensordict() -> Any:
    return pytest.importorskip("tensordict").TensorDict


@pytest.mark.parametrize("kind", [lambda: Dict, _tensordict], ids=["stand-in", "tensordict"])
def test_a_tensordict_is_cut_by_its_batch_size(kind: Callable[[], Any]) -> None:
    batch = kind()({"a": torch.arange(8.0).view(4, 2), "b": torch.arange(4.0)}, batch_size=[4])
    view = BatchView({"td": batch, "y": torch.zeros(4)})
    piece = view.piece(1, 3)["td"]
    assert list(piece.batch_size) == [2]
    assert piece.to_dict()["a"].tolist() == [[2, 3], [4, 5]]
    moved = map_tensors(piece, torch.Tensor.neg)
    assert moved.to_dict()["b"].tolist() == [-1, -2]
    assert view.elements == 4
    with pytest.raises(BatchError, match="auto_batch_size_"):
        BatchView(kind()({"a": torch.zeros(4)}, batch_size=[]))


@pytest.mark.parametrize("base", [Dict, dict, UserDict], ids=lambda base: base.__name__)
def test_the_class_of_a_batch_is_not_kept_alive(base: type) -> None:
    def cut() -> weakref.ref[type]:
        cls = type("Mine", (base,), {})
        parts = {"x": torch.zeros(4, 2)}
        view = BatchView(cls(parts, [4]) if base is Dict else cls(parts))
        assert (view.length, view.piece(1, 3) is None) == (4, False)
        return weakref.ref(cls)

    alive = cut()
    gc.collect()
    assert alive() is None


def jagged(lengths: list[int]) -> Any:  # torch leaves what it adds untyped
    parts = [torch.arange(length * 2.0).view(length, 2) + 100 * length for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.filterwarnings(WARNING)
@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.booleans(), st.data())
def test_jagged_tensors_are_cut_by_samples(
    lengths: list[int], turned: bool, data: st.DataObject
) -> None:
    batch = jagged(lengths).transpose(1, 2) if turned else jagged(lengths)
    view = BatchView({"x": batch, "y": torch.zeros(len(lengths))})
    cuts = sorted({0, len(lengths), *data.draw(st.lists(st.integers(0, len(lengths))))})
    pieces = [view.piece(start, stop)["x"] for start, stop in pairwise(cuts)]
    samples = [each for piece in pieces for each in piece.unbind()]
    assert len(samples) == len(lengths)
    assert all(map(torch.equal, samples, batch.unbind()))
    assert all(int(piece.offsets()[0]) == 0 for piece in pieces)
    if max(lengths) > min(lengths):
        assert view.costs is not None
        assert view.elements == max(lengths) * 2 + 1


@pytest.mark.filterwarnings(WARNING)
def test_pieces_of_tensors_that_share_their_offsets_can_be_added() -> None:
    first = jagged([2, 1, 3])
    second = torch.nested.nested_tensor_from_jagged(first.values() * 2, first.offsets())
    piece = BatchView((first, second)).piece(1, 3)
    assert (piece[0] + piece[1]).values().tolist() == (first.values()[2:] * 3).tolist()


@pytest.mark.filterwarnings(WARNING)
def test_a_loss_over_a_jagged_tensor_is_exact_whatever_fails() -> None:
    lengths = [2, 5, 1, 3]

    def run(model: nn.Module, batch: Tensor) -> Tensor:
        return torch.stack([model(each).tanh().sum() for each in batch.unbind()]).square().mean()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(2, 2).double()

    whole = model()
    run(whole, jagged(lengths).double()).backward()
    for place in range(1, 60):
        one, batch = model(), jagged(lengths).double()
        mbs = ElasticMBS(one)
        with InjectOOM(at=[place]) as injected:
            mbs.backward(partial(run, one), batch)
        if not injected.hits:
            break
        for leaf, wanted in zip(one.parameters(), whole.parameters(), strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad, wanted.grad, rtol=1e-12, atol=1e-12)
    assert place > 10
