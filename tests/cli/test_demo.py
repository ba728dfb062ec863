"""The demo survives, trains the same model, tells of it, and notices when something is wrong."""

import math
import random
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs import UsageError
from elastic_mbs.batch import schedule
from elastic_mbs.cli import command, demo
from elastic_mbs.cli.demo import compare, one_sample, run, tenant, text
from elastic_mbs.cli.demo.gpt import GPTConfig, make_model, token_loss
from elastic_mbs.cli.report import render

SMALL = GPTConfig(context=64, width=16, heads=2, layers=2)
QUICK = ["demo", "--steps", "8", "--batch", "16", "--device", "cpu"]
NO_PAGE = [*QUICK, "--no-page"]


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "CPU_MODEL", SMALL)
    monkeypatch.setattr(one_sample, "MODEL", replace(SMALL, context=1200, layers=4))


@pytest.fixture
def first_act(monkeypatch: pytest.MonkeyPatch) -> one_sample.LongDocument:
    """Leave the second act out: its outcome is known, and it is returned."""
    equal = one_sample.LongDocument(2, 1, [1.0], [1.0], 0.0, [], torch.float64)
    monkeypatch.setattr(demo, "run_long_document", lambda *given: equal)
    return equal


def test_it_survives_and_trains_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main([*NO_PAGE, "--budget", "3500000", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    for words in (
        "a co-tenant arrives",
        "it takes more",
        "it leaves",
        "out of memory in ",
        "trained the same model.",
        "one document         1200 tokens, which cannot be cut",
        "taken                logits, checkpoint (",
        "EQUAL within rounding: a document that does not fit trained the same model.",
    ):
        assert words in out
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("first_act")
def test_it_grows_back_when_the_co_tenant_has_left_and_its_page_shows_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "POLICY", replace(run.POLICY, cooldown=0.0))  # a run of two seconds
    out = tmp_path / "demo.html"
    assert command.main([*QUICK, "--steps", "24", "--out", str(out)]) == 0
    _, _, alone_again = capsys.readouterr().out.partition("it leaves")
    assert "(grow)" in alone_again
    assert str(out) in alone_again
    page = out.read_text(encoding="utf-8")
    for words in (
        "a co-tenant arrives",
        "it leaves",
        "(grow)",
        "EQUAL within rounding",
        "the same without limits",
        "time lost to replays",
    ):
        assert words in page
    assert "(grow)" in render(tmp_path / "demo.jsonl")


def forgotten_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "count_tokens", lambda key: None)


def one_token_left_out_of_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    true_next, calls = schedule.Schedule.next, iter(range(10**6))

    def next_piece(self: schedule.Schedule, size: int) -> schedule.Range | None:
        piece, total = true_next(self, size), self._counts.total
        assert isinstance(total, int)
        if piece is not None and piece.weights is not None and next(calls) == 10:
            piece.weights = {None: piece.weights[None] - 1 / total}
        return piece

    monkeypatch.setattr(schedule.Schedule, "next", next_piece)


@pytest.mark.parametrize("mistake", [forgotten_count, one_token_left_out_of_one_weight])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_mistake_is_noticed(
    dtype: str,
    mistake: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    first_act: one_sample.LongDocument,
) -> None:
    mistake(monkeypatch)
    assert command.main([*NO_PAGE, "--dtype", dtype]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_a_loss_or_a_weight_that_differs_is_no_equal_outcome(
    first_act: one_sample.LongDocument,
) -> None:
    outcome = SimpleNamespace(
        differences=[0.0, math.nan], weight=0.0, rounding=compare.ROUNDING[torch.float64]
    )
    assert not compare.Outcome.equal.fget(outcome)  # type: ignore[attr-defined]  # the property's own function
    assert first_act.equal
    for wrong in (replace(first_act, losses=[1 + 1e-11]), replace(first_act, losses=[math.nan])):
        assert not wrong.equal
    assert not replace(first_act, weight=math.nan).equal


@pytest.mark.usefixtures("first_act")
def test_a_run_that_never_ran_out_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*NO_PAGE, "--budget", "1GiB"]) == 1
    out = capsys.readouterr().out
    assert "NOTHING SHOWN" in out
    assert "0 survived (none)" in out


