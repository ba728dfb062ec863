from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, MemoryOptions, Policy
from elastic_mbs.batch.loss_terms import (
    Terms,
    check_graph,
    read_losses,
    weighted_sum,
    without_void,
)
from elastic_mbs.errors import CountError, LossError
from tests.helpers.steps import elastic, mlp, pairs, there, through

pytestmark = pytest.mark.injectable

Named = namedtuple("Named", ["loss", "logits"])


def scalar(value: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=dtype, requires_grad=True)


@dataclass
class Output:
    loss: Tensor | None
    logits: str = "logits"


LOSS = scalar()
MAPPING = {"loss": LOSS, "logits": "logits"}
OBJECT = Output(LOSS)
NAMED = Named(LOSS, "logits")


@pytest.mark.parametrize(
    ("value", "outputs"),
    [
        (LOSS, None),
        ((LOSS, "logits"), "logits"),
        ([LOSS, "logits"], "logits"),
        ([LOSS, LOSS.detach()], LOSS.detach()),
        ((LOSS, "logits", "more"), ("logits", "more")),
        ((LOSS,), None),
        ((LOSS, None), None),
        (MAPPING, MAPPING),
        (OrderedDict(MAPPING), MAPPING),
        (OBJECT, OBJECT),
        (NAMED, NAMED),
        (torch.ones(1, 1, requires_grad=True), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_loss_is_found_in_everything_that_may_hold_it(value: Any, outputs: Any) -> None:
    terms, rest = read_losses(value, None)
    assert list(terms) == [None]
    assert (terms[None].shape, terms[None].item()) == ((), 1.0)
    assert terms[None].requires_grad
    assert rest == outputs


TERMS = {"a": scalar(1), "b": scalar(2)}


@pytest.mark.parametrize(
    ("value", "outputs"),
    [
        (TERMS, None),
        ((TERMS, "logits"), "logits"),
        ({"loss": TERMS, "logits": 1}, {"loss": TERMS, "logits": 1}),
        (SimpleNamespace(loss=TERMS), SimpleNamespace(loss=TERMS)),
    ],
)
def test_losses_with_names_are_found_beside_outputs(value: Any, outputs: Any) -> None:
    terms, rest = read_losses(value, ("b", "a"))
    assert list(terms) == ["b", "a"]
    assert all(
        terms[name] is TERMS[str(name)] or terms[name]._base is TERMS[str(name)] for name in terms
    )
    assert rest == outputs
    assert read_losses({"loss": LOSS}, ("loss",)) == ({"loss": LOSS}, None), (
        "a count may be named loss"
    )


@pytest.mark.parametrize(
    ("value", "names", "message"),
    [
        (None, None, "is a `return` missing"),
        (3.5, None, "returned a float, which has no loss in it"),
        ((), None, "returned a tuple, which has no loss in it"),
        (Output(None), None, "returned a Output, which has no loss in it"),
        ({"cost": LOSS}, None, r"a dict without 'loss' \(it has \['cost'\]\)"),
        ({"a": LOSS, "b": LOSS}, None, r"return sum\(losses.values\(\)\)"),
        ({"a": LOSS, "b": LOSS}, None, r"count=\{'a': None, 'b': None\}, where None counts"),
        ((3.5, "logits"), None, "the loss is a float, not a tensor"),
        ({"loss": None}, None, "the loss is a NoneType, not a tensor"),
        (
            torch.ones(4, requires_grad=True),
            None,
            r"the loss has shape \(4,\); it must be a scalar\n"
            r"  if it is the model's output: return the loss of it\n"
            r"  if the loss comes second: put it first, \(loss, outputs\)\n"
            r"  if it is a loss for each sample .*: return its .mean\(\), or its .sum\(\) with",
        ),
        (torch.ones(0, requires_grad=True), None, r"the loss has shape \(0,\)"),
        (torch.tensor(3), None, "the loss has dtype torch.int64"),
        (torch.tensor(1j, requires_grad=True), None, "the loss has dtype torch.complex64"),
        (LOSS, ("a", "b"), r"count= is a dict with the names \['a', 'b'\].*not a Tensor"),
        ({"a": LOSS, "c": LOSS}, ("a", "b"), r"missing \['b'\], without a count \['c'\]"),
        ({"a": torch.ones(2, requires_grad=True)}, ("a",), r"the loss 'a' has shape \(2,\)"),
        ([LOSS, LOSS], None, r"a list whose entries 0 and 1 are both scalars with a graph"),
        ((LOSS, "logits", LOSS), None, r"a tuple whose entries 0 and 2 are both scalars"),
    ],
)
def test_what_is_no_loss_is_refused_with_what_was_found(
    value: Any, names: tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises(LossError, match=message):
        read_losses(value, names)


def test_a_dict_of_other_values_is_not_advised_to_be_added_up() -> None:
    with pytest.raises(LossError) as caught:
        read_losses({"logits": torch.rand(4, 3), "cost": LOSS}, None)
    assert "sum(" not in str(caught.value)


def test_a_dict_of_losses_is_right_where_its_advice_is_followed() -> None:
    model = mlp()
    batch = pairs(8)

    def losses(b: Any) -> Any:
        out = model(b[0])
        return {"fit": out.square().mean(), "rate": out.exp().mean()}

    with pytest.raises(LossError) as caught:
        elastic(model, micro_batch_size=3).backward(losses, batch)
    assert "count={'fit': None, 'rate': None}" in str(caught.value)
    whole = torch.autograd.grad(sum(losses(batch).values()), list(model.parameters()))
    for fn, count in (
        (lambda b: sum(losses(b).values()), None),
        (losses, {"fit": None, "rate": None}),
    ):
        model.zero_grad()
        elastic(model, micro_batch_size=3, count=count).backward(fn, batch)
        for parameter, right in zip(model.parameters(), whole, strict=True):
            torch.testing.assert_close(parameter.grad, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("terms", [{None: torch.tensor(1.0)}, dict.fromkeys("ab", torch.ones(()))])
def test_losses_none_of_which_has_a_graph_are_refused(terms: Terms) -> None:
    with pytest.raises(LossError, match=r"has no graph.*no_grad"):
        check_graph(terms)


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        # 0/0 beside a loss that has terms; a sum over nothing; a function that guards its division
        ({"boxes": float("nan"), "labels": 2.0}, {"boxes": 0.0, "labels": 1.0}),
        ({"boxes": 0.0, "labels": 2.0}, {"boxes": 1.0, "labels": 1.0}),
        ({"boxes": 0.25, "labels": float("nan")}, {"boxes": 1.0, "labels": 1.0}),
        ({"boxes": float("inf"), "labels": 2.0}, "the loss 'boxes' is inf"),
        ({"boxes": float("-inf"), "labels": 2.0}, "the loss 'boxes' is -inf"),
        ({"boxes": float("nan")}, r"divide by \(mbs.total\['boxes'\] or 1\)"),
    ],
)
def test_a_sum_without_a_term_in_the_batch_counts_unless_it_is_0_by_0(
    values: dict[str, float], weights: Any
) -> None:
    terms: Terms = {name: scalar(value) for name, value in values.items()}
    ones: dict[str | None, float] = dict.fromkeys(terms, 1.0)
    if isinstance(weights, dict):
        assert without_void(terms, ones, {"boxes"}) == weights
        assert without_void(terms, {**ones, "boxes": 0.0}, {"boxes"})["boxes"] == 0
        return
    with pytest.raises(CountError, match=weights):
        without_void(terms, ones, {"boxes"})


@given(
    st.lists(
        st.tuples(st.floats(-10, 10), st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=4
    )
)
def test_the_sum_and_its_gradient_are_weighted(terms: list[tuple[float, float]]) -> None:
    leaves: Terms = {str(i): scalar(value) for i, (value, _) in enumerate(terms)}
    weights: dict[str | None, float] = {str(i): weight for i, (_, weight) in enumerate(terms)}
    assume(any(weights.values()))
    total = weighted_sum(leaves, weights)
    total.backward()
    assert total.item() == pytest.approx(
        sum(value * weight for value, weight in terms), rel=1e-14, abs=1e-14
    )
    for name, term in leaves.items():
        assert (0.0 if term.grad is None else term.grad.item()) == weights[name]


def test_a_term_of_weight_zero_is_left_out_although_it_is_nan() -> None:
    good, bad = scalar(2.0), scalar(float("nan"))
    total = weighted_sum({"good": good, "bad": bad}, {"good": 0.5, "bad": 0.0})
    total.backward()
    assert total.item() == 1.0
    assert bad.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_losses_are_weighed_in_single_precision(dtype: torch.dtype) -> None:
    loss = scalar(1.0, dtype)
    total = weighted_sum({None: loss}, {None: 1 / 3})
    assert total.dtype is torch.float32
    assert total.item() == torch.tensor(1 / 3).item()
    total.backward()
    assert there(loss.grad).dtype is dtype


def test_a_counted_term_without_a_graph_adds_its_loss_and_no_gradient() -> None:
    model = nn.Linear(3, 1).double()
    x, labelled = torch.randn(4, 3, dtype=torch.float64), [0, 0, 1, 1]

    def loss_fn(batch: dict[str, Any]) -> dict[str, Tensor]:
        labelled = torch.tensor(batch["labelled"], dtype=torch.float64)
        return {
            "labelled": (model(batch["x"])[:, 0] * labelled).sum() / labelled.sum(),
            "constant": torch.tensor(2.0, dtype=torch.float64),
        }

    with ElasticMBS(
        model,
        micro_batch_size=2,
        count={"labelled": lambda batch: batch["labelled"], "constant": None},
        policy=Policy(grow=False),
        memory=MemoryOptions(monitor_interval=0),
    ) as mbs:
        result = mbs.backward(loss_fn, {"x": x, "labelled": labelled})
    assert float(result) == pytest.approx(model(x[2:]).mean().item() + 2, rel=1e-14)
    assert torch.allclose(there(model.weight.grad), x[2:].mean(0, keepdim=True), rtol=1e-14)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("door", [1, 3])
def test_a_later_edit_of_a_loss_does_not_reach_the_reported_one(door: int, enabled: bool) -> None:
    # a loss kept by `detach()` shares its memory with the user's `total = loss.detach()`
    model, batch = mlp(), pairs(8)
    total: list[Tensor] = []

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(model(piece[0]), piece[1])
        if total:
            total[0] += loss.detach()
        else:
            total.append(loss.detach())
        return loss

    mbs = elastic(model, micro_batch_size=2, grow=False, enabled=enabled)
    with torch.no_grad():
        wanted = float(nn.functional.cross_entropy(model(batch[0]), batch[1]))
    for _ in range(4):
        total.clear()
        assert abs(float(through(door, mbs, loss_fn, batch)) - wanted) <= 1e-12
