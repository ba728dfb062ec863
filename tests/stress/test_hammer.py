"""The hammer: it strikes where told, passes right outcomes, names wrong ones, and repeats them."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from elastic_mbs import ElasticMBS, OptimizerStepError, StepResult
from elastic_mbs.batch.schedule import Range as Piece
from elastic_mbs.batch.schedule import Schedule
from elastic_mbs.cli.command import main
from elastic_mbs.engine import gradients
from elastic_mbs.engine.gradients import CallGradients, Left
from elastic_mbs.errors import UsageError
from elastic_mbs.optimizer.snapshot import OptimizerSnapshot
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.rollback.random_streams import RandomStreams
from stress.endurance.hammer import BLOCKS, NOTHING_MORE, Blow, Blows, hammer
from stress.endurance.training import Counts, Range, Training
from stress.limits import BudgetLimit, ChildError, available
from stress.reference.by_hand import accumulate, view_of
from stress.reference.state import WrongOutcomeError
from stress.streams import Streams
from tests.helpers import small_models

pytestmark = pytest.mark.no_oom_injection

MODELS = Path(small_models.__file__)
BRANCHED, PLAIN, FLAT = (f"{MODELS}:{name}" for name in ("branched", "plain", "flat"))


def run(*arguments: str) -> int:
    return main(["stress", "hammer", *arguments])


@contextmanager
def same_process() -> Iterator[None]:
    """Keep threads and random streams as they are."""
    threads = torch.get_num_threads()
    streams = Streams.now()
    yield
    torch.set_num_threads(threads)
    streams.restore()


def struck(model: str, *, failures: int, seed: int = 0, steps: int = 60) -> Counts:
    """Run one round in this process, on counted tensors."""
    found: list[dict[str, Any]] = []
    with same_process():
        hammer(found.append, kind="budget", model=model, seed=seed, failures=failures, steps=steps)
    counts = Counts()
    counts.merge(found[-1]["counts"])
    return counts


def test_memory_moves_before_its_operation_and_is_free_after_the_block() -> None:
    limits: list[int | None] = []
    with BudgetLimit() as world:
        kept = torch.ones(1024)
        blows = [Blow(0, 0.5), Blow(2, NOTHING_MORE), Blow(3, BLOCKS), Blow(4, None)]
        with Blows(world, Range(100, 300, blocks=True), blows):
            for _ in range(4):
                limits.append(world.capacity)
                if len(limits) == 2:
                    with pytest.raises(torch.OutOfMemoryError):
                        kept + 1
                elif len(limits) == 3:
                    with pytest.raises(torch.OutOfMemoryError, match="in blocks of"):
                        kept + 1
                else:
                    torch.ones(2)
        assert limits == [4096 + 200, 4096 + 200, 4096, None]
        assert world.capacity is None
        assert (kept + 1).numel() == 1024


@pytest.mark.parametrize("model", [BRANCHED, PLAIN], ids=["branched", "plain"])
def test_every_step_is_exact_although_memory_runs_out_anywhere(model: str) -> None:
    counts = struck(model, failures=30)
    assert counts.failures >= 30
    assert counts.worst <= 1e-10
    assert counts.checked == counts.optimizer > 0
    assert counts.phases["forward"] > 0
    assert counts.ooms == counts.phases.total()


def test_a_model_whose_memory_does_not_depend_on_the_batch_shows_nothing() -> None:
    with pytest.raises(UsageError, match="no more memory than its smallest piece"):
        struck(FLAT, failures=1)


def _forgets_commits(self: CallGradients, attempt: object, **how: bool) -> Left:
    return Left()


def _loses_a_sample(self: Schedule, piece: Piece, push: Any = Schedule.push) -> None:
    push(self, Piece(piece.start, max(piece.start + 1, piece.stop - 1)))


def _leaves_values(self: OptimizerSnapshot) -> None:
    self.reach.restore()


def _by_size(self: Schedule, size: int, hand_out: Any = Schedule.next) -> Piece | None:
    piece: Piece | None = hand_out(self, size)
    if piece is not None:
        piece.weights = dict.fromkeys(piece.weights or (), len(piece) / self._counts.n)
    return piece


PLANTED: dict[str, tuple[Any, str, Any, str, str]] = {
    "buffers are not put back": (
        BufferCopies,
        "restore",
        lambda self, *, to_call_start: None,
        BRANCHED,
        "buffers|gradient",
    ),
    "streams are not put back": (
        RandomStreams,
        "restore",
        lambda self, state: None,
        BRANCHED,
        "random streams|gradient",
    ),
    "the failed graph stays": (
        gradients,
        "drop_unrun",
        lambda: None,
        BRANCHED,
        "still held after the failed backward",
    ),
    "commits are counted twice": (
        CallGradients,
        "left_by",
        _forgets_commits,
        PLAIN,
        "gradient off",
    ),
    "a sample is lost": (
        Schedule,
        "push",
        _loses_a_sample,
        PLAIN,
        "do not cover the .* samples of the batch once",
    ),
    "weighed by size": (Schedule, "next", _by_size, PLAIN, "gradient off"),
    "half an optimizer step stays": (
        OptimizerSnapshot,
        "restore",
        _leaves_values,
        PLAIN,
        "parameters differ|optimizer's state",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_told(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, model, told = PLANTED[bug]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(WrongOutcomeError, match=told):
        struck(model, failures=150, steps=100)


class Result(float):
    """The result of a call: a loss over one piece."""

    partition = ((0, small_models.SAMPLES),)


@pytest.fixture
def at_rest() -> Iterator[Training]:
    """Yield a round of the branched model before its first step, with the twin like the model."""
    with same_process(), BudgetLimit() as world:
        found = Training(world, BRANCHED, 0)
        found.prepare()
        found.follow()
        yield found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda at: torch.stack([leaf.sum() for leaf in at.real.leaves()]).sum().backward(),
            "a gradient that was empty is not empty",
        ),
        (lambda at: at.real.model.get_buffer("mean").add_(1.0), "buffers are not as before"),
        (lambda at: torch.rand(1), "random streams are not as before"),
    ],
)
def test_a_refused_call_that_has_left_anything_changed_is_told(
    at_rest: Training, change: Callable[[Training], object], told: str
) -> None:
    start = at_rest.state()
    at_rest.check_refused(start, "step 0: ")
    change(at_rest)
    with pytest.raises(WrongOutcomeError, match=told):
        at_rest.check_refused(start, "step 0: ")


def test_a_wrong_loss_is_told(at_rest: Training) -> None:
    start = at_rest.state()
    real = at_rest.real
    loss = accumulate(real, view_of(real, real.batch(0)), Result.partition) + 1
    with pytest.raises(WrongOutcomeError, match="the loss is"):
        at_rest.check(0, cast("StepResult", Result(loss)), start, "step 0: ")


def test_a_refused_optimizer_step_that_has_changed_its_state_is_told(at_rest: Training) -> None:
    class Half:
        def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            optimizer.param_groups[0]["lr"] = 5.0
            raise OptimizerStepError("half made")

    with pytest.raises(
        WrongOutcomeError, match="optimizer's state is not as before, after OptimizerStepError"
    ):
        at_rest.optimize(cast("ElasticMBS", Half()), nullcontext, "step 0: ")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=pytest.mark.skipif(available(kind) is not None, reason=str(available(kind)))
        )
        for kind in ("shim", "rlimit")
    ],
)
def test_real_allocators_fail_in_a_process_of_its_own(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hammer.json"
    assert run("--failures", "4", "--kind", kind, "--model", PLAIN, "--json", str(file)) == 0
    told = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["failures"] >= 4
    assert written["checked"] + sum(written["refused"].values()) >= written["steps"] > 0
    assert written["bad"] == {}
    assert list(written["models"]) == ["small_models.py:plain"]
    assert str(tmp_path) not in file.read_text()
    assert "not allowed: none" in told
    assert told.endswith("passed\n")


class Rounds(list[dict[str, Any]]):
    """Stand-in for `run_child`: each round makes ten failures.

    Then the second round, or each, ends in an error.
    """

    def __init__(self, error: Exception, *, always: bool = False) -> None:
        self.error = error
        self.always = always

    def __call__(
        self, kind: str, job: Any, arguments: dict[str, Any], *, deadline: float
    ) -> Iterator[dict[str, Any]]:
        self.append(arguments)
        if self.always:
            raise self.error
        yield {"counts": Counts(steps=3, failures=10, ooms=10, checked=3).as_json()}
        if len(self) == 2:
            raise self.error


ENDINGS = [
    (ChildError("it had not ended", "hang", "File x, in stuck"), 5, "hang: it had not ended"),
    (
        ChildError("the job was ended by SIGSEGV", "crash by SIGSEGV", "a stack"),
        4,
        "crash by SIGSEGV: ",
    ),
    (ChildError("ended by KeyError", "KeyError", "trace"), 4, "KeyError: "),
    (
        ChildError("step 3: gradient off", "WrongOutcomeError", "trace"),
        3,
        "WrongOutcomeError: step 3",
    ),
]


@pytest.mark.parametrize(
    ("error", "code", "told"), ENDINGS, ids=["hang", "crash", "error", "wrong"]
)
def test_a_bad_round_names_its_command_and_the_run_goes_on(
    error: Exception,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds = Rounds(error)
    monkeypatch.setattr("stress.endurance.hammer.run_child", rounds)
    assert (
        run(
            "--failures",
            "40",
            "--kind",
            "budget",
            "--model",
            "mlp",
            "--model",
            "gpt",
            "--seed",
            "7",
        )
        == code
    )
    out = capsys.readouterr().out
    assert told in out
    assert "40 failures in 12 steps" in out
    assert [each["model"] for each in rounds] == ["mlp", "gpt", "mlp", "gpt"]
    assert len({each["seed"] for each in rounds}) == 4
    assert out.endswith("failed\n")
    repeat = shlex.split(re.findall(r"repeat: (.*)", out)[0])
    assert repeat[:4] == ["python", "-m", "stress", "hammer"]
    assert run(*repeat[4:]) == 0
    assert [rounds[4][name] for name in ("kind", "model", "seed")] == [
        rounds[1][name] for name in ("kind", "model", "seed")
    ]
    assert len(rounds) == 5


def test_rounds_that_all_end_badly_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stress.endurance.hammer.run_child", Rounds(ENDINGS[1][0], always=True))
    assert run("--failures", "40", "--kind", "budget", "--model", "mlp") == 4
    assert "not allowed: crash by SIGSEGV 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "told"), [ENDINGS[0], ENDINGS[-1]], ids=["hang", "wrong"]
)
def test_how_the_process_of_a_soak_ends_is_told_by_the_exit_code(
    error: Exception,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("stress.endurance.soak.run_child", Rounds(error, always=True))
    assert main(["stress", "soak", "--minutes", "0.1"]) == code
    out = capsys.readouterr().out
    assert told in out
    assert out.endswith("failed\n")


@pytest.mark.parametrize("command", [[], ["hammer"], ["soak"]], ids=" ".join)
def test_a_kind_that_cannot_be_had_here_is_bad_input(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked in ("stress.limits.available", "stress.scenarios.command.available"):
        monkeypatch.setattr(asked, lambda kind: "there is no compiler")
    assert main(["stress", *command, "--kind", "shim"]) == 2
    told = capsys.readouterr().err
    assert "--kind shim" in told
    assert "there is no compiler" in told
