"""The demo: it survives, trains the same model, says what happened, and notices when something is wrong."""

import io
import math
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs import UsageError
from elastic_mbs.batch import schedule
from elastic_mbs.cli import command
from elastic_mbs.cli.demo import ballast, compare, console, run, text
from elastic_mbs.cli.demo.cuda_tenant import CudaTenant
from elastic_mbs.cli.demo.gpt import GPTConfig, make_model, token_loss
from elastic_mbs.cli.demo.record import Record, Sample, Step
from elastic_mbs.cli.demo.tenant import write_script
from elastic_mbs.cli.report import render
from elastic_mbs.events import OutOfMemory, Resized
from elastic_mbs.memory import NoMeter, NoSensor

MIB = 2**20
SMALL = GPTConfig(context=64, width=16, heads=2, layers=2)
QUICK = ["demo", "--steps", "8", "--batch", "16", "--device", "cpu"]


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "CPU_MODEL", SMALL)


# ---------------------------------------------------------------------- the whole


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_it_survives_and_trains_the_same_model(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*QUICK, "--no-plot", "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("trained the same model.")
    assert out.count("\nstep ") == 8 + 1  # and the table's head
    for told in (
        "a co-tenant arrives",
        "it takes more",
        "it leaves",
        "out of memory in backward",
        "patience 2",
    ):
        assert told in out
    for row in ("largest difference", "out-of-memory errors", "samples replayed", "micro-batch sizes", "time lost to replays"):
        assert f"\n{row} " in out
    assert "picture" not in out


def test_it_grows_back_when_the_co_tenant_has_left_and_its_log_tells_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "POLICY", replace(run.POLICY, cooldown=0.0))  # a run of two seconds
    assert command.main([*QUICK, "--steps", "24", "--no-plot", "--log", str(tmp_path / "run.jsonl")]) == 0
    _, _, alone_again = capsys.readouterr().out.partition("it leaves")
    assert "(grow)" in alone_again
    page = render(tmp_path / "run.jsonl")
    assert page.count('class="mark mark-grow" d=') > 2  # one in the legend, one in the table, the others in the lane
    assert page.count('class="mark mark-oom" d=') > 2


