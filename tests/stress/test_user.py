"""Files of users in the stress tool: neighbours, loaders, losses that draw, batches of one.

Each is run, or refused in one line.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_mbs import ElasticMBS
from elastic_mbs.batch.schedule import Schedule
from elastic_mbs.cli.command import main
from stress.limits import BudgetLimit, available
from stress.models.factory import make
from stress.scenarios.catalogue import Order
from stress.scenarios.measure import least, measure
from stress.scenarios.processes import perform

Write = Callable[..., str]

HEAD = (
    "import random\nimport sys\nimport torch\nfrom torch import nn\nfrom torch.nn import "
    "functional as F\n"
)
NET = "nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 4)).double()"
DATA = "[(torch.randn(16, 8).double(), torch.randint(0, 4, (16,))) for _ in range(3)]"
SQUARE = "lambda b: m(b).square().mean()"


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Write a user's file and return its factory's name.

    Its changes of the interpreter's path are undone.
    """
    path = list(sys.path)
    known = set(sys.modules)

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


def returning(
    model: str = NET,
    loss: str = "lambda b: F.cross_entropy(m(b[0]), b[1])",
    batches: str = DATA,
    more: str = "",
) -> str:
    return f"def make():\n    m = {model}\n    return m, {loss}, {batches}{more}\n"


def run(*arguments: str, model: str) -> int:
    return main(["stress", "--kind", "budget", "--steps", "8", *arguments, "--model", model])


def perform_one(scenario: str, model: str, steps: int, kind: str = "budget") -> Any:
    (found,) = perform(Order(scenario, kind, model, 0, steps), lambda step: None)
    return found


# ---------------------------------------------------------------------- files and factories


def test_a_file_imports_its_neighbours_and_is_told_from_its_namesake(
    write: Write,
) -> None:
    write("WIDTH = 3\n", "neighbour_of_mine.py")
    plain = write(
        "from neighbour_of_mine import WIDTH\n" + returning("nn.Linear(8, WIDTH).double()")
    )
    for name in ("users_package/__init__.py", "users_package/inner/__init__.py"):
        write("", name)
    write("WIDTH = 5\n", "users_package/size.py")
    relative = write(
        "from ..size import WIDTH\n" + returning("nn.Linear(8, WIDTH).double()"),
        "users_package/inner/models.py",
    )
    first, second = (
        write(returning(f"nn.Linear(8, {width}).double()"), f"{folder}/model.py")
        for folder, width in (("a", 4), ("b", 6))
    )
    assert [make(name, 0).model.out_features for name in (plain, relative, first, second)] == [
        3,
        5,
        4,
        6,
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def make(:\n", "mine.py does not run: SyntaxError"),
        ("sys.exit('first\\nsecond')\n", "mine.py does not run: SystemExit: first; second"),
        ("make = 3\n", "has 'make', but that is of type int and no function"),
        ("def other():\n    pass\n", "has no function 'make'; its functions: other"),
        ("def make():\n    raise SystemExit(3)\n", "the factory does not run: SystemExit: 3"),
        (
            "def make():\n    return 1, 2\n",
            "the factory returned a tuple of 2; it must return (model, loss_fn, batches)",
        ),
        (
            "calls = []\n"
            + returning("nn.Linear(8, 4 + (calls.append(1) or len(calls))).double()"),
            "two models made from seed 0 differ",
        ),
        (
            "calls = []\n"
            + returning(batches="[torch.full((4, 8), float(calls.append(1) or len(calls)))]"),
            "two first batches made from seed 0 differ",
        ),
        (
            returning(more=", 0.1"),
            "the fourth is float; it must be a function that makes the optimizer from the "
            "parameters, or a dict of options",
        ),
        (
            returning(more=", lambda p: None"),
            "the optimizer's maker returned NoneType, which is no optimizer",
        ),
        (
            returning(more=", lambda p: torch.optim.SGD(p, lr=-1)"),
            "its optimizer does not run: ValueError: Invalid learning rate",
        ),
        (
            returning(more=", {'cuont': 3}"),
            "ElasticMBS has no option 'cuont': did you mean count=…",
        ),
        (returning(loss="lambda x, y: 0"), "its step fails on its first batch: TypeError: "),
        (
            returning(loss="lambda b: None"),
            "--model {model}: loss_fn returned None; is a `return` missing?",
        ),
        (
            returning(loss="lambda b: m(b[0]).mean() * float('nan')"),
            "the loss of its first batch is nan and its gradient's norm nan",
        ),
        (
            returning(loss="lambda b: (m(b[0]) * 0).mean()"),
            "the gradient of its first batch is zero",
        ),
        (
            returning(loss="lambda b: m(b[0][:, :3]).mean()"),
            "its step fails on its first batch: RuntimeError: mat1 and mat2",
        ),
        (
            returning(
                loss="lambda b, calls=[]: m(b[0]).square().mean() * (calls.append(1) or len(calls))"
            ),
            "it depends on how often it was called",
        ),
        (
            returning(batches="torch.randn(16, 8)"),
            "batches are one Tensor: for a single batch give a list of it, [batch]",
        ),
        (
            returning(batches="3"),
            "batches are int: give a list, a loader, a generator, or a function of the step's "
            "number",
        ),
        (returning(batches="[]"), "there are no batches"),
        (returning(batches="lambda: 0"), "there is no batch for step 0: TypeError: "),
        (
            returning(batches="(torch.randn(16, 8).double(), torch.randint(0, 4, (16,)))"),
            "each of which is taken for a batch: is it one batch?",
        ),
        (
            returning(batches="lambda step: [torch.zeros(4, 8).double()][step]", loss=SQUARE),
            "there is no batch for step 1: IndexError",
        ),
        (
            returning("nn.Linear(8, 4).requires_grad_(False)"),
            "the model has no parameter that requires a gradient",
        ),
    ],
)
def test_a_model_that_cannot_be_used_is_one_line(
    body: str, said: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(body)
    assert run("--scenario", "steady", model=model) == 2
    told = capsys.readouterr().err
    assert said.format(model=model) in told
    assert f"--model {model}: " in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [["exhaustive", "--max-points", "4"], ["soak", "--minutes", "0.001"]],
    ids=lambda command: command[0],
)
def test_every_command_refuses_a_model_in_one_line(
    command: list[str], write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(returning(loss="lambda b: sys.exit(3)"))
    assert main(["stress", *command, "--model", model]) == 2
    assert (
        capsys.readouterr().err
        == f"elastic-mbs: --model {model}: its step fails on its first batch: SystemExit: 3\n"
    )


@pytest.mark.parametrize(
    "batches",
    [
        "torch.utils.data.DataLoader(torch.randn(40, 8).double(), batch_size=16, shuffle=True)",
        "drawn",
        "lambda step: torch.randn(8, 8).double() + random.random()",
    ],
    ids=["loader", "generator function", "function that draws"],
)
def test_batches_come_from_whatever_gives_them(batches: str, write: Write) -> None:
    drawn = "def drawn():\n    while True:\n        yield torch.randn(8, 8).double()\n"
    assert (
        run("--scenario", "cliff", model=write(drawn + returning(loss=SQUARE, batches=batches)))
        == 0
    )


def test_a_drawn_batch_is_always_the_same_and_leaves_the_streams_alone(
    write: Write,
) -> None:
    subject = make(
        write(returning(batches="lambda step: torch.randn(4, 8).double() + random.random()")), 3
    )
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
        "lambda b: F.cross_entropy(m(b[0]) * (1 + random.random()), b[1])",
        "lambda b: F.cross_entropy(m(F.dropout(b[0], 0.2, training=True)), b[1])",
        "lambda b: F.cross_entropy(m(b[0] if m.training else b[0] + torch.rand_like(b[0])), b[1])",
    ],
    ids=["noise like the batch", "Python's stream", "dropout in evaluation", "in evaluation only"],
)
def test_a_loss_that_draws_random_numbers_is_compared_over_the_same_pieces(
    loss: str, write: Write
) -> None:
    found = perform_one("eval_between", write(returning(loss=loss)), 18)
    assert (found.unshown, found.complaints) == ("", [])
    assert found.differences is not None
    assert (found.differences.whole_loss is None) is ("if m.training" not in loss), (
        "whole batches draw other numbers"
    )
    assert found.differences.outputs is not None
    # after 18 steps; other numbers would make tenths
    assert found.differences.outputs <= found.differences.tolerance_weight
    assert found.ooms > 0


