"""Where pieces go, and how.

That the next one is copied while this one computes is in `tests/simcuda/test_prefetch.py`.
"""

from typing import Any

import pytest
import torch

from elastic_mbs import MemoryOptions
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.schedule import Schedule
from elastic_mbs.batch.transfer import Loader, choose_device, to_device
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import UsageError

CPU, META = torch.device("cpu"), torch.device("meta")  # meta stands for another device


def test_tensors_that_are_on_the_device_already_are_not_copied() -> None:
    piece = [torch.zeros(2), torch.zeros(2, device=META)]
    loaded = to_device(piece, META)
    assert loaded[1] is piece[1]
    assert loaded[0].device == META
    assert to_device(piece, None) is piece, "without a device it stays where it is"


@pytest.mark.parametrize(
    ("wanted", "model", "expected"),
    [
        ("auto", [META], META),
        ("auto", [CPU], None),
        ("auto", [META, CPU], None),
        ("auto", [torch.device("cuda", 0), torch.device("cuda", 1)], None),
        ("auto", [torch.device("cuda", 1)], torch.device("cuda", 1)),
        (None, [META], None),
        ("cpu", [META], CPU),
        (META, [CPU], META),
        ("cuda:3", [CPU], torch.device("cuda", 3)),
    ],
)
def test_the_device_is_the_models_one_or_the_users_choice(
    wanted: Any, model: list[torch.device], expected: torch.device | None
) -> None:
    assert choose_device(wanted, model) == expected


@pytest.mark.parametrize("wanted", ["gpu", "cuda:x", "Auto", "", 1.5, ["cpu"]])
def test_what_is_no_device_is_refused_by_value(wanted: Any) -> None:
    with pytest.raises(UsageError, match="is not a device: use 'auto'") as caught:
        choose_device(wanted, [CPU])
    assert f"device={wanted!r}" in str(caught.value)


@pytest.mark.parametrize("prefetch", [True, "pin", False])
@pytest.mark.parametrize("device", [None, CPU])
def test_on_a_cpu_pieces_are_views_whatever_is_asked_for(
    device: torch.device | None, prefetch: bool | str
) -> None:
    batch = torch.arange(8.0)
    schedule, loader = Schedule(Counts.samples(8)), Loader(BatchView(batch), device, prefetch)
    while (piece := schedule.next(3)) is not None:
        data = loader.load(piece, schedule, cloned=False)
        assert data.data_ptr() == batch[piece.start :].data_ptr()
        assert data.tolist() == list(range(piece.start, piece.stop))


def test_what_is_no_way_to_prefetch_is_refused_by_value() -> None:
    with pytest.raises(
        UsageError, match="prefetch='pinned' is not known: use True or False or 'pin'"
    ):
        MemoryOptions(prefetch="pinned")  # type: ignore[arg-type]
