"""The benchmark of pieces by length compares loops that train the same, and its figures are there.

Speed is not asserted here.
"""

import json
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks import bench_lengths
from benchmarks.bench_lengths import PADDED, Loops, make_batches, padding
from elastic_mbs.cli.demo.gpt import GPT, GPTConfig
from tests.helpers.steps import grads, off_by


def test_all_loops_give_the_same_gradient() -> None:
    (batch,) = make_batches(1, 12, longest=96, seed=0)
    assert 0 < padding([batch]) < 1
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=96, width=8, heads=2, layers=1)).double()
    with ExitStack() as stack:
        loops = Loops(model, 3, 96, torch.device("cpu"), stack)
        loops.steps[PADDED](batch)
        by_hand = grads(model)
        for step in loops.steps.values():
            model.zero_grad()
            assert step(batch) >= 3
            assert off_by(model, by_hand) <= 1e-12


def test_a_budget_of_tokens_runs_no_more_than_the_loop_that_is_sorted_by_hand() -> None:
    batches = make_batches(6, 64, longest=320, seed=0)
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=320, width=8, heads=2, layers=1))
    ran = {}
    with ExitStack() as stack:
        loops = Loops(model, 8, 320, torch.device("cpu"), stack)
        for name in ("max_tokens", "sorted, trimmed by hand"):
            loops.steps[name](batches[0])  # with the comparison after a first split
            loops.positions = 0
            pieces = sum(map(loops.steps[name], batches))
            ran[name] = loops.positions, pieces
    (positions, pieces), (by_hand, pieces_by_hand) = ran.values()
    each = 8 * 320 // 16  # positions that a piece more may cost, as the product assumes
    assert positions + each * pieces <= by_hand + each * pieces_by_hand


def test_the_figures_are_written(tmp_path: Path) -> None:
    out = tmp_path / "sub" / "lengths.json"
    small = [
        "--samples",
        "6",
        "--longest",
        "48",
        "--size",
        "2",
        "--width",
        "8",
        "--layers",
        "1",
        "--batches",
        "1",
        "--rounds",
        "2",
    ]
    assert bench_lengths.main([*small, "--json", str(out)]) in {0, 1}
    rows = json.loads(out.read_text())["loops"]
    assert {row["loop"] for row in rows} >= {PADDED, "elastic", "by_length"}
    assert all(row["positions"] >= row["pieces"] for row in rows)
    assert all(
        row["speed"]["low"] <= row["speed"]["median"] <= row["speed"]["high"] for row in rows
    )
