"""What an error advises about the graphs of a dict is right when it is followed."""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from elastic_mbs import ElasticMBS, cut
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError

EDGES = [[[0, 1, 2, 3], [1, 0, 3, 4]], [[0, 2], [1, 3]], [[], []]]


def graphs(edges: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(5, 4, dtype=torch.float64),
        "edge_index": torch.tensor(edges).long(),
        "ptr": torch.tensor([0, 2, 5]),
        "y": torch.randn(2, dtype=torch.float64),
    }


@pytest.mark.parametrize("edges", EDGES)
def test_the_line_for_edges_beside_ptr_gives_the_plain_gradient(edges: Any) -> None:
    model, batch = nn.Linear(4, 1).double(), graphs(edges)

    def loss_fn(piece: Any) -> Any:
        out = model(piece["x"])[:, 0]
        source, target = piece["edge_index"]
        out, ptr = out.index_add(0, target, out[source]), piece["ptr"].tolist()
        sums = [out[a:b].sum() for a, b in pairwise(ptr)]
        return (torch.stack(sums) - piece["y"]).square().mean()

    loss_fn(batch).backward()
    plain = [leaf.grad.clone() for leaf in model.parameters() if leaf.grad is not None]
    model.zero_grad()
    mbs = ElasticMBS(model, micro_batch_size=1)
    with pytest.raises(BatchError, match='is needed beside "ptr"') as caught:
        mbs.backward(loss_fn, batch)
    assert "dims=" not in str(caught.value)
    (line,) = re.findall(r"add it: (.*)", str(caught.value))
    exec(line, {"torch": torch, "batch": batch})
    assert len(mbs.backward(loss_fn, batch).partition) == 2
    for leaf, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-12, atol=1e-12)


def test_edges_whose_nodes_have_no_graph_are_not_cut() -> None:
    batch = graphs(EDGES[0])
    del batch["ptr"]
    for other in (batch, batch | {"graph_of": torch.tensor([0, 0, 1, 1, 1])}):
        with pytest.raises(BatchError, match="add it to the batch"):
            BatchView(other)


def test_edges_are_not_cut_where_the_keys_beside_them_do_not_fit() -> None:
    index = torch.tensor([0, 0, 1, 1, 1])
    with pytest.raises(BatchError, match='"ptr" must begin with 0 and end with 5'):
        BatchView(graphs(EDGES[1]) | {"batch": index, "ptr": torch.tensor([0, 2, 4])})
    with pytest.raises(BatchError, match='is needed beside "ptr"'):
        BatchView(graphs(EDGES[1]) | {"batch": index.float()})


def test_a_graph_that_all_samples_share_passes_whole() -> None:
    batch = {"x": torch.randn(2, 5, 3), "edge_index": torch.tensor(EDGES[0])}
    with pytest.raises(BatchError, match="share one graph") as caught:
        BatchView(batch)
    (line,) = re.findall(r"dims=(.*)", str(caught.value))
    piece = BatchView(batch, eval(line, {"cut": cut})).piece(0, 1)
    assert (len(piece["x"]), piece["edge_index"].shape) == (1, (2, 4))


def test_edges_of_each_sample_are_cut_as_all_else() -> None:
    batch = {"x": torch.randn(2, 5, 3), "edge_index": torch.zeros(2, 2, 4).long()}
    assert BatchView(batch, {"edge_index": 0}).length == 2
    assert BatchView({"x": torch.randn(3, 5), "edge_index": torch.zeros(3, 2, 4)}).length == 3


def test_labels_of_nodes_do_not_tell_the_number_of_graphs() -> None:
    batch = graphs(EDGES[0]) | {"y": torch.randn(5), "batch": torch.tensor([0, 0, 1, 1, 1])}
    ptr = batch.pop("ptr")
    with pytest.raises(BatchError, match="nothing tells how many samples") as caught:
        BatchView(batch)
    assert '"ptr" tells it' in str(caught.value)
    assert "dims=" not in str(caught.value)
    assert BatchView(batch | {"ptr": ptr}).length == 2
    assert BatchView(batch | {"target": torch.zeros(2)}).length == 2


def test_labels_of_graphs_that_are_as_many_as_edges_are_offered() -> None:
    batch = graphs(EDGES[1]) | {"batch": torch.tensor([0, 0, 1, 1, 1])}
    del batch["ptr"]
    with pytest.raises(BatchError, match="nothing tells how many samples") as caught:
        BatchView(batch)
    (line,) = re.findall(r'if "y" has one row per sample: dims=(.*)', str(caught.value))
    piece = BatchView(batch, eval(line, {"cut": cut})).piece(1, 2)
    assert (len(piece["x"]), piece["y"].tolist()) == (3, batch["y"][1:].tolist())


