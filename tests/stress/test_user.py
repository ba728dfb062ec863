"""What users bring to the stress tool: files with neighbours, loaders, losses that draw, batches of one; each is run, or refused in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_mbs.batch.schedule import Schedule
from elastic_mbs.cli.command import main
from elastic_mbs.errors import UsageError
from stress.limits import BudgetLimit, available
from stress.models.factory import find, make
from stress.models.subject import naming
from stress.record import Needs, Run, read_json
from stress.scenarios import checks
from stress.scenarios import command as scenarios
from stress.scenarios.facts import separable
from stress.scenarios.needs import least, measure
from stress.scenarios.order import DEADLINE, Order
from stress.scenarios.perform import failed, judge, perform
from stress.scenarios.reference import Probe, relative
from tests.stress.test_scenarios import SAME, record, step

Write = Callable[..., str]

HEAD = "import random\nimport sys\nimport torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
NET = "nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 4)).double()"
DATA = "[(torch.randn(16, 8).double(), torch.randint(0, 4, (16,))) for _ in range(3)]"


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Writes a file of the user's and gives its factory's name; what it has changed of the interpreter's path is put back."""
    path, known = list(sys.path), set(sys.modules)

    def put(body: str, name: str = "mine.py") -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(HEAD + body)
        return f"{file}:make"

    yield put
    sys.path[:] = path
    for each in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[each], "__file__", "")):
            del sys.modules[each]


def returning(model: str = NET, loss: str = "lambda b: F.cross_entropy(m(b[0]), b[1])", batches: str = DATA, more: str = "") -> str:
    return f"def make():\n    m = {model}\n    return m, {loss}, {batches}{more}\n"


def run(*arguments: str, model: str) -> int:
    return main(["stress", "--kind", "budget", "--steps", "8", *arguments, "--model", model])


# ---------------------------------------------------------------------- files


def test_a_file_may_import_what_lies_beside_it(write: Write) -> None:
    write("WIDTH = 3\n", "neighbour_of_mine.py")
    model = write("from neighbour_of_mine import WIDTH\n" + returning("nn.Linear(8, WIDTH).double()"))
    assert make(model, 0).model.out_features == 3


def test_a_module_of_a_package_may_import_its_neighbours_relatively(write: Write) -> None:
    write("", "users_package/__init__.py")
    write("", "users_package/inner/__init__.py")
    write("WIDTH = 5\n", "users_package/size.py")
    model = write("from ..size import WIDTH\n" + returning("nn.Linear(8, WIDTH).double()"), "users_package/inner/models.py")
    assert make(model, 0).model.out_features == 5
    assert find(model)().model.out_features == 5


