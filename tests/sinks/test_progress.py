"""`mbs.progress()` is a bar of tqdm that shows micro-batch, errors and headroom."""

import io
import sys

import pytest
from tqdm.std import tqdm

from elastic_mbs import MemoryBudget, UsageError
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import cross_entropy, elastic, mlp, pairs

pytestmark = pytest.mark.no_oom_injection


def test_the_bar_shows_what_the_runtime_knows_when_it_is_drawn() -> None:
    model, shown = mlp(), io.StringIO()
    with MemoryBudget("8MiB", track=[model]) as budget:
        mbs = elastic(model, micro_batch_size=8, sensor=budget, monitor_interval=0)
        with mbs.progress([pairs()] * 3, file=shown, desc="steps", mininterval=0) as bar:
            assert isinstance(bar, tqdm)
            bar.set_postfix(epoch=2)
            seen = list[str]()
            for batch in bar:
                with InjectOOM(at=[1] if len(seen) == 1 else []):
                    mbs.backward(cross_entropy(model), batch)
                mbs.headroom  # noqa: B018  # a new reading
                seen.append(str(bar))
    assert [line[:6] for line in seen] == ["steps:"] * 3
    assert [line[line.index("epoch") :] for line in seen] == [
        "epoch=2, micro-batch 8, 0 OOMs, 8.0 MiB free]",
        "epoch=2, micro-batch 4, 1 OOM, 8.0 MiB free]",
        "epoch=2, micro-batch 4, 1 OOM, 8.0 MiB free]",
    ]
    assert "3/3" in shown.getvalue()


def test_a_bar_without_an_iterable_counts_by_hand() -> None:
    mbs = elastic(mlp())
    with mbs.progress(total=5, file=io.StringIO()) as bar:
        bar.update(2)
        assert (bar.n, bar.total) == (2, 5)
        assert str(bar).endswith(", 0 OOMs]")


def test_without_tqdm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(UsageError, match=r"pip install 'elastic-mbs\[progress\]'"):
        elastic(mlp()).progress([])