def test_a_field_that_can_be_read_in_two_ways_is_told_with_its_rows() -> None:
    batch = {
        "img": torch.zeros(4, 3),
        "ids": torch.arange(4),
        "batch_idx": torch.tensor([0, 0, 1, 3]),
    }
    with pytest.raises(BatchError, match=r'"ids" can be read .*: 4 rows, in a batch of 4 samples'):
        BatchView(batch)


def test_an_error_with_the_right_line_names_no_other_ways() -> None:
    batch = {"x": torch.zeros(4, 3), "rows": torch.zeros(7), "n": torch.tensor([1, 2, 0, 4])}
    with pytest.raises(BatchError, match="disagree on its length") as caught:
        BatchView(batch)
    assert str(caught.value).splitlines()[-1].startswith("  if it has 4 samples, ")
    with pytest.raises(BatchError, match="register_splitter"):
        BatchView({"x": torch.zeros(4, 3), "rows": torch.zeros(7)})


def cycles(**fields: Any) -> dict[str, Any]:
    """Return two graphs with 7 nodes and 7 edges, the edges in any order."""
    order = torch.tensor([3, 0, 4, 1, 5, 2, 6])
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [1, 2, 0, 4, 5, 6, 3]])[:, order]
    graph_of = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    return {
        "x": torch.randn(7, 4),
        "edge_index": edges,
        "batch": graph_of,
        "y": torch.randn(2),
        **fields,
    }


@pytest.mark.parametrize("ptr", [{}, {"ptr": torch.tensor([0, 3, 7])}])
@pytest.mark.parametrize("name", ["edge_attr", "edge_weight", "edge_type"])
def test_fields_of_edges_go_with_them_where_there_are_as_many_nodes(name: str, ptr: Any) -> None:
    batch = cycles(**ptr) | {name: torch.arange(7)}
    assert BatchView(batch).piece(0, 1)[name].tolist() == [1, 3, 5]


def test_a_field_of_nodes_or_of_edges_is_asked_about_until_a_batch_shows_it() -> None:
    batch = cycles(distance=torch.arange(7))
    with pytest.raises(BatchError, match="of 7 nodes and 7 edges") as caught:
        BatchView(batch)
    (line,) = re.findall(r"dims=(.*)", str(caught.value))
    said = BatchView(batch, eval(line, {"cut": cut}))
    assert said.piece(0, 1)["distance"].tolist() == [0, 1, 2]
    assert '"edge_distance"' in str(caught.value)
    renamed = cycles(edge_distance=torch.arange(7))
    assert BatchView(renamed).piece(0, 1)["edge_distance"].tolist() == [1, 3, 5]

    more = cycles(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 0, 4]]))
    for rows, wanted in ((4, [1, 3, 5]), (7, [0, 1, 2])):
        shown = BatchView(more | {"distance": torch.arange(rows)})
        later = BatchView(batch, None, shown.known_lists)
        assert later.piece(0, 1)["distance"].tolist() == wanted


def test_a_field_is_not_asked_about_where_nodes_and_edges_are_cut_alike() -> None:
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [1, 2, 0, 4, 5, 6, 3]])
    batch = cycles(edge_index=edges, distance=torch.arange(7))
    assert BatchView(batch).piece(1, 2)["distance"].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("train_index", [0, 4, 6]),
        ("train_index", [0, 3]),  # one node of each graph
        ("edge_label_index", [[0, 1, 4], [2, 0, 5]]),
    ],
)
def test_numbers_of_nodes_are_refused_without_a_line_that_leaves_them(
    name: str, numbers: Any
) -> None:
    batch = cycles() | {name: torch.tensor(numbers)}
    with pytest.raises(BatchError, match=f'"{name}" can hold numbers of nodes') as caught:
        BatchView(batch)
    assert "cut." not in str(caught.value)


@pytest.mark.parametrize("numbers", [[3, 250], [6, 5], [6, 5, 4, 3, 2, 1, 0]])
def test_a_number_of_each_graph_or_node_is_no_number_of_nodes(numbers: Any) -> None:
    batch = cycles(edge_attr=torch.randn(7), sample_index=torch.tensor(numbers))
    if len(numbers) == 7:
        batch |= {"edge_index": batch["edge_index"][:, :5], "edge_attr": torch.randn(5)}
    piece = BatchView(batch).piece(0, 1)
    assert piece["sample_index"].tolist() == numbers[: 3 if len(numbers) == 7 else 1]