def test_two_files_of_one_name_in_two_folders_are_two(write: Write) -> None:
    first, second = (write(returning(f"nn.Linear(8, {width}).double()"), f"{folder}/model.py") for folder, width in (("a", 4), ("b", 6)))
    assert [make(name, 0).model.out_features for name in (first, second)] == [4, 6]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def make(:\n", "mine.py does not run: SyntaxError: invalid syntax (mine.py, line 6)"),
        ("import not_there_at_all\n", "mine.py does not run: ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("sys.exit('first\\nsecond')\n", "mine.py does not run: SystemExit: first; second"),
        ("make = 3\n", "has 'make', but that is of type int and no function; its functions: none"),
        ("def other():\n    pass\n", "has no function 'make'; its functions: other"),
        ("def make():\n    return 1, 2\n", "the factory returned a tuple of 2; it must return (model, loss_fn, batches)"),
        (returning(more=", 0.1"), "the fourth is float; it must be a function that makes the optimizer from the parameters, or a dict of options"),
        (returning(more=", torch.optim.SGD, 0.1"), "the fifth is float"),
        (returning(more=", lambda p: None"), "the optimizer's maker returned NoneType, which is no optimizer"),
        (returning(more=", lambda p: torch.optim.SGD(p, lr=-1)"), "its optimizer does not run: ValueError: Invalid learning rate"),
        (returning(more=", lambda p: torch.optim.LBFGS(p)"), "its optimizer does not run: TypeError: LBFGS.step()"),
        (returning(more=", {'cuont': 3}"), "its options do not suit ElasticMBS: TypeError"),
        (returning(more=", {'reduction': 'no'}"), "--model {model}: "),
        (returning(loss="lambda x, y: 0"), "the loss function takes (x, y), but is called with one argument: the batch, as in lambda batch: loss("),
        (returning(loss="lambda b, *, y: 0"), "the loss function takes (b, *, y), but is called with one argument"),
        (returning(loss="lambda b: None"), "--model {model}: loss_fn returned None; is a `return` missing?"),
        (returning(loss="lambda b: m(b[0]).mean(1)"), "--model {model}: the loss has shape (16,); it must be a scalar"),
        (returning(loss="lambda b: m(b[0]).mean() * float('nan')"), "the loss of its first batch is nan and its gradient's norm nan"),
        (returning(loss="lambda b: m(b[0][:, :3]).mean()"), "its step fails on its first batch: RuntimeError: mat1 and mat2"),
        (returning(loss="lambda b: sys.exit(3)"), "its step fails on its first batch: SystemExit: 3"),
        (returning(batches="torch.randn(16, 8)"), "batches are one Tensor: for a single batch give a list of it, [batch]"),
        (returning(batches="{'x': torch.randn(16, 8)}"), "batches are one dict: for a single batch give a list of it, [batch]"),
        (returning(batches="'text'"), "batches are one str"),
        (returning(batches="3"), "batches are int: give a list, a loader, a generator, or a function of the step's number"),
        (returning(batches="[]"), "there are no batches"),
        (returning(batches="lambda: 0"), "the function that gives batches takes (), but is called with one argument: the step's number, from 0"),
        (returning(batches="(torch.randn(16, 8).double(), torch.randint(0, 4, (16,)))"), "each of which is taken for a batch: is it one batch?"),
        (returning(batches="[None]"), "--model {model}: there is nothing to cut in the batch"),
        (returning(batches="[(torch.randn(16, 8), torch.ones(15))]"), "--model {model}: the parts of the batch disagree on its length: 15 and 16; "),
        (returning(batches="lambda step: [torch.zeros(4, 8)][step]"), "its step fails on its first batch"),
        (returning("nn.Linear(8, 4).requires_grad_(False)"), "the model has no parameter that requires a gradient"),
    ],
)
@pytest.mark.parametrize("command", ["", "exhaustive", "soak"])
def test_what_cannot_be_used_is_one_line_in_every_command(
    body: str, said: str, command: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(body)
    arguments = {"": ["--kind", "budget", "--scenario", "steady"], "exhaustive": ["--max-points", "4"], "soak": ["--minutes", "0.001"]}[command]
    assert main(["stress", *filter(None, [command]), *arguments, "--model", model]) == 2
    told = capsys.readouterr().err
    assert said.format(model=model) in told
    assert f"--model {model}: " in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    "batches",
    [
        "iter([torch.randn(8, 8).double() for _ in range(3)])",
        "torch.utils.data.DataLoader(torch.randn(40, 8).double(), batch_size=16, shuffle=True)",
        "drawn",
        "lambda step: torch.randn(8, 8).double() + random.random()",
    ],
    ids=["generator", "loader", "generator function", "function that draws"],
)
def test_batches_may_be_whatever_gives_them(batches: str, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    body = "def drawn():\n    while True:\n        yield torch.randn(8, 8).double()\n"
    model = write(body + returning(loss="lambda b: m(b).square().mean()", batches=batches))
    assert run("--scenario", "cliff", model=model) == 0
    assert "FAILED" not in capsys.readouterr().out


def test_a_batch_that_is_drawn_is_the_same_whenever_it_is_asked_for_and_leaves_the_streams_alone(write: Write) -> None:
    subject = make(write(returning(batches="lambda step: torch.randn(4, 8).double() + random.random()")), 3)
    before = torch.get_rng_state()
    first, second, again = subject.batch(0), subject.batch(1), subject.batch(0)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------- random numbers


@pytest.mark.parametrize(
    "loss",
    [
        "lambda b: F.cross_entropy(m(b[0] + 0.1 * torch.randn_like(b[0])), b[1])",
        "lambda b: F.cross_entropy(m(b[0]) * (1 + torch.rand(())), b[1])",
        "lambda b: F.cross_entropy(m(b[0]) * (1 + random.random()), b[1])",
        "lambda b: F.cross_entropy(m(F.dropout(b[0], 0.2, training=True)), b[1])",
        "lambda b: F.cross_entropy(m(b[0] if m.training else b[0] + torch.rand_like(b[0])), b[1])",
    ],
    ids=["noise like the batch", "one number a piece", "Python's stream", "dropout in evaluation", "in evaluation only"],
)
def test_a_loss_that_draws_random_numbers_is_compared_over_the_same_pieces(loss: str, write: Write, tmp_path: Path) -> None:
    """The reference evaluated whole batches: other numbers were drawn, in the evaluation and in every step after it."""
    out = tmp_path / "found.json"
    assert run("--scenario", "eval_between", "--steps", "18", "--json", str(out), model=write(returning(loss=loss))) == 0
    (found,) = read_json(out)
    assert (found.unshown, found.complaints) == ("", [])
    assert found.differences is not None
    assert found.differences.outputs is not None
    assert found.differences.outputs <= found.differences.tolerance_weight  # after 18 steps; other numbers would make tenths
    assert found.ooms > 0


OWN = (
    "def make():\n"
    f"    m, g = {NET}, torch.Generator().manual_seed(3)\n"
    "    def loss(b):\n"
    "        return F.cross_entropy(m(b[0] + torch.randn(b[0].shape, generator=g, dtype=torch.float64)), b[1])\n"
    f"    return m, loss, {DATA}"
)


def test_a_generator_of_its_own_has_to_be_named_and_then_is_put_back(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--scenario", "eval_between", model=write(OWN)) == 2
    told = capsys.readouterr().err
    assert 'it draws from a generator of its own, which has to be named (a dict of options as the factory\'s last entry, {"generators": ' in told
    assert told.count("\n") == 1
    assert run("--scenario", "eval_between", "--scenario", "kill", "--steps", "18", model=write(OWN + ", {'generators': [g]}\n", "named.py")) == 0
    assert "2 of 2 passed" in capsys.readouterr().out


def test_a_loss_that_depends_on_how_often_it_was_called_is_refused(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    body = f"def make():\n    m, calls = {NET}, []\n    return m, lambda b: m(b[0]).square().mean() * (calls.append(1) or len(calls)), {DATA}\n"
    assert run("--scenario", "steady", model=write(body)) == 2
    assert "or it depends on how often it was called" in capsys.readouterr().err


def test_where_random_numbers_are_drawn_whole_batches_are_no_measure(write: Write) -> None:
    drawing = write(returning(loss="lambda b: F.cross_entropy(m(b[0] + 0.1 * torch.randn_like(b[0])), b[1])"))
    plain = write(returning(), "plain.py")
    assert not separable(drawing, 0, "cpu")
    assert separable(plain, 0, "cpu")


def test_samples_that_depend_on_each_other_are_told_the_option_that_makes_them_exact(write: Write, tmp_path: Path) -> None:
    out, loss = tmp_path / "found.json", "lambda b: m(b[0]).mean().square()"
    arguments = ("--scenario", "eval_between", "--steps", "16", "--json", str(out))
    assert run(*arguments, model=write(returning(loss=loss))) == 1
    (found,) = read_json(out)
    assert any('{"replay": "isolate"}' in complaint for complaint in found.complaints)
    assert run(*arguments, model=write(returning(loss=loss, more=", {'replay': 'isolate'}"), "isolated.py")) == 0


@pytest.mark.parametrize("given", ["y.t()", "y.mean()", "None", "y[:0]"])
def test_an_evaluation_without_a_row_for_each_sample_shows_nothing_and_says_so(given: str, write: Write, tmp_path: Path) -> None:
    """It was compared as an empty list, which is the same in every run; or it was an error of the tool itself."""
    body = (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.inner = {NET}\n"
        "    def forward(self, x):\n"
        "        y = self.inner(x)\n"
        f"        return {given}\n"
        "def make():\n"
        "    m = Model()\n"
        f"    return m, lambda b: (m(b[0]), F.cross_entropy(m.inner(b[0]), b[1]))[1], {DATA.replace('16', '15')}\n"
    )
    out = tmp_path / "found.json"
    assert run("--scenario", "eval_between", "--steps", "12", "--json", str(out), model=write(body)) == 0
    (found,) = read_json(out)
    assert found.unshown == "the model's output has no row for each sample to compare, so nothing was shown of the evaluation"


@pytest.mark.parametrize(
    ("output", "rows"),
    [
        (torch.ones(4, 3), 4),
        ({"n": 2, "logits": torch.ones(4, 3)}, 4),
        ((None, torch.ones(4, dtype=torch.int64)), 4),
        (torch.ones(3, 4), 0),
        (None, 0),
    ],
)
def test_the_rows_of_the_samples_are_found_in_whatever_a_model_gives(output: Any, rows: int) -> None:
    class Model(torch.nn.Module):
        def forward(self) -> Any:
            return output

    model = Model()
    probe = Probe(model)
    with probe:
        figures, length = probe.run(lambda piece: model(), None, 4)
    assert length == 4
    assert (0 if figures is None else len(figures)) == rows


# ---------------------------------------------------------------------- records


def late(what: str) -> str:
    """A loss that fails when it has been called often: the model looked well before."""
    return (
        "calls = []\n"
        "def fail():\n"
        f"    {what}\n"
        f"def make():\n    m = {NET}\n"
        "    def loss(b):\n"
        "        calls.append(1)\n"
        "        return fail() if len(calls) > 30 else F.cross_entropy(m(b[0]), b[1])\n"
        f"    return m, loss, {DATA}\n"
    )


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first; second"),
        ("raise torch.OutOfMemoryError('CUDA out of memory.\\nTried')", "OutOfMemoryError: CUDA out of memory.; Tried"),
        ("sys.exit('gone')", "SystemExit: gone"),
    ],
)
def test_an_error_in_one_scenario_leaves_the_records_of_the_others(
    what: str, said: str, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "found.json", tmp_path / "found.html"
    names = ("steady", "too_big", "cliff")
    arguments = [word for name in names for word in ("--scenario", name)]
    assert run(*arguments, "--json", str(out), "--html", str(page), model=write(late(what))) == 1
    found = read_json(out)
    assert [each.scenario for each in found] == list(names)
    assert not any(each.passed for each in found)
    assert all(complaint.count("\n") == 0 for each in found for complaint in each.complaints)
    assert any(said in complaint for each in found for complaint in each.complaints)
    assert page.read_text().count("FAILED") >= 3
    assert "0 of 3 passed" in capsys.readouterr().out


def test_a_process_that_dies_is_a_failed_record_also_of_the_users_model(write: Write) -> None:
    """A model whose memory does not depend on the micro-batch shows nothing; a crash of its process was taken for that, and passed."""
    order = Order("cliff", "shim", "mine.py:make", 0, 6)
    (judged,) = judge([failed(order, "the job was ended by SIGSEGV")], order)
    assert not judged.passed
    assert judged.complaints == ["the job was ended by SIGSEGV"]


def test_bad_input_that_is_found_late_is_a_failed_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    arguments = ["stress", "--kind", "budget", "--steps", "6", "--budget", "4MiB", "--json", str(out)]
    assert main([*arguments, "--scenario", "steady", "--scenario", "optimizer_first_step"]) == 1
    found = {each.scenario: each for each in read_json(out)}
    assert found["optimizer_first_step"].complaints[0].startswith("--budget: 4.0 MiB are below the model")
    assert found["steady"].steps
    assert main([*arguments, "--scenario", "optimizer_first_step"]) == 2, "before the first record it is bad input and nothing else"
    capsys.readouterr()


def test_an_interrupt_leaves_the_records_that_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def play(order: Order, tell: Any) -> list[Run]:
        if order.scenario == "too_big":
            raise KeyboardInterrupt
        return [failed(order, "made up")]

    monkeypatch.setattr(scenarios, "perform", play)
    out = tmp_path / "found.json"
    assert main(["stress", "--kind", "budget", "--scenario", "steady", "--scenario", "too_big", "--json", str(out)]) == 130
    assert [each.scenario for each in read_json(out)] == ["steady"]
    assert "interrupted: 1 records of 2" in capsys.readouterr().out


def test_one_file_that_cannot_be_written_does_not_cost_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scenarios, "perform", lambda order, tell: [failed(order, "made up")])
    monkeypatch.setattr(scenarios, "write_json", full)
    json_file, page = tmp_path / "found.json", tmp_path / "found.html"
    assert main(["stress", "--kind", "budget", "--scenario", "steady", "--json", str(json_file), "--html", str(page)]) == 2
    assert f"--json {json_file}: it cannot be written: No space left on device" in capsys.readouterr().err
    assert page.is_file()


def test_a_slow_model_gets_a_later_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(scenarios, "check", lambda *args: None)
    monkeypatch.setattr("stress.scenarios.command.time.monotonic", lambda: next(clock))
    (order,) = scenarios.check_models([Order("steady", "shim", "mine.py:make", 0, 30)])
    assert order.deadline == DEADLINE + 20 * 30 * 2


def test_the_model_is_made_before_memory_is_broken_up(write: Write) -> None:
    """A factory that makes its data in one tensor, larger than any block that can be had later."""
    data = "torch.randn(20_000, 8).double()[:48].split(16)"
    (found,) = perform(
        Order("fragmentation", "budget", write(returning(loss="lambda b: m(b).square().mean()", batches=data)), 0, 8), lambda step: None
    )
    assert (found.complaints, len(found.steps)) == ([], 8)


# ---------------------------------------------------------------------- sizes

NORM = "nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))"


def test_an_odd_batch_in_twos_has_room_for_the_three_that_are_left(write: Write) -> None:
    """BatchNorm needs two samples, and nine of them in twos are 3, 2, 2, 2: with room for two the leak ended in the floor error."""
    body = returning(NORM, "lambda b: m(b).square().mean()", "[torch.randn(9, 3, 24, 24) for _ in range(3)]")
    model = write(body)
    subject = make(model, 0)
    assert least(subject, 4) == 3
    with BudgetLimit() as world:
        assert measure(world, subject, 4).sizes[0] == 3
    (found,) = perform(Order("leak", "budget", model, 0, 18), lambda step: None)
    assert (found.complaints, found.unshown, len(found.steps)) == ([], "", 18)


@pytest.mark.parametrize(("samples", "said"), [(1, "its batch is a single sample"), (3, "its batch of 3 cannot be cut into pieces of 2")])
def test_a_batch_that_cannot_be_cut_is_run_and_what_it_does_not_show_is_said(samples: int, said: str) -> None:
    needs = Needs(samples=samples, rest=50, sizes=[min(2, samples)], peaks=[200])
    order = Order("cliff", "budget", "mine.py:make", 0, 6)
    (judged,) = judge([Run("cliff", "budget", order.model, "float32", 0, needs, differences=SAME, complaints=["memory never ran out"])], order)
    assert judged.passed
    assert judged.unshown == said


def test_a_batch_of_one_sample_goes_through_or_ends_in_the_floor_error(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(returning(batches=DATA.replace("16", "1")))
    assert run("--scenario", "steady", "--scenario", "cliff", "--scenario", "one_sample_too_big", model=model) == 0
    assert "cliff on budget shows nothing: its batch is a single sample" in capsys.readouterr().out
    assert main(["stress", "exhaustive", "--model", model, "--max-points", "40"]) == 0
    told = capsys.readouterr().out
    assert "MicroBatchFloorError" in told
    assert "0 wrong" in told


# ---------------------------------------------------------------------- small parts


def test_an_error_of_the_users_is_named_with_the_model_and_its_lines_joined() -> None:
    with pytest.raises(ValueError, match=r"^--model mine\.py:make: it does not run: RuntimeError: a; b$"), naming("mine.py:make", "it does not run"):
        raise RuntimeError("a\n\n  b")
    with pytest.raises(ValueError, match=r"^--model mine\.py:make: lines; joined$"), naming("mine.py:make", "it does not run"):
        raise UsageError("lines\n  joined")
    with pytest.raises(ValueError, match=r"^--budget: as it is$"), naming("mine.py:make", "it does not run"):
        raise UsageError("--budget: as it is")


def test_an_evaluation_that_was_not_compared_is_a_complaint() -> None:
    from stress.record import Mark

    evaluated = record(marks=[Mark(0.0, 1, "eval", "")])
    assert "has no row for each sample" in checks.evaluated(evaluated)[0]
    assert checks.evaluated(replace(evaluated, differences=replace(SAME, outputs=0.0))) == []


def test_in_few_steps_what_comes_too_late_is_not_held_against_the_training() -> None:
    """With eight steps two scenarios failed on a sound model: memory was back, but there was no time to grow into it."""
    order, steps = Order("sensor_dies", "budget", "wide", 0, 8), [step(i, size=16, partition=[[0, 16], [16, 32]]) for i in range(8)]
    (judged,) = judge([record(steps, scenario="sensor_dies")], order)
    assert judged.passed
    assert judged.unshown.startswith("8 steps are too few for it (18 are enough): ")
    wrong = record(steps, scenario="sensor_dies", differences=replace(SAME, loss=0.5))
    assert not judge([wrong], order)[0].passed, "a gradient is right from the first step on"
    assert not judge([record([step(i) for i in range(18)], scenario="sensor_dies")], replace(order, steps=18))[0].passed


def test_training_that_makes_roundings_larger_is_compared_by_what_one_rounding_does() -> None:
    whole, shaken = [1.0, 1.0, 1.0, 1.0], [1.0, 1.0 + 1e-7, 1.0 + 1e-4, 1.0]
    assert relative([1.0, 1.0 + 1e-7, 1.0 + 1e-3, 1.0 + 1e-3], whole, shaken) == 0.0, "it stays apart"
    assert relative([1.0 + 1e-3, 1.0, 1.0, 1.0], whole, shaken) == pytest.approx(1e-3), "before that it is a difference"
    assert relative([1.0, 1.0, 1.1, 1.0], whole, shaken) == pytest.approx(0.1)


def test_a_curve_that_rounding_drives_apart_is_no_failure_and_a_lost_sample_is(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 a loss that falls to nothing was called wrong by its own roundings."""
    body = returning(NET.removesuffix(".double()"), "lambda b: m(b).square().mean()", "[torch.randn(16, 8) for _ in range(3)]")
    order = Order("eval_between", "budget", write(body), 0, 18)
    (found,) = perform(order, lambda step: None)
    assert found.complaints == []
    push = Schedule.push

    def lose(self: Schedule, failed: Any) -> None:
        failed.stop -= 1
        push(self, failed)

    monkeypatch.setattr(Schedule, "push", lose)
    assert not perform(order, lambda step: None)[0].passed


def test_a_step_on_a_device_that_is_the_host_has_room_for_the_guards_copies(write: Write) -> None:
    """A model with more weights than activations ended in an error of the optimizer's step wherever the host is the device."""
    if available("shim") is not None:
        pytest.skip(str(available("shim")))
    layers = "nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 64), nn.Tanh(), nn.Linear(64, 4))"
    model = write(returning(layers, batches=DATA.replace(".double()", "")))
    (found,) = perform(Order("too_big", "shim", model, 0, 12), lambda step: None)
    assert found.complaints == []
    assert len(found.steps) == 12
    assert found.needs.floor > found.needs.held
    assert min(found.needs.peaks) >= found.needs.floor
