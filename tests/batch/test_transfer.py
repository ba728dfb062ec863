"""A piece goes to the model's device, in containers of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_mbs.batch.view import choose_device, to_device
from elastic_mbs.errors import UsageError

CPU, META = torch.device("cpu"), torch.device("meta")  # meta stands for another device


def test_pieces_go_to_the_device_in_their_own_containers() -> None:
    x = torch.zeros(2, 3)
    piece = {"x": x, "y": [torch.zeros(2)], "ids": ["a", "b"]}
    loaded = to_device(piece, META)
    assert type(loaded) is dict
    assert (loaded["x"].device, loaded["y"][0].device) == (META, META)
    assert loaded["x"].shape == (2, 3)
    assert loaded["ids"] == ["a", "b"]
    assert piece["x"] is x
    assert x.device == CPU


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
def test_the_device_is_the_models_one_or_the_users_choice(wanted: Any, model: list[torch.device], expected: torch.device | None) -> None:
    assert choose_device(wanted, model) == expected


@pytest.mark.parametrize("wanted", ["gpu", "cuda:x", "Auto", "", 1.5, ["cpu"]])
def test_what_is_no_device_is_refused_by_value(wanted: Any) -> None:
    with pytest.raises(UsageError, match="is not a device: use 'auto'") as caught:
        choose_device(wanted, [CPU])
    assert f"device={wanted!r}" in str(caught.value)