def test_a_file_or_a_folder_with_all_below_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    poem = tmp_path / "poem.txt"
    poem.write_bytes(b"abcdefgh" * 5 + b"\r\n \t\r\n" + b"tiny\n\n" + b"ABCDEFGH" * 5)
    (tmp_path / "below" / "two.md").write_text(
        "However little known the feelings or views of such a man may be on his first entering"
    )
    (tmp_path / "picture.bin").write_bytes(bytes(200))
    (tmp_path / ".hidden").write_text("x" * 200)
    assert set(text.read_documents(poem, count=8, longest=64, seed=1)) == {
        b"abcdefgh" * 5,
        b"ABCDEFGH" * 5,
    }
    found = text.read_documents(tmp_path, count=5, longest=100, seed=0)
    assert {document[:8] for document in found} == {b"abcdefgh", b"ABCDEFGH", b"However "}


def test_a_text_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short.txt").write_text("too short")
    for path, words in (
        (tmp_path, "no passage"),
        (tmp_path / "none.txt", r"none\.txt: No such file"),
    ):
        with pytest.raises(UsageError, match=words):
            text.read_documents(path, count=1, longest=64, seed=0)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match="--text PATH"):
        text.read_documents(None, count=1, longest=64, seed=0)


def test_a_seed_gives_the_same_batches_and_moves_no_random_stream() -> None:
    before, python = torch.random.get_rng_state(), random.getstate()

    def loader(seed: int) -> text.Loader:
        return text.Loader(text.read_documents(None, count=48, longest=257, seed=seed), 8, seed)

    one, same, other = loader(0), loader(0), loader(1)
    for mine, yours, different in zip(one, same, other, strict=True):
        assert torch.equal(mine["tokens"], yours["tokens"])
        assert not torch.equal(mine["tokens"], different["tokens"])
    lengths = {batch["tokens"].shape[1] for batch in one}
    assert len(lengths) > 1
    assert one.longest(1)["tokens"].shape[1] == max(lengths)
    make_model(SMALL, seed=3, dtype=torch.float64)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert random.getstate() == python


def test_labels_are_the_next_bytes_and_padding_does_not_change_the_loss() -> None:
    batch = text.collate([b"abcd", b"xy"])
    assert batch["tokens"].tolist() == [[97, 98, 99], [120, 0, 0]]
    assert batch["labels"].tolist() == [[98, 99, 100], [121, -100, -100]]
    model = make_model(SMALL, seed=0, dtype=torch.float64)
    alone, padded = (
        text.collate([b"some document"]),
        text.collate([b"some document", b"and one that is longer by far"]),
    )
    first = {key: tensor[:1] for key, tensor in padded.items()}
    assert torch.isclose(token_loss(alone, model), token_loss(first, model), rtol=1e-14)


@given(st.integers(4, 500), st.integers(3000, 10**9))
def test_the_script_is_in_order_and_leaves_room_for_one_document(steps: int, budget: int) -> None:
    floor = round(1.25 * budget / 3)
    moves = tenant.write_script(steps, budget, floor)
    assert [move.step for move in moves] == sorted({move.step for move in moves})
    assert 0 < moves[0].step < moves[-1].step < steps
    assert all(floor <= move.left <= budget for move in moves)
    assert moves[-1].left == budget


def test_on_cuda_the_co_tenant_is_a_memory_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[float | str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: done.append(fraction),
    )
    with tenant.limited(200, torch.device("cuda", 0)) as leave:
        leave(100)
    assert done == ["emptied", 0.2, "emptied", 0.1, "emptied", 1.0], (
        "what is cached would go on as before"
    )
