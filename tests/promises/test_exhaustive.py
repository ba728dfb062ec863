"""All cases of `python -m stress exhaustive`, each struck at a bounded number of places."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_mbs.batch.schedule import Schedule
from elastic_mbs.cli.command import main
from elastic_mbs.engine.gradients import CallGradients, Left
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.rollback.gradients import Ledger
from elastic_mbs.rollback.isolation import Isolation
from elastic_mbs.rollback.random_streams import RandomStreams
from stress.exhaustive import PATTERNS, Lines, Operations, Sweep, builtin, run
from stress.exhaustive.calls import CALLS, Backward
from stress.exhaustive.strike import EXCEPTIONS
from stress.models.steps import STEPS
from tests.helpers.strikes import drawn

GUARDED = ["--dimension", "operations", "--call", "backward"]
POINTS = 6
"""Operations to strike in each case, roughly, of every `STRIDE`-th; lines are half as many."""
FEWER = dict.fromkeys(
    ("tiled", "every_rung", "offloaded", "logits_in_chunks", "checkpointed", "some_checkpointed"), 2
)
STRIDE = 5


# a warning of checkpointing in an evaluation
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", STEPS)
def test_a_failure_anywhere_ends_exact_or_in_an_error_that_changes_nothing(
    name: str,
) -> None:
    most = FEWER.get(name, POINTS)
    sweep = Sweep(
        builtin(name),
        stride=STRIDE,
        first=drawn(STRIDE),
        most=most,
        calls=("backward", "loop", "eval", "optimizer_step"),
    )
    ways = sweep.ways()
    outcomes: Counter[str] = Counter()
    for outcome in (
        *ways.values(),
        *sweep.operations(ways),
        *replace(sweep, most=1).operations(ways, ("persistent",)),  # ends in an error
        *replace(sweep, most=most // 2).lines(ways),
    ):
        assert not outcome.found, outcome
        outcomes[outcome.error or "exact"] += 1
    assert outcomes["exact"] >= 4, outcomes
    assert outcomes.total() > outcomes["exact"], outcomes


def test_the_command_prints_a_table_and_refuses_unknown_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert (
        main(["stress", "exhaustive", "mlp", *GUARDED, "--stride", "40", "--json", str(figures)])
        == 0
    )
    assert "0 wrong, 0 raw, 0 damaged" in capsys.readouterr().out
    written = json.loads(figures.read_text())
    assert written["points"] == written["cases"][0]["points"] > 0
    assert main(["stress", "exhaustive", "no_such_case"]) == 2
    assert "no_such_case" in capsys.readouterr().err


def test_runs_that_begin_at_different_points_share_the_points() -> None:
    def struck(sweep: Sweep) -> list[list[str]]:
        return [outcome.hits for outcome in sweep.operations(ways, ("once",))]

    whole = Sweep(builtin("mlp"), stride=5, calls=("backward",))
    ways = whole.ways()
    parts = [struck(replace(whole, stride=10, first=first)) for first in (1, 6)]
    assert min(map(len, parts)) > 5
    assert sorted(parts[0] + parts[1]) == sorted(struck(whole))


@pytest.mark.parametrize(
    ("owner", "method", "broken", "name"),
    [
        (BufferCopies, "restore", lambda self, *, to_call_start: None, "conv_batchnorm"),
        (BufferCopies, "restore", lambda self, *, to_call_start: None, "spectral_norm"),
        (RandomStreams, "restore", lambda self, state: None, "gpt_dropout"),
        (RandomStreams, "restore", lambda self, state: None, "host_masks"),
        (CallGradients, "left_by", lambda self, attempt, **how: Left(), "mlp"),
        (Ledger, "add_extra", lambda self, leaves: [], "guests"),
        (CallGradients, "restart", lambda self: None, "checkpoint_reentrant"),
        (CallGradients, "restart", lambda self: None, "hidden_backward"),
        (Isolation, "set_aside", lambda self, leaves: None, "gradients_at_start"),
    ],
)
def test_an_engine_that_is_broken_is_caught(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Callable[..., Any], name: str
) -> None:
    monkeypatch.setattr(owner, method, broken)
    sweep = Sweep(builtin(name), stride=2, calls=("backward",))
    assert any(outcome.found for outcome in sweep.operations(sweep.ways(), ("once",)))


# ---------------------------------------------------------------------- the user's own model

MODEL = """
import torch
from torch import nn
torch.set_num_threads(1)
calls = []

def plain():
    model = nn.Linear(4, 2)
    batch = torch.randn(6, 4), torch.randint(0, 2, (6,))
    return model, lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), [batch]

def mixing():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    batch = torch.randn(6, 4).double(), torch.randint(0, 2, (6,))
    return model, lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), [batch]

def chance():
    model = nn.Linear(4, 2)
    calls.append(1)
    return model, lambda b: model(b).mean() * len(calls), [torch.randn(6, 4)]

def frozen():
    model = nn.Linear(4, 2).requires_grad_(False)
    return model, lambda b: model(b).mean(), [torch.randn(6, 4)]

def single():
    model = nn.Linear(4, 2)
    return model, lambda b: model(b).mean(), [torch.randn(1, 4)]