@pytest.mark.usefixtures("forked")
def test_a_generator_of_its_own_has_to_be_named_and_then_is_put_back(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = "torch.randn(b[0].shape, generator=g, dtype=torch.float64)"
    own = (
        f"def make():\n    m, g = {NET}, torch.Generator().manual_seed(3)\n    return m, lambda "
        f"b: F.cross_entropy(m(b[0] + {noise}), b[1]), {DATA}"
    )
    assert run("--scenario", "eval_between", model=write(own)) == 2
    assert (
        'which has to be named (a dict of options as the factory\'s last entry, {"generators": '
        in capsys.readouterr().err
    )
    assert (
        run(
            "--scenario",
            "eval_between",
            "--scenario",
            "kill",
            "--steps",
            "18",
            model=write(own + ", {'generators': [g]}\n", "named.py"),
        )
        == 0
    )
    assert "2 of 2 passed" in capsys.readouterr().out


def test_samples_that_depend_on_each_other_are_exact_piece_by_piece(write: Write) -> None:
    loss = "lambda b: m(b[0]).mean().square()"
    assert perform_one("eval_between", write(returning(loss=loss)), 16).passed


def test_a_curve_apart_by_rounding_passes_and_a_lost_sample_fails(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in float32 a loss that falls to nothing was called wrong by its own roundings
    model = write(
        returning(NET.removesuffix(".double()"), SQUARE, "[torch.randn(16, 8) for _ in range(3)]")
    )
    found = perform_one("eval_between", model, 18)
    assert (
        found.complaints,
        found.dtype,
        found.differences.tolerance_loss,
        found.differences.tolerance_weight,
    ) == ([], "float32", 1e-5, 1e-3)
    push = Schedule.push

    def lose(self: Schedule, failed: Any) -> None:
        failed.stop -= 1
        push(self, failed)

    monkeypatch.setattr(Schedule, "push", lose)
    assert not perform_one("eval_between", model, 18).passed


def test_an_evaluation_is_compared_whatever_the_model_gives(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (
        f"type('Model', (nn.Module,), {{'forward': lambda self, x: self.inner(x).t()}})()\n    "
        f"m.inner = {NET}"
    )
    mine = write(returning(model, "lambda b: F.cross_entropy(m(b[0]).t(), b[1])"))
    plain = perform_one("eval_between", mine, 18)
    assert (plain.verdict, plain.differences.whole_loss is None) == ("ok", False)
    evaluate = ElasticMBS.evaluate
    monkeypatch.setattr(
        ElasticMBS,
        "evaluate",
        lambda self, fn, batch: evaluate(
            self, lambda piece: fn([part.flip(0)[1:] for part in piece]), batch
        ),
    )
    found = perform_one("eval_between", mine, 18)
    assert any(
        complaint.startswith("an output of the evaluation differs")
        for complaint in found.complaints
    )


# ---------------------------------------------------------------------- records


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first; second"),
        (
            "raise torch.OutOfMemoryError('CUDA out of memory.\\nTried')",
            "OutOfMemoryError: CUDA out of memory.; Tried",
        ),
        ("sys.exit('gone')", "SystemExit: gone"),
    ],
)
def test_an_error_in_one_scenario_leaves_the_records_of_the_others(
    what: str, said: str, write: Write, tmp_path: Path
) -> None:
    late = (
        "calls = []\ndef loss(m, b):\n    calls.append(1)\n    if len(calls) > 20:\n        "
        f"{what}\n    return F.cross_entropy(m(b[0]), b[1])\n"
    )
    out, page = tmp_path / "found.json", tmp_path / "found.html"
    arguments = [
        "--scenario",
        "steady",
        "--scenario",
        "too_big",
        "--json",
        str(out),
        "--html",
        str(page),
    ]
    assert run(*arguments, model=write(late + returning(loss="lambda b: loss(m, b)"))) == 1
    found = json.loads(out.read_text())["runs"]
    assert [(each["scenario"], each["passed"]) for each in found] == [
        ("steady", False),
        ("too_big", False),
    ]
    complaints = [complaint for each in found for complaint in each["complaints"]]
    assert not any("\n" in complaint for complaint in complaints)
    assert any(
        said in complaint
        for complaint in complaints
        if "OutOfMemory" in said or complaint.startswith("unexpected error: ")
    )
    assert page.read_text().count("FAILED") >= 2


# ---------------------------------------------------------------------- memory and sizes


def test_the_model_is_made_before_memory_is_broken_up(write: Write) -> None:
    # a factory that makes its data in one tensor, larger than any block that can be had later
    found = perform_one(
        "fragmentation",
        write(returning(loss=SQUARE, batches="torch.randn(20_000, 8).double()[:48].split(16)")),
        8,
    )
    assert (found.complaints, len(found.steps)) == ([], 8)


def test_an_odd_batch_in_twos_has_room_for_the_three_that_are_left(write: Write) -> None:
    # BatchNorm needs two samples, and nine of them in twos are 3, 2, 2, 2: with room for two the
    # leak ended in the floor error
    norm = (
        "nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), "
        "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))"
    )
    model = write(returning(norm, SQUARE, "[torch.randn(9, 3, 24, 24) for _ in range(3)]"))
    assert least(make(model, 0), 4) == 3
    with BudgetLimit() as memory:
        assert measure(memory, make(model, 0), 4).sizes[0] == 3
    found = perform_one("leak", model, 18)
    assert (found.complaints, found.unshown, len(found.steps)) == ([], "", 18)


def test_a_batch_of_one_sample_goes_through_or_ends_in_the_floor_error(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(returning(batches=DATA.replace("16", "1")))
    assert (
        run(
            "--scenario",
            "steady",
            "--scenario",
            "cliff",
            "--scenario",
            "one_sample_too_big",
            model=model,
        )
        == 0
    )
    assert "on budget shows nothing: its batch is a single sample" in capsys.readouterr().out
    assert (
        main(
            [
                "stress",
                "exhaustive",
                "--model",
                model,
                "--max-points",
                "40",
                "--call",
                "backward",
                "--dimension",
                "operations",
            ]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "MicroBatchFloorError" in told
    assert "0 wrong" in told


def test_a_step_on_the_host_has_room_for_the_guards_copies(write: Write) -> None:
    # a model with more weights than activations ended in an error of the optimizer's step wherever
    # the host is the device
    if available("shim") is not None:
        pytest.skip(str(available("shim")))
    layers = (
        "nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 64), nn.Tanh(), "
        "nn.Linear(64, 4))"
    )
    found = perform_one(
        "too_big", write(returning(layers, batches=DATA.replace(".double()", ""))), 12, "shim"
    )
    assert (found.complaints, len(found.steps)) == ([], 12)
    assert min(found.needs.peaks) >= found.needs.floor > found.needs.held
