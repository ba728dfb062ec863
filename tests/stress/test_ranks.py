"""`stress ranks`: it passes right outcomes, names wrong ones and hangs, and repeats them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_mbs.cli.command import main
from elastic_mbs.distributed.buckets import Bucket
from elastic_mbs.optimizer.snapshot import OptimizerSnapshot
from stress.ranks import command
from stress.ranks.job import HUNG, OK, Outcome, run_ranks, values
from stress.ranks.round import run_round
from stress.ranks.training import Counts

pytestmark = pytest.mark.no_oom_injection


def run(*arguments: str) -> int:
    return main(["stress", "ranks", *arguments])


def sleep(rank: int, world: int) -> None:
    time.sleep(3600)


def test_a_rank_that_does_not_end_is_a_hang_and_is_killed() -> None:
    assert run_ranks(sleep, world=1, wall=0.5) == [Outcome(HUNG, None)]


def test_a_short_run_passes_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ranks.json"
    assert run("--kind", "fsdp2", "--steps", "3", "--json", str(out)) == 0
    found = json.loads(out.read_text())
    assert found["schema"] == "elastic-mbs/ranks/1"
    assert (found["kind"], found["ranks"], found["steps"]) == ("fsdp2", 2, 3)
    assert (found["exit_code"], found["hangs"], found["wrong"], found["bad"]) == (0, 0, {}, {})
    assert 0 < found["worst"] < found["tolerance"]
    assert found["checked"] > 0
    told = capsys.readouterr().out
    assert "3 steps," in told
    assert told.splitlines()[-1] == "passed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--kind hsdp --ranks 3", "--ranks 3 with --kind hsdp: it needs 4 ranks or more"),
        ("--kind fsdp2 --overlap on", "--overlap on is for --kind ddp"),
        ("--ranks 1", "--ranks: 1 is below 2"),
        ("--steps 0", "--steps: 0 is below 1"),
        ("--deadline 0", "--deadline: '0' is no length of time"),
    ],
)
def test_bad_input_is_refused_before_any_rank_starts(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_ranks", None)
    assert run(*arguments.split()) == 2
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------------- outcomes that are not right


def _off(self: Bucket, factor: float = 1.0, take: Any = Bucket.take) -> None:
    take(self, factor * 1.001)


PLANTED: dict[str, tuple[type, str, Any, str]] = {
    "sums are off": (Bucket, "take", _off, "a gradient or loss"),
    "half an optimizer's step stays": (
        OptimizerSnapshot,
        "restore",
        lambda self: None,
        "not put back",
    ),
}


def broken_round(rank: int, world: int, bug: str) -> dict[str, Any]:
    owner, name, planted, _ = PLANTED[bug]
    setattr(owner, name, planted)  # in this rank's process alone
    return run_round(rank, world, "ddp", 4, 12, None)


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_counted(bug: str) -> None:
    counts = Counts()
    for found in values(run_ranks(broken_round, bug)):
        counts.merge(found)
    assert counts.wrong[PLANTED[bug][-1]] > 0
    assert counts.steps == 12  # the job goes on


def outcomes(*statuses: str, **figures: Any) -> Callable[..., list[Outcome]]:
    counts = Counts(**figures).as_json()
    return lambda *args, **options: [
        Outcome(each, counts if each == OK else "PeerError: why\nwhere") for each in statuses
    ]


@pytest.mark.parametrize(
    ("job", "code", "said"),
    [
        (outcomes(OK, HUNG), 5, ["rank 1: hang", "1 hangs"]),
        (outcomes("error", OK), 4, ["rank 0: error", "PeerError: why"]),
        (outcomes(OK, OK, wrong={"ranks differ": 2}), 3, ["WRONG: ranks differ 4"]),
        (outcomes("died", HUNG, OK), 5, ["rank 0: died", "rank 1: hang"]),
    ],
)
def test_a_bad_round_is_told_with_the_command_that_repeats_it(
    job: Any,
    code: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seeds: list[int] = []

    def noting(fn: Any, kind: str, seed: int, *args: Any, **options: Any) -> list[Outcome]:
        seeds.append(seed)
        found: list[Outcome] = job()
        return found

    monkeypatch.setattr(command, "run_ranks", noting)
    assert run("--steps", "10") == code
    told = capsys.readouterr().out
    for words in said:
        assert words in told
    repeat = (
        f"repeat: python -m stress ranks --kind ddp --ranks 2 --overlap drawn --only {seeds[0]}"
    )
    assert repeat in told
    assert told.splitlines()[-1] == "failed"
    assert run(*repeat.partition(" ranks ")[2].split()) == code
    assert seeds[-1] == seeds[0]
