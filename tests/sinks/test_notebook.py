"""Runtimes, results and options show themselves, as text and in a notebook."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from elastic_mbs import ElasticMBS, MemoryBudget, StepResult
from elastic_mbs.sinks.notebook import memory_bar, result_html, runtime_html
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import cross_entropy, elastic, mlp, pairs

pytestmark = pytest.mark.no_oom_injection


def parsed(html: str) -> ElementTree.Element:
    assert "http" not in html
    assert "<script" not in html
    return ElementTree.fromstring(html)


def trained(budget: MemoryBudget | None = None, **options: Any) -> ElasticMBS:
    model, batch = mlp(), pairs()
    sensor = {} if budget is None else {"sensor": budget}
    mbs = elastic(model, micro_batch_size=8, **sensor, **options)
    mbs.backward(cross_entropy(model), batch)
    with InjectOOM(at=[1]):
        mbs.backward(cross_entropy(model), batch)
    return mbs


def test_a_runtime_in_words() -> None:
    with MemoryBudget("8MiB") as budget:
        mbs = elastic(mlp(), sensor=budget, name="<mine>")
        assert repr(mbs) == (
            "<ElasticMBS '<mine>' of Sequential: 0 calls, micro-batch auto, 0 OOMs>"
        )
        mbs = trained(budget, name="mine")
        mbs.headroom  # noqa: B018  # a reading
        assert repr(mbs) == (
            "<ElasticMBS 'mine' of Sequential: 2 calls, micro-batch 4, 1 OOM, 8.0 MiB free>"
        )
    both = ElasticMBS([nn.Linear(1, 1), nn.ReLU()], enabled=False)
    assert repr(both) == "<ElasticMBS 'elastic_mbs' of Linear, ReLU: disabled>"


def test_a_result_in_words_has_its_loss() -> None:
    model = mlp()
    result = elastic(model, micro_batch_size=4).backward(cross_entropy(model), pairs())
    assert repr(result) == str(result) == f"{result}"
    assert repr(result) == (
        f"StepResult(loss={float(result):.6g}, pieces=2, micro_batch_size=4, ooms=0, "
        "replayed_samples=0)"
    )
    lost = StepResult(((0, 1),), 1, _losses=(torch.zeros((), device="meta"),))
    assert "loss=?" in repr(lost)


def test_a_runtime_in_a_notebook_has_sizes_errors_and_memory() -> None:
    with MemoryBudget("8MiB") as budget:
        mbs = trained(budget, name="<mine> & yours")
        mbs.headroom  # noqa: B018  # a reading
        tree = parsed(mbs._repr_html_())
    text = "".join(tree.itertext())
    assert "'<mine> & yours' of Sequential" in text
    assert "out of memory 1" in text
    assert "free 8.0 MiB" in text
    (line,) = tree.iter("polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == [4.0, 32.0]  # 8 samples, then 4
    assert len(list(tree.iter("circle"))) == 1


def test_a_runtime_without_a_reading_or_switched_off_shows_itself_too() -> None:
    assert "there is no memory reading" in "".join(parsed(trained()._repr_html_()).itertext())
    off = elastic(mlp(), enabled=False)
    assert "disabled" in "".join(parsed(off._repr_html_()).itertext())


def test_a_result_in_a_notebook_has_its_pieces() -> None:
    model = mlp()
    result = elastic(model, micro_batch_size=3).backward(cross_entropy(model), pairs())
    tree = parsed(result._repr_html_())
    assert f"loss {float(result):.6g}" in "".join(tree.itertext())
    named = [title.text for title in tree.iter("title")]
    assert named == ["samples 0:3", "samples 3:6", "samples 6:8"]


def test_parts_of_a_bar_are_as_wide_as_their_bytes() -> None:
    tree = parsed(f"<div>{memory_bar(2**30, 2**30, 2 * 2**30)}</div>")
    widths = [float(box.attrib["width"]) for box in tree.iter("rect")]
    assert widths == [119.0, 119.0, 239.0]
    assert parsed(f"<div>{memory_bar(0, 0, 0)}</div>").find(".//rect") is None


def test_the_html_stays_small() -> None:
    assert len(runtime_html("t", {}, [(8, 1)] * 500, "")) < 80_000
    assert len(result_html({}, [(at, at + 1) for at in range(100_000)])) < 500
    assert not re.search(r"<svg", result_html({}, ()))
