"""A batch of graphs is cut as it is now, whatever was edited since it was collated.

The same promises for PyTorch Geometric and for a stand-in that cuts as it does.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_mbs.batch.containers import kind_of, register_splitter, splitters
from elastic_mbs.batch.foreign.graphs import Places
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError
from tests.helpers import graphs as stand_in


def _package() -> Any:
    return pytest.importorskip("torch_geometric.data")


PACKAGES = pytest.mark.parametrize(
    "package", [lambda: stand_in, _package], ids=["stand-in", "torch_geometric"]
)
Package = Callable[[], ModuleType]


def collated(package: Any, nodes: list[int], edges: list[int] | None = None) -> Any:
    """Return a batch of graphs with random edges."""
    made = []
    for number, (size, count) in enumerate(zip(nodes, edges or nodes, strict=True)):
        made.append(
            package.Data(
                x=torch.randn(size, 2),
                edge_index=torch.randint(0, size, (2, 2 * count)),
                edge_attr=torch.randn(2 * count),
                y=torch.tensor([float(number)]),
                name=f"g{number}",
            )
        )
    return package.Batch.from_data_list(made)


def sums(batch: Any) -> Tensor:
    """Return one number of each graph, in which each node, edge and field has a part."""
    source, target = batch.edge_index
    nodes = batch.x.sum(1).double()
    weights = batch.edge_attr.double()[: len(source)] if "edge_attr" in batch.to_dict() else 1
    nodes = nodes.index_add(0, target, nodes[source] * weights)
    graphs = torch.zeros(batch.num_graphs, dtype=torch.double)
    found: Tensor = graphs.index_add(0, batch.batch, nodes.square()) + batch.y
    return found


def check(batch: Any, of: Callable[[Any], Tensor] = sums) -> None:
    """Check that pieces of every size tell of each graph what the whole batch does."""
    view = BatchView(batch)
    wanted = of(batch)
    for size in (1, 2, view.length):
        cuts = [*range(0, view.length, size), view.length]
        found = [of(view.piece(start, stop)) for start, stop in pairwise(cuts)]
        torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-12, atol=1e-12)


@PACKAGES
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(0, 2**31), st.data())
def test_edited_edges_go_with_their_nodes(
    package: Package, nodes: list[int], seed: int, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    edges = data.draw(st.lists(st.integers(0, 4), min_size=len(nodes), max_size=len(nodes)))
    batch = collated(package(), nodes, edges)
    check(batch)
    loops = torch.arange(len(batch.x)).expand(2, -1)
    kept = torch.rand(batch.edge_index.shape[1]) > 0.4
    order = torch.randperm(batch.edge_index.shape[1])
    edits: list[tuple[Any, Any]] = [
        (
            lambda old: torch.cat([old, loops], 1),
            lambda old: torch.cat([old, old.new_ones(len(loops[0]))]),
        ),
        (lambda old: old[:, kept], lambda old: old[kept]),
        (lambda old: old[:, order], lambda old: old[order]),
        (lambda old: loops, lambda old: torch.rand(len(loops[0]))),
    ]
    edit_index, edit_attr = data.draw(st.sampled_from(edits))
    batch.edge_index, batch.edge_attr = edit_index(batch.edge_index), edit_attr(batch.edge_attr)
    check(batch)


@PACKAGES
def test_fields_set_after_collating_are_in_the_pieces(package: Package) -> None:
    batch = collated(package(), [3, 1, 2])
    batch.x = batch.x + 1
    batch.pe = torch.arange(6.0)
    batch.weight = torch.tensor([1.0, 2, 4])
    batch.edge_weight = torch.rand(12)
    batch.scale, batch.mode = 3, "train"
    view = BatchView(batch)
    piece = view.piece(1, 3)
    assert piece.pe.tolist() == [3, 4, 5]
    assert piece.weight.tolist() == [2, 4]
    assert torch.equal(piece.edge_weight, batch.edge_weight[6:])
    assert torch.equal(piece.x, batch.x[3:])
    assert (piece.scale, piece.mode, piece.name) == (3, "train", ["g1", "g2"])


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda batch: setattr(batch, name, value)


@PACKAGES
@pytest.mark.parametrize(
    ("edit", "name", "problem"),
    [
        (_set("x", torch.zeros(7, 2)), "x", "has 7 rows, and had 6 when it was collated"),
        (_set("y", torch.zeros(4)), "y", "has 4 rows, and had 3"),
        (_set("extra", torch.zeros(5)), "extra", "was set after collating, and has 5 rows"),
        (_set("train_index", torch.tensor([0, 4])), "train_index", "was set after collating"),
        (_set("notes", ["a", "b", "c"]), "notes", "was set after collating"),
        (_set("edge_index", torch.tensor([[0], [5]])), "edge_index", "has edges between graphs"),
        (_set("edge_index", torch.zeros(4, 2).long()), "edge_index", "has the shape"),
        (_set("ptr", torch.tensor([0, 2, 4, 6])), "ptr", "contradicts"),
        (_set("batch", torch.tensor([0, 1, 0, 1, 2, 2])), "batch", "is not sorted"),
        (_set("batch", torch.tensor([0, 1, 2, 3, 3, 3])), "batch", "holds 3"),
    ],
)
def test_an_edit_that_cannot_be_cut_is_refused_by_name(
    package: Package, edit: Callable[[Any], None], name: str, problem: str
) -> None:
    batch = collated(package(), [3, 1, 2])
    edit(batch)
    with pytest.raises(BatchError, match=f'"{name}" of the batch of graphs {problem}'):
        BatchView(batch)


@PACKAGES
def test_numbers_of_nodes_that_moved_to_another_graph_are_refused(package: Package) -> None:
    made = [
        package().Data(x=torch.randn(3, 2), seed_index=torch.tensor([0, 2]), y=torch.zeros(1))
        for _ in range(3)
    ]
    batch = package().Batch.from_data_list(made)
    assert BatchView(batch).piece(1, 3).seed_index.tolist() == [0, 2, 3, 5]
    batch.seed_index = batch.seed_index.flip(0)
    with pytest.raises(BatchError, match=r'"seed_index".*holds numbers of other graphs'):
        BatchView(batch)


@PACKAGES
def test_rows_that_can_be_of_nodes_or_of_edges_are_refused(package: Package) -> None:
    batch = collated(package(), [2, 4], [2, 1])
    batch.distance = torch.zeros(6)  # 6 nodes and 6 edges
    with pytest.raises(BatchError, match=r'"distance".*can be those of graphs, nodes or edges'):
        BatchView(batch)
    batch = collated(package(), [2, 4], [2, 1])
    batch.edge_weight = torch.arange(6)
    assert BatchView(batch).piece(1, 2).edge_weight.tolist() == [4, 5]


@PACKAGES
def test_nodes_given_to_other_graphs_after_collating_are_refused(package: Package) -> None:
    batch = collated(package(), [3, 1, 2])
    batch.batch, batch.ptr = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 2, 4, 6])
    batch.edge_index = torch.zeros(2, 0).long()
    del batch.stores[0]["edge_attr"]
    with pytest.raises(BatchError, match='"batch" of the batch of graphs gives other nodes'):
        BatchView(batch)


@PACKAGES
@pytest.mark.parametrize("without", ["", "ptr"])
def test_a_batch_made_by_hand_is_cut_by_its_keys(package: Package, without: str) -> None:
    whole = collated(package(), [3, 1, 2])
    names = {"x", "edge_index", "edge_attr", "y", "batch", "ptr"} - {without}
    check(package().Batch(**{name: whole[name] for name in names}))


@PACKAGES
def test_a_batch_that_tells_of_no_graphs_is_refused(package: Package) -> None:
    with pytest.raises(BatchError, match="how many graphs the batch has"):
        BatchView(package().Batch(x=torch.zeros(3, 2)))


def test_a_batch_of_graphs_with_several_kinds_of_nodes_is_cut() -> None:
    package, made = _package(), []
    for number in range(4):
        graph, users, items = package.HeteroData(), 2 + number % 3, 3 + number % 2
        graph["u"].x, graph["m"].x = torch.randn(users, 2), torch.randn(items, 2)
        ends = [torch.randint(0, users, (5,)), torch.randint(0, items, (5,))]
        graph["u", "r", "m"].edge_index = torch.stack(ends)
        graph.y = torch.tensor([float(number)])
        made.append(graph)

    def of(batch: Any) -> Tensor:
        source, target = batch["u", "r", "m"].edge_index
        nodes = batch["m"].x.sum(1).double()
        nodes = nodes.index_add(0, target, batch["u"].x.sum(1).double()[source])
        graphs = torch.zeros(batch.num_graphs, dtype=torch.double)
        found: Tensor = graphs.index_add(0, batch["m"].batch, nodes.square()) + batch.y
        return found

    batch = package.Batch.from_data_list(made)
    check(batch, of)
    edges = batch["u", "r", "m"]
    edges.edge_index = torch.cat([edges.edge_index, edges.edge_index[:, ::3]], 1)
    batch.weight = torch.arange(4.0)
    check(batch, of)
    assert BatchView(batch).piece(2, 4).weight.tolist() == [2, 3]
    edges.edge_index = torch.tensor([[0], [6]])
    with pytest.raises(BatchError, match="edges between graphs"):
        BatchView(batch)


@pytest.fixture
def unregistered() -> Iterator[None]:
    before = dict(splitters)
    yield
    splitters.clear()
    splitters.update(before)
    kind_of.clear()


@PACKAGES
@pytest.mark.usefixtures("unregistered")
def test_a_splitter_of_one_graph_does_not_take_batches_of_graphs(package: Package) -> None:
    data, batch = package().Data, collated(package(), [3, 1, 2])
    register_splitter(data, length=lambda one: len(one.x), slice=lambda one, start, stop: one)
    check(batch)
    assert BatchView(data(x=torch.zeros(4, 2))).length == 4
    register_splitter(package().Batch, length=lambda _: 7, slice=lambda one, start, stop: one)
    assert BatchView(batch).length == 7


@PACKAGES
def test_one_graph_is_refused_without_a_line_that_would_cut_it(package: Package) -> None:
    one = package().Data(x=torch.zeros(4, 2), edge_index=torch.zeros(2, 3).long())
    with pytest.raises(BatchError, match="one graph is one sample") as caught:
        BatchView(one)
    assert "register_splitter" not in str(caught.value)
    assert BatchView([one]).length == 1


@PACKAGES
def test_the_places_of_a_batch_are_found_once_for_all_of_its_pieces(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, begin = list[Any](), Places.__init__

    def counted(self: Places, batch: Any) -> None:
        found.append(batch)
        begin(self, batch)

    monkeypatch.setattr(Places, "__init__", counted)
    batch = collated(package(), [2, 3, 1, 4])
    batch.edge_index = batch.edge_index.flip(1)  # which makes a copy of the fields of edges
    batch.edge_attr = batch.edge_attr.flip(0)
    check(batch)
    assert found == [batch]
