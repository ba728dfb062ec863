"""The command line: what it says to bad input, and its exit codes."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_mbs import MicroBatchFloorError, __version__
from elastic_mbs.cli import demo
from elastic_mbs.cli.command import BAD_INPUT, NO_READER, main
from tests.helpers.events import RUN, log_of


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "COMMAND"),
        (["dmeo"], "'dmeo'"),
        (["demo", "--stesp", "4"], "--stesp"),
        (["demo", "--steps", "3"], "--steps 3 is too small: at least 4"),
        (["demo", "--budget", "much"], "'much'"),
        (["demo", "--budget", "1MiB", "--steps", "4", "--batch", "2"], "--budget"),
        (["demo", "--device", "cuda"], "--device cpu"),
        (["demo", "--text", "no/such/place"], "no/such/place"),
        (["demo", "--out", "no/such/folder/demo.png"], "no/such/folder"),
        (["demo", "--log", "no/such/folder/run.jsonl"], "no/such/folder"),
        (["watch", "run.jsonl", "--interval", "0"], "--interval 0.0"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert err.startswith("elastic-mbs: ")
    assert told in err
    assert not out


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_it_shows_its_version_and_its_commands(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([option])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for words in (
        (f"elastic-mbs {__version__}",)
        if option == "--version"
        else ("demo", "doctor", "report", "watch", "stress")
    ):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["report", "run.jsonl"], 0),
        (["report", "run.jsonl", "--out", "no/such/page.html"], BAD_INPUT),
        (["watch", "run.jsonl", "--once"], 0),
        (["watch", "none.jsonl"], BAD_INPUT),
    ],
)
def test_commands_that_read_a_log_do_without_torch(
    arguments: list[str], code: int, tmp_path: Path
) -> None:
    # Importing it takes seconds.
    (tmp_path / "run.jsonl").write_bytes(log_of(RUN))
    refused = "import sys; sys.modules['torch'] = None; from elastic_mbs.cli import main; "
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{refused}sys.exit(main())", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False), ended.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (MicroBatchFloorError("the smallest micro-batch does not fit"), 1),
    ],
)
def test_a_command_that_cannot_go_on_has_an_exit_code_of_its_own(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(demo, "main", fail)
    assert main(["demo"]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_output_that_is_not_read_ends_a_command_without_a_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "elastic_mbs", "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == NO_READER


@pytest.mark.parametrize("command", ["doctor", "plan", "report", "watch"])
def test_the_help_names_no_module_of_the_package(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert not re.search(r"[a-z]\.py\b", capsys.readouterr().out)