def test_the_picture_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "demo.png"
    assert command.main([*QUICK, "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert str(picture) in capsys.readouterr().out


def test_without_matplotlib_it_says_so_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what makes `import matplotlib` fail
    picture = tmp_path / "demo.png"
    assert command.main([*QUICK, "--out", str(picture)]) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not picture.exists()


def test_a_forgotten_count_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "count_tokens", lambda key: None)
    assert command.main([*QUICK, "--no-plot"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_one_token_left_out_of_one_weight_is_noticed(dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    true_next, calls = schedule.Schedule.next, iter(range(10**6))

    def next_piece(self: schedule.Schedule, size: int) -> schedule.Range | None:
        piece, total = true_next(self, size), self._counts.total
        assert isinstance(total, int)
        if piece is not None and piece.weights is not None and next(calls) == 10:
            piece.weights = {None: piece.weights[None] - 1 / total}
        return piece

    monkeypatch.setattr(schedule.Schedule, "next", next_piece)
    assert command.main([*QUICK, "--no-plot", "--dtype", dtype]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_a_run_that_never_ran_out_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*QUICK, "--no-plot", "--budget", "1GiB"]) == 1
    out = capsys.readouterr().out
    assert "NOTHING SHOWN" in out
    assert "0 survived (none)" in out


def test_a_run_that_becomes_nan_is_not_equal() -> None:
    outcome = SimpleNamespace(differences=[0.0, math.nan], weight=0.0, rounding=compare.ROUNDING[torch.float64])
    assert not compare.Outcome.equal.fget(outcome)  # type: ignore[attr-defined]  # the property's own function


def test_a_budget_in_plain_bytes_is_taken_and_any_stream_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert command.main([*QUICK, "--no-plot", "--budget", "3500000"]) == 0
    assert "3.3 MiB" in out.getvalue()


def test_the_random_streams_of_its_caller_do_not_move() -> None:
    before, python = torch.random.get_rng_state(), random.getstate()
    make_model(SMALL, seed=3, dtype=torch.float64)
    text.read_documents(None, count=4, longest=65, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert random.getstate() == python


# ---------------------------------------------------------------------- the text


def test_a_folder_of_texts_is_read_with_all_below_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "one.txt").write_text(
        "It is a truth universally acknowledged, that a single man\n\nin possession of a good fortune, must be in want of a wife.\n"
    )
    (tmp_path / "below" / "two.md").write_text("However little known the feelings or views of such a man may be on his first entering")
    (tmp_path / "picture.bin").write_bytes(bytes(200))
    (tmp_path / ".hidden").write_text("x" * 200)
    found = text.read_documents(tmp_path, count=5, longest=100, seed=0)
    assert len(found) == 5
    assert set(b"".join(found)) <= set((tmp_path / "one.txt").read_bytes() + (tmp_path / "below" / "two.md").read_bytes())
    assert {document[:8] for document in found} == {b"It is a ", b"in posse", b"However "}
    assert command.main([*QUICK, "--no-plot", "--text", str(tmp_path)]) == 0
    assert str(tmp_path) in capsys.readouterr().out


def test_one_file_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_bytes(b"abcdefgh" * 5 + b"\r\n \t\r\n" + b"tiny\n\n" + b"ABCDEFGH" * 5)
    assert set(text.read_documents(path, count=8, longest=64, seed=1)) == {b"abcdefgh" * 5, b"ABCDEFGH" * 5}


def test_a_text_without_a_passage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no files"):
        text.find_files(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(UsageError, match="no passage"):
        text.read_documents(tmp_path, count=1, longest=64, seed=0)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locked.txt"
    path.write_text("x" * 64)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match=r"locked\.txt: Permission denied"):
        text.read_documents(path, count=1, longest=64, seed=0)


def test_a_python_without_sources_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match="--text PATH"):
        text.find_files(None)


@given(st.binary(max_size=400), st.integers(32, 80))
def test_passages_are_parts_of_the_text_and_of_a_bounded_length(content: bytes, longest: int) -> None:
    rest = content
    for passage in text.passages(content, longest):
        assert text.SHORTEST <= len(passage) <= longest
        rest = rest[rest.index(passage) + len(passage) :]


def test_the_same_seed_gives_the_same_batches_and_another_one_others() -> None:
    def loader(seed: int) -> text.Loader:
        return text.Loader(text.read_documents(None, count=48, longest=65, seed=seed), 8, seed)

    same, again, other = loader(0), loader(0), loader(1)
    assert len(same) == len(list(same)) == 6
    for mine, his, hers in zip(same, again, other, strict=True):
        assert torch.equal(mine["tokens"], his["tokens"])
        assert not torch.equal(mine["tokens"], hers["tokens"])
    for mine, his in zip(same, same, strict=True):
        assert torch.equal(mine["labels"], his["labels"])


def test_batches_differ_in_length() -> None:
    loader = text.Loader(text.read_documents(None, count=96, longest=257, seed=0), 16, 0)
    lengths = {batch["tokens"].shape[1] for batch in loader}
    assert len(lengths) > 1
    assert loader.longest()["tokens"].shape[1] == max(lengths)


def test_labels_are_the_next_bytes_and_nothing_on_the_padding() -> None:
    batch = text.collate([b"abcd", b"xy"])
    assert batch["tokens"].tolist() == [[97, 98, 99], [120, 0, 0]]
    assert batch["labels"].tolist() == [[98, 99, 100], [121, -100, -100]]


# ---------------------------------------------------------------------- the model


def test_the_model_is_causal() -> None:
    model = make_model(SMALL, seed=0, dtype=torch.float64)
    tokens = torch.arange(24).reshape(2, 12)
    changed = tokens.clone()
    changed[:, 7:] += 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_embedding_is_tied_to_the_output_layer() -> None:
    model = make_model(SMALL, seed=0, dtype=torch.float32)
    assert model.head.weight is model.embedding.weight
    assert sum(name.endswith(("embedding.weight", "head.weight")) for name, _ in model.named_parameters()) == 1


def test_padding_does_not_change_the_loss() -> None:
    model = make_model(SMALL, seed=0, dtype=torch.float64)
    alone, padded = text.collate([b"some document"]), text.collate([b"some document", b"and one that is longer by far"])
    first = {key: tensor[:1] for key, tensor in padded.items()}
    assert torch.isclose(token_loss(alone, model), token_loss(first, model), rtol=1e-14)


# ---------------------------------------------------------------------- the co-tenant


@given(st.integers(4, 500), st.integers(3000, 10**9))
def test_the_script_is_in_order_and_leaves_room_for_one_document(steps: int, budget: int) -> None:
    floor = round(1.25 * budget / 3)
    moves = write_script(steps, budget, floor)
    assert [move.step for move in moves] == sorted({move.step for move in moves})
    assert 0 < moves[0].step < moves[-1].step < steps
    assert all(floor <= move.left <= budget for move in moves)
    assert moves[-1].left == budget


class Card:
    """A device of CUDA in numbers: what the ballast holds comes off what is free, as far as torch is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int, largest: int | None = None) -> None:
        self.total, self.free, self.ours, self.held, self.largest, self.fraction = free, free, 0, 0, largest or free, 1.0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free - self.held - self.ours, self.total))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.ours)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: setattr(self, "fraction", fraction))

    def block(self, size: int, **_: object) -> Any:
        if size > min(self.largest, self.free - self.held - self.ours):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return Block(self, size)


class Block:
    def __init__(self, card: Card, size: int) -> None:
        self._card, self._size = card, size
        card.held += size

    def numel(self) -> int:
        return self._size

    def __del__(self) -> None:
        self._card.held -= self._size


@pytest.mark.parametrize("largest", [None, 70 * MIB])
def test_the_ballast_holds_what_it_is_told_as_far_as_there_is_memory(largest: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, free=1000 * MIB, largest=largest)
    monkeypatch.setattr(torch, "empty", card.block)
    held = ballast.Ballast(torch.device("cuda", 0))
    for wanted, held_then in ((400, 400), (1400, 1000), (200, 200), (0, 0)):
        held.wanted = wanted * MIB
        held.adjust()
        assert held_then * MIB - ballast.GRAIN < card.held == held.held <= held_then * MIB


def test_the_ballast_answers_each_line_and_goes_on_trying(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    card = Card(monkeypatch, free=100 * MIB)
    monkeypatch.setattr(torch, "empty", card.block)

    def lines() -> Iterator[str]:
        yield f"hold {200 * MIB}\n"
        while card.held < 100 * MIB:
            time.sleep(0.001)
        card.free = 200 * MIB  # somebody has let go of the rest
        while card.held < 200 * MIB:
            time.sleep(0.001)
        yield f"hold {40 * MIB}\n"

    monkeypatch.setattr(sys, "stdin", lines())
    ballast.main(torch.device("cuda", 0))
    assert capsys.readouterr().out.split("\n") == ["ready", f"holding {100 * MIB}", f"holding {40 * MIB}", ""]


ECHO = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print("holding", line.split()[1], flush=True)
"""


def start_instead(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the co-tenant on CUDA start `script` as its process."""
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: start([sys.executable, "-c", script], **how))


def test_the_co_tenant_on_cuda_leaves_what_the_script_says(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, free=1000 * MIB)
    start_instead(ECHO, monkeypatch)
    model = make_model(SMALL, seed=0, dtype=torch.float64)
    with CudaTenant(200 * MIB, [], model.blocks[-1], torch.device("cuda", 0)) as tenant:
        assert card.fraction == 0.2
        card.ours = 30 * MIB
        tenant.leave(100 * MIB)
        card.held = tenant._wanted
        assert card.held == 900 * MIB
        card.ours = 60 * MIB
        tenant.leave(50 * MIB)  # less than we hold ourselves: all that is there, and what we let go of
        assert tenant._wanted == 950 * MIB
        tenant.leave(200 * MIB)
        assert tenant._wanted == 0
        process = tenant._neighbour._process
    assert process is not None
    assert process.returncode == 0
    assert card.fraction == 1.0


def test_a_ballast_process_that_fails_to_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, free=1000 * MIB)
    start_instead("print('no device')", monkeypatch)
    tenant = CudaTenant(200 * MIB, [], torch.nn.Linear(1, 1), torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="'no device"):
        tenant.__enter__()
    assert tenant._neighbour._process is not None
    assert tenant._neighbour._process.returncode == 0, "waited for"


@pytest.mark.parametrize(("ours", "budget", "told"), [(300, 200, "--device cpu"), (100, 950, "more than cuda:0 has free")])
def test_a_device_that_others_use_is_left_alone(ours: int, budget: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, free=1000 * MIB).ours = ours * MIB
    tenant = CudaTenant(budget * MIB, [], torch.nn.Linear(1, 1), torch.device("cuda", 0))
    with pytest.raises(UsageError, match=told):
        tenant.__enter__()


# ---------------------------------------------------------------------- the record


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def oom(mode: str, size_after: int = 4) -> OutOfMemory:
    return OutOfMemory("demo", "forward", 0, 8, mode, 8, size_after, 0, "allocator", "no memory")


class Quiet:
    def step(self, step: Step) -> None: ...

    def event(self, event: Any) -> None: ...

    def move(self, move: Any) -> None: ...


@pytest.mark.parametrize(("mode", "lost"), [("piece", 2.0), ("isolate", 2.0), ("step", 5.0)])
def test_lost_time_runs_from_the_start_of_what_is_replayed(mode: str, lost: float) -> None:
    clock, model = Clock(), make_model(SMALL, seed=0, dtype=torch.float64)
    record = Record(model, NoSensor("none"), NoMeter(), Quiet(), clock=clock)
    batch = text.collate([b"some document"] * 8)
    for _ in record.steps_of([batch], lambda index: None):
        model(batch["tokens"])
        clock.now = 3.0
        model(batch["tokens"])
        clock.now = 5.0
        record.note(oom(mode))
    step = record.steps[0]
    assert step.lost == lost
    assert [size for _, size in step.sizes] == [8, 4]
    assert step.peak is None  # nobody could read the memory


def test_sizes_follow_what_the_controller_says() -> None:
    clock, model = Clock(), make_model(SMALL, seed=0, dtype=torch.float64)
    record = Record(model, NoSensor("none"), NoMeter(), Quiet(), clock=clock)
    tokens = text.collate([b"some document"] * 8)["tokens"]
    for _ in record.steps_of([{"tokens": tokens}], lambda index: None):
        for size in (1, 2, 4, 1):  # the doubling of a size that is being looked for; then the rest
            model(tokens[:size])
        record.note(Resized("demo", 4, 8, "grow", "key"))
    assert [size for _, size in record.steps[0].sizes] == [1, 2, 4, 8]


def test_without_a_reading_a_step_is_printed_without_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    setting: Any = SimpleNamespace(options=SimpleNamespace(steps=8), budget=100)
    step = Step(0, 12, 0.0, 1.0, result=SimpleNamespace(micro_batch_size=4), loss=1.5)  # type: ignore[arg-type]  # stands for a result
    console.Lines(setting).step(step)
    console.Lines(setting).step(replace(step, peak=Sample(0.5, 25, 50)))
    without, with_it = capsys.readouterr().out.splitlines()
    assert without.rstrip().endswith("tokens")
    assert "|██████······▒▒▒▒▒▒▒▒▒▒▒▒| 25 B of 50 B" in with_it


@given(st.integers(0, 400), st.integers(0, 400), st.integers(1, 200))
def test_a_memory_bar_has_one_width_whatever_the_figures(used: int, limit: int, budget: int) -> None:
    assert len(console.memory_bar(used, limit, budget)) == console.BAR + 2
