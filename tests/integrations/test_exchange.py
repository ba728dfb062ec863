"""The words that the ranks of a trainer exchange, where one of them does not come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_mbs.errors import PeerError
from elastic_mbs.integrations.exchange import Exchange


def test_a_rank_that_found_nobody_leaves_the_next_block_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange = Exchange(SimpleNamespace(args=SimpleNamespace(world_size=2)), gathers=lambda: True)
    words = list[str]()

    def absent(self: Any) -> None:
        raise PeerError("not all ranks have come")

    monkeypatch.setattr(Exchange, "_connected", absent)
    with pytest.raises(PeerError), exchange:
        pass
    monkeypatch.setattr(Exchange, "_connected", lambda self: None)
    monkeypatch.setattr(exchange, "_control", SimpleNamespace(leave=words.append))
    with exchange, exchange:  # an evaluation inside of training
        assert not words
    assert words == ["its trainer has ended"]