def test_what_dims_says_of_numbers_wins() -> None:
    batch = cycles(train_index=torch.tensor([0, 4, 6]), edge_index=torch.zeros(2, 0).long())
    view = BatchView(batch, {"train_index": None})
    assert view.piece(1, 2)["train_index"].tolist() == [0, 4, 6]
    said = cut.ragged("train_index", lengths=lambda _: [1, 2])
    assert BatchView(batch, said).piece(1, 2)["train_index"].tolist() == [4, 6]


def test_a_list_of_edges_goes_with_them() -> None:
    batch = cycles(edge_names=list("abcdefg"))
    assert BatchView(batch).piece(0, 1)["edge_names"] == ["b", "d", "f"]


NODES = torch.tensor([0, 0, 1, 1, 1])
OF_GRAPH = {"batch": NODES, "nodes": torch.tensor([2, 3]), "edges": torch.tensor([1, 3])}


def readout(model: nn.Module) -> Any:
    """Return a loss over graphs, whose predictions would spread over the labels of a piece."""

    def loss_fn(piece: Any) -> Any:
        source, target = piece["edge_index"]
        out = model(piece["x"])[:, 0]
        out = out.index_add(0, target, out[source])
        index = piece["batch"]
        graphs = out.new_zeros(int(index.max()) + 1).index_add(0, index, out)
        return (graphs - piece["y"]).square().mean()

    return loss_fn


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (cut.whole("x", "edge_index", "batch"), '"batch" tells of 2 graphs'),
        (cut.whole("x", "edge_index", "batch", "ptr"), '"batch" tells of 2 graphs'),
        (cut.whole("ptr"), '"ptr" tells of 2 graphs'),
        (cut.whole("edge_index"), '"edge_index" holds numbers of nodes'),
        (cut.ragged("x", by="batch") | cut.whole("edge_index"), '"edge_index" holds numbers'),
        (
            cut.ragged("x", lengths="nodes") | cut.ragged("edge_index", lengths="edges", dim=1),
            '"edge_index" holds numbers of nodes',
        ),
    ],
)
def test_numbers_of_nodes_or_graphs_that_dims_leaves_as_they_are_are_refused(
    said: Any, named: str
) -> None:
    model, batch = nn.Linear(4, 1).double(), graphs([[0, 2, 3, 4], [1, 3, 4, 2]]) | OF_GRAPH
    if "batch" in said and "ptr" not in said:
        del batch["ptr"]
    loss_fn = readout(model)
    loss_fn(batch).backward()
    plain = [leaf.grad.clone() for leaf in model.parameters() if leaf.grad is not None]
    model.zero_grad()
    with pytest.raises(BatchError, match=named) as refused:
        ElasticMBS(model, micro_batch_size=1, dims=said).backward(loss_fn, batch)
    assert "leave the fields of the graphs out of dims=" in str(refused.value)
    assert all(leaf.grad is None for leaf in model.parameters())
    ElasticMBS(model, micro_batch_size=1).backward(loss_fn, batch)
    for leaf, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-12, atol=1e-12)


def test_numbers_of_nodes_that_are_right_in_every_piece_may_be_said() -> None:
    # one graph that all samples share, whose nodes lie one after the other
    shared = {"x": torch.randn(6, 4), "batch": torch.tensor([0, 0, 1, 1, 2, 2])}
    shared |= {"edge_index": torch.tensor([[0, 1], [1, 0]]), "y": torch.randn(3)}
    said = cut.ragged("x", by="batch") | cut.whole("edge_index")
    assert BatchView(shared, said).piece(1, 2)["edge_index"].tolist() == [[0, 1], [1, 0]]
    # all graphs in every piece, which picks some
    picks = graphs(EDGES[0]) | {"graph_of": NODES, "pick": torch.tensor([1, 0, 1])}
    del picks["ptr"], picks["y"]
    said = cut.whole("x", "edge_index", "graph_of")
    assert BatchView(picks, said).piece(1, 3)["pick"].tolist() == [0, 1]
    whole = cut.whole("x", "edge_index", "batch")
    three = {key: value for key, value in picks.items() if key != "graph_of"} | {"batch": NODES}
    assert BatchView(three, whole).length == 3
