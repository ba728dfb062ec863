"""The demo as a job of several ranks: it survives, and trains the model of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_mbs.cli import command
from elastic_mbs.cli.demo import compare, ranks
from elastic_mbs.cli.demo.compare import Options
from elastic_mbs.cli.demo.console import page, table, verdict
from elastic_mbs.cli.demo.gpt import GPTConfig
from stress.ranks.job import run_ranks, values

SMALL = GPTConfig(context=64, width=16, heads=2, layers=2)
QUICK = ["demo", "--steps", "8", "--batch", "16", "--device", "cpu", "--no-page"]


def demo(rank: int, world: int, log: str, kind: ranks.Kind) -> Any:
    compare.CPU_MODEL = SMALL
    options = Options(
        steps=8,
        seed=0,
        budget=None,
        batch=16,
        text=None,
        device=torch.device("cpu"),
        dtype=torch.float64,
        log=Path(log),
    )
    outcome = ranks.run_job(ranks.set_up(options, world), rank, world, kind)
    if outcome is None:
        return None
    rows = ranks.summary(outcome)
    shown = page(outcome, rows, Path(log))
    return outcome.equal, [each.ooms for each in outcome.ranks], table(outcome), rows, shown


@pytest.mark.parametrize("kind", ranks.KINDS)
def test_one_rank_runs_out_and_the_loss_is_that_of_an_undisturbed_run(
    kind: ranks.Kind, tmp_path: Path
) -> None:
    found, nothing = values(run_ranks(demo, str(tmp_path / "run.jsonl"), kind))
    assert nothing is None  # rank 0 tells of the job
    equal, (undisturbed, disturbed), losses, rows, shown = found
    assert equal
    assert undisturbed == 0 < disturbed
    assert len(losses.splitlines()) == 9
    assert rows["rank 1"].startswith(f"{disturbed} out-of-memory errors survived")
    for words in ("Memory of rank 1", "a co-tenant arrives", "rank 1: out of memory in"):
        assert words in shown
    assert {path.name for path in tmp_path.iterdir()} == {"run.rank0.jsonl", "run.rank1.jsonl"}


def test_a_run_in_which_no_rank_ran_out_is_no_success() -> None:
    figures = ranks.Figures(ooms=0, replayed=0, sizes=[8], seconds=1.0, moves=[])
    outcome = ranks.JobOutcome(
        notes=compare.Notes(4, 0),
        reference=[],
        weight=0.0,
        seconds=1.0,
        reference_seconds=1.0,
        rounding=compare.Rounding(1e-12, 1e-9),
        ranks=(figures, figures),
    )
    assert verdict(outcome).startswith("NOTHING SHOWN")


@pytest.mark.parametrize("world", [None, "1", "12"])
def test_a_job_of_the_wrong_size_is_told_how_to_start(
    world: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if world is not None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", world)
    assert command.main([*QUICK, "--distributed", "fsdp2"]) == 2
    assert f"{ranks.COMMAND} fsdp2" in capsys.readouterr().err
