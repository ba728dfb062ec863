"""The rules that choose a replay: the first that applies decides."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.engine.recovery.replay import Facts, Mode, choose_replay

# Every rule applies, except the rules for gradients that were set aside.
WORST = Facts(
    start=4,
    stop=8,
    edited=True,
    unknown="(3,)",
    unwatched=True,
    streams_lost=True,
    in_step=True,
    before_backward=True,
    synchronous=False,
    earlier_committed=True,
    bound=True,
    isolated=False,
    commits=3,
    had_gradient=False,
    edited_earlier=False,
)

# Each change switches the rule above it off, and leaves the rules that follow on.
ROWS: list[tuple[dict[str, Any], Mode, str]] = [
    ({}, Mode.REFUSED, "samples 4:8 were changed in place by loss_fn"),
    ({"edited": False}, Mode.REFUSED, "a leaf of shape (3,) outside the model appeared"),
    ({"unknown": None}, Mode.STEP, "random numbers were drawn from streams that were not read"),
    ({"streams_lost": False}, Mode.STEP, "can belong to an earlier operation"),
    ({"earlier_committed": False}, Mode.STEP, "smaller pieces would not be those"),
    ({"bound": False}, Mode.STEP, "all ranks start the batch over together"),
    ({"in_step": False}, Mode.PIECE, ""),
    ({"before_backward": False}, Mode.STEP, "the error can be asynchronous"),
    ({"synchronous": True}, Mode.STEP, "a function written in Python came into the graph"),
    ({"unwatched": False}, Mode.STEP, "the piece had partly committed"),
    ({"isolated": True}, Mode.ISOLATED, ""),
    ({"isolated": False, "commits": 0}, Mode.PIECE, ""),
]


def chain() -> list[tuple[Facts, Mode, str]]:
    found, facts = [], WORST
    for changes, mode, words in ROWS:
        facts = replace(facts, **changes)
        found.append((facts, mode, words))
    return found


def with_obstacle(facts: Facts, name: str) -> Facts:
    changes: dict[str, Any] = {name: True}
    return replace(facts, **changes)


@pytest.mark.parametrize(("facts", "mode", "words"), chain())
def test_the_first_rule_that_applies_decides(facts: Facts, mode: Mode, words: str) -> None:
    replay = choose_replay(facts)
    assert replay.mode is mode
    assert words in replay.reason


@pytest.mark.parametrize(
    ("obstacle", "told"), [("had_gradient", "zero_grad()"), ("edited_earlier", "work on a copy")]
)
@pytest.mark.parametrize(("facts", "mode", "words"), chain())
def test_a_restart_that_is_not_exact_is_refused(
    facts: Facts, mode: Mode, words: str, obstacle: str, told: str
) -> None:
    replay = choose_replay(with_obstacle(facts, obstacle))
    assert replay.mode is (Mode.REFUSED if mode is Mode.STEP else mode)
    assert words in replay.reason
    assert (told in replay.reason) or mode is not Mode.STEP


@given(st.builds(Facts))
def test_a_piece_runs_again_by_itself_only_where_it_has_left_nothing(facts: Facts) -> None:
    replay = choose_replay(facts)
    if replay.mode is Mode.PIECE and not facts.before_backward:
        assert facts.commits == 0
        assert facts.synchronous
    if replay.mode is Mode.STEP:
        assert not facts.had_gradient
        assert not facts.edited_earlier
    assert bool(replay.reason) == (replay.mode in {Mode.STEP, Mode.REFUSED})
