from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.optimizer.step_ways import BEST, LONGEST, StepWays


def tries_of_the_best(ways: StepWays, steps: int) -> list[int]:
    """The steps that begin with the best ways, where only (1, 2) works."""
    found = []
    for step in range(steps):
        began = ways.first("adam")
        if began == BEST:
            found.append(step)
        ways.worked("adam", began, (1, 2))
    return found


def test_the_best_ways_are_tried_again_at_longer_and_longer_intervals() -> None:
    tries = tries_of_the_best(StepWays(), 400)
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps[:7] == [2, 3, 5, 9, 17, 33, 65]
    assert set(gaps[6:]) == {LONGEST + 1}


def test_once_the_best_ways_work_the_others_are_forgotten() -> None:
    ways = StepWays()
    tries_of_the_best(ways, 100)
    while (began := ways.first("adam")) != BEST:
        ways.worked("adam", began, (1, 2))
    ways.worked("adam", BEST, BEST)
    assert [ways.first("adam") for _ in range(3)] == [BEST] * 3


def test_one_kind_of_step_says_nothing_of_another() -> None:
    ways = StepWays()
    tries_of_the_best(ways, 20)
    assert ways.first("sgd") == BEST


@given(st.lists(st.sampled_from([(0, 0), (0, 1), (1, 2), (2, 2)]), max_size=200))
def test_the_best_ways_are_never_out_of_reach_for_long(worked: list[tuple[int, int]]) -> None:
    ways, since = StepWays(), 0
    for found in worked:
        began = ways.first("adam")
        since = 0 if began == BEST else since + 1
        assert since <= LONGEST
        ways.worked("adam", began, found)
