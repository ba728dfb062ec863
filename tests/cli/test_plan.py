"""`elastic-mbs plan`: a table, a document and a picture of what a user's model needs."""

import json
from pathlib import Path

import pytest

from elastic_mbs.cli.command import main

FACTORY = """
import torch
from torch import nn
from beside import WIDTH

def make():
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    batches = [torch.randn(32, 100, 64)]
    loss_fn = lambda b: model(b).square().mean()
    return model, loss_fn, batches, lambda p: torch.optim.AdamW(p), {"policy": None}

def drawn():
    return (*make()[:2], lambda step: torch.randn(8, 100, 64))

def reads():
    model = nn.Linear(64, 1)
    return model, lambda b: model(b).mean() * model(b).max().item(), [torch.randn(8, 64)]

def nothing():
    return nn.Linear(1, 1)

def one():
    return nn.Linear(1, 1), len, (torch.zeros(8, 1), torch.zeros(8))

def broken():
    raise KeyError("here")
"""


@pytest.fixture(autouse=True)
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(FACTORY)
    (tmp_path / "beside.py").write_text("WIDTH = 128\n")
    monkeypatch.chdir(tmp_path)


def test_the_table_says_which_size_fits_and_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", "train.py:make", "--budget", "2MiB", "--plot", "plan.png"]) == 0
    out = capsys.readouterr().out
    assert "pieces of " in out.splitlines()[0]
    for words in ("parameters", "activations", "yes", "no", "optimizer step"):
        assert words in out
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_the_document_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "train.py:make", "--budget", "2MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["version"], found["capacity"], found["samples"]) == (
        "elastic-mbs-plan",
        1,
        2 * 2**20,
        32,
    )
    fitting = [row["size"] for row in found["sizes"] if row["fits"]]
    assert max(fitting) == found["largest"] < 32
    row = found["sizes"][0]
    assert row["parameters"] == 4 * (64 * 128 + 128 + 128 + 1)
    assert row["peak"] == sum(
        row[part] for part in ("parameters", "gradients", "optimizer", "other", "activations")
    )


def test_measured_steps_give_the_time_and_what_is_fastest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["plan", "train.py:make", "--budget", "2MiB", "--measure", "--compare", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    seconds = [row["seconds"] for row in found["sizes"]]
    assert 0 < seconds[0] <= seconds[-1]  # as many samples in one piece and in many
    ways = {way["name"]: way for way in found["ways"]}
    blocks = {f"checkpoint ({count} of 2 blocks)" for count in (1, 2)}
    assert ways.keys() >= {"none", "offload"} | blocks
    assert found["fastest"] == min(ways, key=lambda name: ways[name]["seconds"])
    assert main(["plan", "train.py:make", "--budget", "2MiB", "--compare"]) == 0
    assert "fastest: not known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "budget", "code", "told"),
    [
        ("drawn", "1GiB", 0, "pieces of 8 fit"),
        ("drawn", "20KB", 1, "not even"),
        ("reads", "1GiB", 1, "no plan"),
    ],
)
def test_the_exit_code_says_whether_there_is_a_size(
    name: str, budget: str, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"train.py:{name}", "--budget", budget]) == code
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none.py:make"], "there is no Python file 'none.py'"),
        (["train.py"], "train.py:make"),
        (["train.py:mak"], "no function 'mak'"),
        (["train.py:nothing"], "(model, loss_fn, batches)"),
        (["train.py:one"], "batches are one tuple: for a single batch give a list of it, [batch]"),
        (["train.py:broken"], "KeyError: 'here'"),
        (["train.py:make", "--budget", "much"], "'much'"),
        (["train.py:make", "--device", "abacus"], "abacus"),
        (["train.py:make", "--budget", "1GiB", "--plot", "no/such/plan.png"], "no/such/plan.png"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert told in err