def broken():
    model = nn.Linear(4, 2)
    return model, lambda b: model(b[0]).mean(), [torch.randn(6, 5)]
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODEL)
    return path


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("plain", "and with the whole batch, tolerance 1e-04"),
        ("mixing", "compared with the same pieces only"),
    ],
)
def test_the_users_own_model_is_struck_at_every_operation(
    model_file: Path, name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "stress",
                "exhaustive",
                "--model",
                f"{model_file}:{name}",
                *GUARDED,
                "--samples",
                "4",
                "--max-points",
                "60",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert told in out
    assert "0 wrong" in out
    assert " 0 exact" not in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "{file}:frozen"], "no parameter that requires a gradient"),
        (["--model", "{file}:broken"], "its step fails on its first batch: RuntimeError"),
        (["--model", "{file}:chance"], "two runs from the same seed differ"),
        (["--model", "{file}:nothing"], "no function 'nothing'"),
        (["--model", "/no/such/file.py:make"], "no file /no/such/file.py"),
        (["--model", "{file}:plain", "mlp"], "one or the other"),
        (["mlp", "--stride", "0"], "--stride: 0 is below 1"),
        (["--samples", "0"], "--samples: 0 is below 1"),
        (["mlp", "--samples", "3"], "--samples 3 is for --model"),
        (["mlp", "--seed", "3"], "--seed 3 is for --model"),
        (["--max-points", "0"], "--max-points: 0 is below 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    model_file: Path, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["stress", "exhaustive", *(each.format(file=model_file) for each in arguments)]) == 2
    )
    told = capsys.readouterr().err
    assert named in told


def test_a_wrong_outcome_and_an_unexpected_error_have_own_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unexpected(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("mine")

    with monkeypatch.context() as patch:
        patch.setattr(CallGradients, "left_by", lambda self, attempt, **how: Left())
        assert main(["stress", "exhaustive", "mlp", *GUARDED, "--stride", "40"]) == 3
    assert "wrong: gradient off by" in capsys.readouterr().out
    monkeypatch.setattr(Sweep, "operations", unexpected)
    assert main(["stress", "exhaustive", "mlp", "--dimension", "operations"]) == 4
    assert "UNEXPECTED in mlp: KeyError" in capsys.readouterr().out


class Unguarded(Backward):
    """A call with an unguarded allocation after it."""

    def perform(self) -> Any:
        result = super().perform()
        torch.zeros(1)
        return result


class Untidy(Backward):
    """A call that leaves a buffer changed where it fails."""

    def perform(self) -> Any:
        try:
            return super().perform()
        except BaseException:
            next(self.case.model.buffers()).add_(1)
            raise


class Partial(Backward):
    """A call that loses outputs where an attempt has failed."""

    def perform(self) -> Any:
        result = super().perform()
        if result.ooms:
            result._joined = result.outputs[1:]
        return result


@pytest.mark.parametrize(
    ("call", "kind"), [(Unguarded, "raw"), (Untidy, "damaged"), (Partial, "wrong")]
)
def test_operations_of_the_library_find_a_call_that_breaks_a_promise(
    monkeypatch: pytest.MonkeyPatch, call: type[Any], kind: str
) -> None:
    monkeypatch.setitem(CALLS, "backward", call)
    last = run(builtin("conv_batchnorm"), Operations(), warm=True).operations
    outcomes = [
        run(builtin("conv_batchnorm"), Operations(n, how), warm=True)
        for n in (20, 40, last)
        for how in ((), None)
    ]
    assert kind in {found for outcome in outcomes for found in outcome.found}


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_an_exception_in_recovery_finds_a_buffer_that_stays_changed(
    monkeypatch: pytest.MonkeyPatch, exception: type[BaseException]
) -> None:
    monkeypatch.setitem(CALLS, "backward", Untidy)
    seen = Lines(Operations(30))
    assert not run(builtin("conv_batchnorm"), seen, warm=True).found
    (file, line), _ = next(
        (place, n) for place, n in seen.seen.items() if place[0] == "engine/recovery/recover.py"
    )
    outcome = run(
        builtin("conv_batchnorm"), Lines(Operations(30), (file, line, 1), exception), warm=True
    )
    assert "buffers are not as before" in outcome.found["damaged"]
    assert outcome.error == exception.__name__ or exception is MemoryError


def test_faults_come_singly_in_recovery_in_a_row_and_for_good() -> None:
    counts = {
        pattern: [len(run(builtin("mlp"), Operations(20, distances), warm=True).hits)]
        for pattern, distances in PATTERNS.items()
    }
    assert counts["once"] == [1]
    assert counts["in a row"] == [3]
    assert counts["persistent"][0] > 3
    # A recovery that compares random streams has operations of its own. Others have none.
    for at in range(20, 60):
        first = Operations(at)
        run(builtin("mlp"), first, warm=True)
        if first.recovery:
            break
    assert first.recovery > 0
    assert [
        len(run(builtin("mlp"), Operations(at, after=n), warm=True).hits)
        for n in range(1, first.recovery + 1)
    ] == [2] * first.recovery


def test_a_process_without_numpy_compares_equal_random_streams() -> None:
    # The first backward imports numpy. Its stream was seeded only in cases that were built later,
    # so every fresh run was called wrong.
    command = [sys.executable, "-m", "stress", "exhaustive", "mlp", *GUARDED, "--max-points", "4"]
    done = subprocess.run(
        command,
        check=False,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_step_that_is_wrong_without_any_failure_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def by_size(self: Schedule, size: int, hand_out: Any = Schedule.next) -> Any:
        piece = hand_out(self, size)
        if piece is not None:
            piece.weights = dict.fromkeys(piece.weights, len(piece) / self._counts.n)
        return piece

    monkeypatch.setattr(Schedule, "next", by_size)
    assert main(["stress", "exhaustive", "gpt_tied", "--max-points", "4"]) == 3
    assert (
        "WRONG without a failure: gpt_tied, cold backward, faults [], replays []: wrong: gradient "
        "off by" in capsys.readouterr().out
    )
