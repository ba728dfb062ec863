"""Bad input to every command of the stress tool: one line that names the option, the value and the way out, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_mbs.cli.command import main
from stress.output import check_writable

BAD = [
    ("--budget abc", "--budget: 'abc' is no amount of memory: give a number of bytes above 0"),
    ("--budget -5", "--budget: '-5' is no amount"),
    ("--budget 0", "--budget: '0' is no amount"),
    ("--budget 0.2B", "--budget: '0.2B' is no amount"),
    ("--budget=", "--budget: '' is no amount"),
    ("--steps 0", "--steps: 0 is too few for a script: give a whole number of at least 6"),
    ("--steps -1", "--steps: -1 is too few"),
    ("--steps x", "--steps: 'x' is no whole number: give a whole number of at least 6"),
    ("--steps 7.5", "--steps: '7.5' is no whole number"),
    ("--seed x", "--seed: 'x' is no whole number: give a whole number from 0 to 4294967295"),
    ("--seed -1", "--seed: -1 is below 0"),
    ("--seed 4294967296", "--seed: 4294967296 is above 4294967295"),
    ("--json {folder}", "--json {folder}: this is a folder; name a file"),
    ("--json {folder}/none/x.json", "there is no folder {folder}/none; make it first"),
    ("--html {folder}/none/x.html", "--html {folder}/none/x.html"),
    ("--json {folder}/x --html {folder}/x", "goes to the same file"),
    ("--scenario nonsense", "--scenario nonsense: no such scenario; one of steady"),
    ("--kind nonsense", "--kind nonsense: no such kind of limit; one of budget"),
    ("--device tpu", "argument --device: invalid choice: 'tpu'"),
    ("--model nonsense", "--model nonsense: no such model; one of wide"),
    ("--model mine.py", "--model mine.py: no such model; one of wide, mlp, cnn, heads, gpt, gpt_bursts, adam, name its factory, as in mine.py:make"),
    ("--model mine.py:make", "--model mine.py:make: there is no file mine.py"),
    ("--model {file}:make", "--model {file}:make: {file} is no Python file, whose name ends in .py"),
    ("--nonsense", "unrecognized arguments: --nonsense"),
    ("nonsense", "invalid choice: 'nonsense'"),
    ("--steps 9 montecarlo --runs 1", "--steps stands before the command montecarlo, which does not see it there: put it behind montecarlo"),
    ("--quick soak", "--quick stands before the command soak"),
    ("montecarlo --runs 0", "--runs: 0 is below 1: give a whole number of at least 1"),
    ("montecarlo --runs x", "--runs: 'x' is no whole number"),
    ("montecarlo --seed -1", "--seed: -1 is below 0"),
    ("montecarlo --jobs 0", "--jobs: 0 is below 1: give a whole number from 1 to 1024"),
    ("montecarlo --minutes 0", "--minutes: '0' is no length of time that can be used: give a number of minutes above 0"),
    ("montecarlo --minutes inf", "--minutes: 'inf' is no length of time"),
    ("montecarlo --only -1", "--only: -1 is below 0"),
    ("montecarlo --only 1 --case {{}}", "it is one or the other"),
    ("montecarlo --case x", "--case x: this is no case"),
    ('montecarlo --case {{"limits":["x"]}}', "this is no case"),
    ('montecarlo --case {{"faults":[{{"times":"x"}}]}}', "this is no case"),
    ('montecarlo --case {{"faults":["x"]}}', "this is no case"),
    ("montecarlo --deadline nan", "--deadline: 'nan' is no length of time that can be used: give a number of seconds above 0"),
    ("montecarlo --deadline 1e9", "--deadline: '1e9' is no length of time"),
    ("montecarlo --shrink -1", "--shrink: '-1' is no length of time that can be used: give a number of seconds from 0 on"),
    ("montecarlo --json {folder}", "--json {folder}: this is a folder"),
    ("exhaustive nonsense", "unknown case 'nonsense'; one of mlp"),
    ("exhaustive --model nonsense", "--model nonsense: no such model"),
    ("exhaustive --model wide mlp", "it is one or the other"),
    ("exhaustive --model wide --samples 0", "--samples: 0 is below 1"),
    ("exhaustive --model wide --seed -1", "--seed: -1 is below 0"),
    ("exhaustive mlp --samples 4", "--samples 4 is for --model; the built-in cases have their own"),
    ("exhaustive mlp --seed 4", "--seed 4 is for --model"),
    ("exhaustive --stride x", "--stride: 'x' is no whole number"),
    ("exhaustive --max-points -3", "--max-points: -3 is below 1"),
    ("exhaustive --json {folder}/none/x", "there is no folder {folder}/none"),
    ("soak --minutes -1", "--minutes: '-1' is no length of time"),
    ("soak --samples 3", "--samples: 3 is too few for a trend: give a whole number of at least 16"),
    ("soak --seed 99999999999", "--seed: 99999999999 is above 4294967295"),
    ("soak --kind cloud", "argument --kind: invalid choice: 'cloud'"),
    ("soak --model nonsense", "--model nonsense: no such model"),
    ("hammer --failures 0", "--failures: 0 is below 1"),
    ("hammer --deadline 0", "--deadline: '0' is no length of time"),
    ("hammer --kind cloud", "argument --kind: invalid choice: 'cloud'"),
    ("hammer --only 3", "--only 3 is a round of one model"),
    ("hammer --failures x", "--failures: 'x' is no whole number"),
    ("hammer --seed -1", "--seed: -1 is below 0"),
    ("hammer --only 5 --model mlp --model gpt", "--only 5 is a round of one model"),
    ("hammer --model nonsense", "--model nonsense: no such model"),
    ("hammer --json {folder}", "--json {folder}: this is a folder"),
    ("soak --json {folder}", "--json {folder}: this is a folder"),
]


@pytest.mark.parametrize(("line", "said"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line_with_the_way_out(line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no model")
    names = {"folder": tmp_path, "file": file}
    assert main(["stress", *(word.format(**names) for word in line.split())]) == 2
    told = capsys.readouterr()
    assert said.format(**names) in told.err
    assert told.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file], "nothing is left behind"


def test_a_shrink_time_of_zero_is_allowed_and_a_case_with_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "montecarlo", "--runs", "1", "--seed", "0", "--shrink", "0"]) == 0
    assert "1 runs" in capsys.readouterr().out


def test_a_place_is_looked_at_by_opening_it_and_what_lies_there_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    check_writable(kept, "--json")
    check_writable(tmp_path / "fresh.json", "--json")
    check_writable(None, "--json")
    assert kept.read_text() == "old"
    assert list(tmp_path.iterdir()) == [kept]


def test_a_place_that_the_system_refuses_is_named_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under /proc a folder says that it may be written, and half a minute of records was lost."""
    name = "x" * 300 + ".json"
    assert main(["stress", "--scenario", "steady", "--json", str(tmp_path / name)]) == 2
    told = capsys.readouterr()
    assert "it cannot be written" in told.err
    assert told.out == ""
