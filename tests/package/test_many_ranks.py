"""The predicted cost of waiting for the slowest of many ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import many_ranks


def test_the_loss_of_a_step_is_the_mean_of_the_slowest_rank() -> None:
    costs, ranks, visited, draw = [0.1, 0.5, 0.5, 2.0], 7, 0.2, random.Random(0)
    slowest = [
        max(draw.choice(costs) if draw.random() < visited else 0.0 for _ in range(ranks))
        for _ in range(100_000)
    ]
    wanted = sum(slowest) / len(slowest)
    assert many_ranks.loss_of_a_step(costs, ranks, visited) == pytest.approx(wanted, rel=0.02)


def test_one_rank_loses_the_mean_of_its_visits() -> None:
    costs = many_ranks.costs()
    assert len(costs) > 200
    wanted = 0.01 * sum(costs) / len(costs)
    assert many_ranks.loss_of_a_step(costs, 1, 0.01) == pytest.approx(wanted)


def test_the_table_has_a_row_for_each_size(tmp_path: Path) -> None:
    many_ranks.main(["--json", str(tmp_path / "out.json"), "--hop", "0.5"])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["ranks"] for row in rows] == list(many_ranks.RANKS)
    assert rows[0]["meeting_ms"] == 3.5
