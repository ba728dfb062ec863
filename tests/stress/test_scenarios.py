"""The scenarios of the stress tool: scripts are pure, each assertion rejects a record that breaks it, and a few runs hold them all."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_mbs.cli.command import main
from stress.limits import BudgetLimit, available
from stress.models.builtin import BUILTIN
from stress.models.factory import find
from stress.record import Differences, End, Mark, Needs, Run, Step, document, read_json, write_json
from stress.scenarios import checks, weather
from stress.scenarios.catalogue import SCENARIOS
from stress.scenarios.meeting import Meeting
from stress.scenarios.order import Order
from stress.scenarios.perform import _two_on_cuda, judge, perform
from stress.scenarios.reference import relative, weight_difference
from stress.scenarios.session import run as run_here
from stress.scenarios.weather import Room, Weather
from tests.helpers import jobs

NEEDS = Needs(samples=32, rest=1000, sizes=[1, 8, 16, 32], peaks=[1100, 1800, 2600, 4200], optimizer=3000, held=2000)
SAME = Differences(loss=1e-15, norm=1e-15, weight=1e-14, tolerance_loss=1e-12, tolerance_weight=1e-9, whole_loss=1e-15, whole_weight=1e-14)


def halves(size: int, samples: int = 32) -> list[list[int]]:
    return [[start, min(samples, start + size)] for start in range(0, samples, size)]


def step(number: int, **changes: Any) -> Step:
    usual: dict[str, Any] = {
        "at": 0.1 * number,
        "seconds": 0.1,
        "capacity": 5000,
        "others": 0,
        "live": 1000,
        "peak": 4200,
        "samples": 32,
        "elements": 9,
        "size": 32,
        "partition": [[0, 32]],
        "ooms": 0,
        "replayed": 0,
        "loss": 1.0,
        "norm": 1.0,
        "time_lost": 0.0,
    }
    return Step(number, **(usual | changes))


def record(steps: list[Step] | None = None, **changes: Any) -> Run:
    steps = [step(i) for i in range(8)] if steps is None else steps
    run = Run("made_up", "budget", "wide", "float64", 0, NEEDS, steps, [], End(1000, 1000, 0), SAME)
    return replace(run, **changes)


def oom(at: int, size: int = 32) -> Mark:
    return Mark(0.1 * at, at, "oom", "out of memory", size, size // 2)


def grow(at: int) -> Mark:
    return Mark(0.1 * at, at, "grow", "micro-batch 16 → 32", 16, 32)


# ---------------------------------------------------------------------- scripts


@pytest.mark.parametrize("name", list(SCENARIOS))
@pytest.mark.parametrize("steps", [6, 18, 36, 200])
def test_a_script_is_a_pure_function_of_the_step(name: str, steps: int) -> None:
    script, room = SCENARIOS[name].script, Room(NEEDS, 32)
    found = [script(i, steps, 3) for i in range(steps)]
    assert found == [script(i, steps, 3) for i in range(steps)]
    for each in found:
        assert 0 < each.left <= each.capacity
        assert room.capacity(each) - room.others(each) >= (0 if each.starved else NEEDS.one)


def test_a_random_walk_is_another_one_with_another_seed() -> None:
    assert [weather.random_walk(i, 30, 1) for i in range(30)] != [weather.random_walk(i, 30, 2) for i in range(30)]


@pytest.mark.parametrize("steps", [18, 36])
def test_scripts_take_memory_and_give_it_back(steps: int) -> None:
    cliff = [weather.cliff(i, steps, 0).left for i in range(steps)]
    assert (cliff[0], min(cliff), cliff[-1]) == (1.0, 0.5, 1.0)
    leak = [weather.leak(i, steps, 0).left for i in range(steps)]
    assert leak == sorted(leak, reverse=True)
    assert leak[-1] == 0.125
    teeth = [weather.sawtooth(i, steps, 0).left for i in range(steps)]
    assert sum(b > a for a, b in itertools.pairwise(teeth)) == 2
    flaps = [weather.flapping(i, steps, 0).left == 1 for i in range(steps)]
    assert sum(flaps) == steps // weather.FLAP * weather.STAY


def test_memory_returns_while_the_sensor_is_dead() -> None:
    dead = [i for i in range(18) if weather.dead(i, 18)]
    assert weather.blind_spot(dead[0], 18, 0).left < 1
    assert weather.blind_spot(dead[-1], 18, 0).left == 1


def test_a_share_is_room_for_that_part_of_the_batch_with_the_margin() -> None:
    room = Room(NEEDS, 32)
    assert room.of(1.0) == round(4200 / (1 - weather.MARGIN))
    assert room.of(0.0) == room.of(1 / 32), "never less than the smallest micro-batch"
    assert room.others(Weather(0.5)) == room.of(1.0) - room.of(0.5)
    assert NEEDS.one > room.capacity(Weather(starved=True)) > NEEDS.rest
    assert NEEDS.optimizer > room.capacity(Weather(optimizer=True)) > NEEDS.held
    assert Room(NEEDS, 8).of(1.0) == room.of(0.25), "with a budget a share is of what fits into it"
    assert Room(NEEDS, 32, copies=2).of(1.0) == 2 * room.of(1.0)


def test_needs_are_a_line_between_measured_sizes() -> None:
    assert [NEEDS.at(size) for size in (1, 8, 12, 32)] == [1100, 1800, 2200, 4200]
    assert NEEDS.at(64) == 7400
    assert [NEEDS.fits(size) for size in (1099, 1100, 2200, 9000)] == [0, 1, 12, 32]
    single = Needs(4, 100, [4], [300])
    assert (single.at(2), single.at(8)) == (200, 500)


# ---------------------------------------------------------------------- assertions


def test_a_good_record_has_no_complaints() -> None:
    run = record()
    for check in (checks.went_on_to(8), checks.exact, checks.covers_every_sample, checks.nothing_held, checks.nothing_happened, checks.bounded):
        assert check(run) == []
    assert checks.grown_back(run) == []


@pytest.mark.parametrize("field", ["loss", "norm", "weight", "outputs", "whole_loss", "whole_weight"])
@pytest.mark.parametrize("value", [1e-6, math.inf, math.nan])
def test_a_difference_is_a_complaint(field: str, value: float) -> None:
    (complaint,) = checks.exact(record(differences=replace(SAME, **{field: value})))
    assert "differs by" in complaint
    assert "float64" in complaint


def test_a_run_that_was_not_compared_is_a_complaint() -> None:
    assert checks.exact(record(differences=None))


@pytest.mark.parametrize(
    "changes",
    [{"end": None}, {"end": End(1000, 1000, 0, "ValueError: no")}, {"steps": [step(0)]}, {"steps": [step(i) for i in (0, 1, 2, 3, 4, 5, 7, 6)]}],
    ids=["no end", "error", "too few", "order"],
)
def test_steps_that_were_not_made_are_a_complaint(changes: dict[str, Any]) -> None:
    assert len(checks.went_on_to(8)(record(**changes))) == 1


@pytest.mark.parametrize("pieces", [[[0, 16], [8, 32]], [[0, 33]]], ids=["overlap", "too long"])
def test_a_sample_that_ran_twice_is_a_complaint(pieces: list[list[int]]) -> None:
    assert len(checks.covers_every_sample(record(steps=[step(0, partition=pieces)]))) == 1


@pytest.mark.parametrize(
    "pieces", [[[0, 8], [16, 32]], [[8, 32]], [[0, 24]], [], [[0, 16], [16, 16], [16, 31]]], ids=["inside", "first", "last", "all", "last one"]
)
def test_a_sample_that_never_ran_is_a_complaint(pieces: list[list[int]]) -> None:
    assert len(checks.covers_every_sample(record(steps=[step(0, partition=pieces)]))) == 1


def test_samples_in_which_nothing_counts_may_be_left_out_when_the_record_says_so() -> None:
    left_out = step(0, partition=[[0, 8], [16, 32]], skipped=[[8, 16]])
    assert checks.covers_every_sample(record(steps=[left_out])) == []
    assert Step.from_json(left_out.to_json()) == left_out
    twice = step(0, partition=[[0, 16], [16, 32]], skipped=[[8, 16]])
    assert len(checks.covers_every_sample(record(steps=[twice]))) == 1


@pytest.mark.parametrize("field", ["loss", "norm", "weight", "outputs", "whole_loss", "whole_weight"])
def test_the_largest_difference_is_not_a_number_wherever_one_is_none(field: str) -> None:
    assert math.isnan(replace(SAME, **{field: math.nan}).largest), "max() passes over a NaN that is not its first value"


def test_memory_held_at_the_end_is_a_complaint() -> None:
    held = record(end=End(1256, 1000, 0))
    assert "256 B" in checks.nothing_held(held)[0]
    assert checks.nothing_held(replace(held, kind="rlimit")) == [], "a process limit counts the interpreter's memory"
    assert checks.nothing_held(record(end=None)) == []


def test_anything_at_all_is_a_complaint_where_nothing_may_happen() -> None:
    assert len(checks.nothing_happened(record(marks=[grow(0), oom(3)]))) == 1
    assert len(checks.nothing_happened(record(steps=[step(0, partition=halves(16))]))) == 1


def test_a_run_in_which_nothing_failed_shows_nothing() -> None:
    assert checks.something_happened(record())
    assert not checks.something_happened(record(steps=[step(0, ooms=1)]))


def test_more_failures_than_memory_explains_are_a_complaint() -> None:
    assert checks.bounded(record(marks=[oom(0), oom(4)])) == []
    assert len(checks.bounded(record(marks=[oom(0), oom(4), oom(5)]))) == 1


def test_a_fall_explains_its_halvings_and_one_more() -> None:
    # from 32 to the 8 that fit into 1,800 bytes: two halvings, one size in between; two at the start, one for the return
    steps = [step(i, others=3200 if 2 <= i < 5 else 0) for i in range(8)]
    assert checks.allowed_ooms(record(steps=steps)) == 2 + 3 + 1
    falling = [step(i, others=400 * i, size=32 // 2**i, partition=halves(32 // 2**i)) for i in range(4)]
    assert checks.allowed_ooms(record(steps=falling)) == 2 + 2, "one long fall, not many"
    assert checks.allowed_ooms(record(steps=[step(0), step(1, lowest=1800)])) == 2 + 3
    assert checks.allowed_ooms(record(steps=[step(0), step(1, elements=64)])) == 4, "each shape class learns for itself"
    assert checks.allowed_ooms(record(kind="cuda")) == 2 * 2 + 3


def test_what_nobody_could_foresee_is_no_complaint() -> None:
    """Large batches took another algorithm of the convolution's, which needs less; and steps took a little more than their pieces by hand."""
    small = step(0, size=16, partition=halves(16), peak=2600)
    dips = replace(NEEDS, peaks=[1100, 1800, 2600, 2600])
    assert dips.foreseen().peaks == [1100, 1800, 2600, 4200]
    assert NEEDS.foreseen() == NEEDS
    assert checks.grown_back(record(steps=[replace(small, capacity=4000)], needs=dips)) == []
    assert checks.grown_back(record(steps=[replace(small, peak=3600)])) == []


def test_staying_small_where_memory_is_back_is_a_complaint() -> None:
    small = step(0, size=16, partition=halves(16), peak=2600)
    assert "2 pieces" in checks.grown_back(record(steps=[small]))[0]
    assert "2 pieces" in checks.grown_back(record(steps=[step(0, size=16, partition=halves(16), ooms=1), small]))[0]
    assert checks.grown_back(record(steps=[step(0, capacity=2900, size=16, partition=halves(16))])) == []
    assert checks.grown_back(record(steps=[step(0, capacity=None)])) == []
    assert checks.grown_back(record(steps=[])) == []


@pytest.mark.parametrize(
    ("end", "complaints"),
    [
        (End(1000, 1000, 3, "MicroBatchFloorError: no", True, 1.0), 0),
        (None, 1),
        (End(1000, 1000, 0), 1),
        (End(1000, 1000, 0, "RuntimeError: no", True, 1.0), 1),
        (End(1000, 1000, 0, "MicroBatchFloorError: no", False, 1.0), 1),
        (End(1000, 1000, 0, "MicroBatchFloorError: no", True, 99.0), 1),
    ],
    ids=["good", "no end", "no error", "another error", "not restored", "late"],
)
def test_the_floor_error_comes_soon_and_leaves_all_as_it_was(end: End | None, complaints: int) -> None:
    assert len(checks.ended_at_the_floor(10.0)(record(end=end))) == complaints


def test_growth_without_a_sensor_is_a_complaint() -> None:
    def dead(at: int, steps: int) -> bool:
        return 2 <= at < 5

    lost, back = Mark(0.2, 2, "sensor_lost", ""), Mark(0.5, 5, "sensor_back", "")
    check = checks.froze_while_blind(dead)
    assert check(record(marks=[lost, back, grow(6)])) == []
    assert len(check(record(marks=[lost, grow(3), back, grow(6)]))) == 1
    assert len(check(record(marks=[lost, back]))) == 1
    assert len(check(record(marks=[lost, grow(6)]))) == 1


def test_a_storm_of_failed_growths_is_a_complaint() -> None:
    check = checks.calm(1.0)
    assert check(record(marks=[oom(i) for i in range(4)])) == []
    assert "8 out-of-memory errors" in check(record(marks=[oom(i) for i in range(8)]))[0]
    assert check(record(steps=[])) == []


def test_an_optimizer_that_had_room_shows_nothing() -> None:
    assert checks.optimizer_struck(record(marks=[Mark(0.0, 0, "optimizer", "")])) == []
    assert len(checks.optimizer_struck(record())) == 1
    assert len(checks.optimizer_struck(record(steps=[]))) == 1


def test_no_evaluation_is_a_complaint() -> None:
    assert len(checks.evaluated(record())) == 1


def test_learning_the_size_again_after_a_kill_is_a_complaint() -> None:
    killed, back = Mark(0.4, 5, "killed", ""), Mark(0.4, 4, "resumed", "")
    assert checks.resumed(record(marks=[killed, back])) == []
    assert len(checks.resumed(record())) == 1
    assert len(checks.resumed(record(marks=[killed, Mark(0.0, 0, "resumed", "")]))) == 1
    again = [step(i) if i < 4 else step(i, size=8, partition=halves(8)) for i in range(8)]
    assert checks.resumed(record(marks=[killed, back], steps=[step(i) for i in range(4)] + [replace(s, partition=halves(2)) for s in again[4:]]))
    smaller = [step(i, partition=halves(8), size=8 if i < 4 else 4) for i in range(8)]
    assert checks.resumed(record(marks=[killed, back], steps=smaller))
    assert len(checks.resumed(record(marks=[killed, back, oom(5)]))) == 1


def test_a_process_that_is_pushed_out_is_a_complaint() -> None:
    two = [record(kind="shim"), record(kind="shim", process=1)]
    assert checks.fair(two) == []
    small = [step(i, partition=halves(2)) for i in range(8)]
    assert "below a third" in checks.fair([two[0], replace(two[1], steps=small)])[0]
    assert "never ran beside" in checks.fair([two[0], replace(two[1], began=100.0)])[0]


# ---------------------------------------------------------------------- the record


def test_a_record_survives_json(tmp_path: Path) -> None:
    run = record(marks=[oom(1)], differences=replace(SAME, loss=math.inf, norm=math.nan))
    write_json([run], 0, tmp_path / "found.json")
    (back,) = read_json(tmp_path / "found.json")
    assert back.differences is not None
    assert math.isnan(back.differences.norm)
    assert replace(back, differences=None) == replace(run, differences=None)
    plain = document([run], 0)
    assert plain["schema"] == "elastic-mbs/stress/1"
    assert plain["runs"][0]["totals"]["largest_difference"] == "Infinity" or plain["runs"][0]["totals"]["largest_difference"] == "NaN"
    (tmp_path / "other.json").write_text(json.dumps({"schema": "mine"}))
    with pytest.raises(ValueError, match="no record of the stress tool"):
        read_json(tmp_path / "other.json")


# ---------------------------------------------------------------------- a few real runs


@pytest.mark.parametrize("name", ["steady", "too_big", "sawtooth", "leak", "fragmentation", "eval_between", "sensor_dies", "one_sample_too_big"])
def test_a_scenario_holds_on_the_budget(name: str) -> None:
    scenario = SCENARIOS[name]
    order = Order(name, "budget", "wide", 0, scenario.quick)
    seen: list[Step] = []
    (run,) = perform(order, seen.append)
    assert run.complaints == []
    assert run.passed
    assert len(seen) == len(run.steps)


def test_the_bounded_set_fails_where_the_engine_loses_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_mbs.batch.schedule import Schedule

    push = Schedule.push

    def lose(self: Schedule, failed: Any) -> None:
        failed.stop -= 1
        push(self, failed)

    monkeypatch.setattr(Schedule, "push", lose)
    order = Order("sawtooth", "budget", "wide", 0, 12)
    (run,) = judge([run_here(order, BudgetLimit())], order)
    assert not run.passed
    assert any("differs by" in complaint for complaint in run.complaints)


@pytest.mark.parametrize("what", ["masks", "statistics"])
def test_a_scenario_fails_where_the_engine_does_not_put_back_what_a_failed_forward_has_moved(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_mbs.rollback.buffers import BufferCopies
    from elastic_mbs.rollback.random_streams import RandomStreams

    if what == "masks":
        monkeypatch.setattr(RandomStreams, "restore", lambda self, state: None)
    else:
        monkeypatch.setattr(BufferCopies, "restore", lambda self, *, to_call_start: None)
    (run,) = perform(Order("random_walk", "budget", "cnn", 0, 8), lambda step: None)
    assert not run.passed
    assert any("from training on the same pieces" in complaint for complaint in run.complaints)


def test_an_error_that_is_not_ours_is_a_complaint_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_mbs import ElasticMBS

    def broken(*args: Any, **kwargs: Any) -> None:
        raise TypeError("mine")

    monkeypatch.setattr(ElasticMBS, "optimizer_step", broken)
    (run,) = perform(Order("steady", "budget", "wide", 0, 6), lambda step: None)
    assert not run.passed
    assert "unexpected error: TypeError: mine" in run.complaints[0]


@pytest.mark.parametrize(("name", "kind"), [("kill", "budget"), ("cliff", "shim"), ("two_elastic", "shim"), ("too_big", "rlimit")])
def test_a_scenario_holds_in_processes_of_its_own(name: str, kind: str) -> None:
    if available(kind) is not None:
        pytest.skip(str(available(kind)))
    runs = perform(Order(name, kind, "wide", 0, 12), lambda step: None)
    assert [run.complaints for run in runs] == [[]] * len(runs)


class Device:
    """Stands for the GPU that two share, and notes what is left of it."""

    def __init__(self) -> None:
        self.left: list[int | None] = []

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: object) -> None:
        self.left.append(-1)

    def leave(self, size: int | None) -> None:
        self.left.append(size)


def test_two_on_a_gpu_begin_together_and_compare_when_both_have_trained() -> None:
    device: Any = Device()
    seen: list[Step] = []
    runs = _two_on_cuda(Order("two_elastic", "budget", "wide", 0, 8), seen.append, device)
    assert [run.complaints for run in runs] == [[], []]
    assert [run.process for run in runs] == [0, 1]
    assert all(run.differences is not None and run.differences.largest < 1e-9 for run in runs)
    assert [step.step for step in seen] == list(range(8))
    needs = runs[0].needs
    assert device.left == [Room(needs, needs.samples, copies=2).of(0.6), None, -1]
    assert max(run.began for run in runs) - min(run.began for run in runs) < 5.0, "neither had begun before both were there"


def test_two_on_a_gpu_of_whom_one_fails_are_one_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Device()
    monkeypatch.setattr("stress.scenarios.job.main", jobs.fail)
    (run,) = _two_on_cuda(Order("two_elastic", "budget", "wide", 0, 8), lambda step: None, device)
    assert "TypeError" in run.complaints[0]
    assert device.left == [-1]


def test_a_word_is_heard_by_all_who_wait_for_it_and_not_for_ever(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, timeout=0.05)
    with pytest.raises(TimeoutError, match="nobody said 'begin'"):
        meeting.wait("begin")
    meeting.say("begin")
    Meeting(tmp_path).wait("begin")


def test_broken_memory_need_not_hurt_where_segments_are_expandable() -> None:
    assert checks.broken_up(record(expandable=True)) == []
    assert len(checks.broken_up(record())) == 1
    assert checks.broken_up(record(steps=[step(0, ooms=1)])) == []


@pytest.mark.parametrize("name", list(BUILTIN))
def test_a_model_has_the_samples_of_the_small_one_in_the_size_of_a_gpu(name: str) -> None:
    small, large = BUILTIN[name](), find(name, "cuda")()
    assert large.name == small.name == name
    for number in (0, 6):
        mine, other = (next(iter(b.values())) if isinstance(b, dict) else b[0] for b in (small.batch(number), large.batch(number)))
        assert len(mine) == len(other)
    wide_leaves = [leaf for leaf in large.model.parameters() if leaf.nbytes >= 10 * 2**20]
    assert (len(wide_leaves) == 6) is (name == "adam"), "its state is to be large, that of the others is not"


@pytest.mark.parametrize("name", ["wide", "mlp", "cnn"])
def test_one_samples_activation_is_a_segment_of_its_own_on_a_gpu(name: str) -> None:
    subject = find(name, "cuda")()
    sizes: list[int] = []
    for module in subject.model.modules():
        module.register_forward_hook(lambda module, inputs, output: sizes.append(output.nbytes))
    x, y = subject.batch(0)
    with torch.no_grad():
        subject.loss_fn((x[:2], y[:2]))
    assert max(sizes) == 2 * 16 * 2**20


def test_a_curve_that_diverges_in_the_same_way_is_the_same_curve() -> None:
    nan, inf = float("nan"), float("inf")
    assert relative([1.0, inf, nan], [1.0, inf, nan]) == 0.0
    assert relative([1.0, nan], [1.0, 2.0]) == inf
    assert relative([1.0, 2.0], [1.0, nan]) == inf
    a, b = torch.tensor([1.0, nan, inf]), torch.tensor([1.0, nan, 2.0])
    assert weight_difference({"w": a}, {"w": a.clone()}) == 0.0
    assert weight_difference({"w": a}, {"w": b}) == inf
    assert weight_difference({"w": torch.tensor([2.0, nan])}, {"w": torch.tensor([1.0, nan])}) == 1.0


def test_a_batch_that_went_through_whole_is_no_proof_for_one_that_has_never_fitted() -> None:
    """Under the process limit a user's small model ran its whole batch at once, without a failure, and `too_big` said ok."""
    run = record([step(0, partition=[[0, 16], [16, 32]]), step(1)])
    (judged,) = judge([replace(run, scenario="too_big", model="mine.py:make")], Order("too_big", "rlimit", "mine.py:make", 0, 18))
    assert "the whole batch went through at once in step 1, so nothing was shown" in (judged.unshown, *judged.complaints)
    assert not judged.shown
    assert checks.cut_up(record([step(0, partition=[[0, 16], [16, 32]])])) == []


@pytest.mark.parametrize(
    ("complaint", "peaks", "excused"),
    [
        ("memory never ran out, so nothing was shown", [100, 200], True),
        ("there is room for the batch, but it still runs in 8 pieces at the end", [100, 105], True),
        ("there is room for the batch, but it still runs in 8 pieces at the end", [100, 200], False),
        ("unexpected error: TypeError: mine", [100, 105], False),
        ("unexpected error: OptimizerStepError: it does not fit", [100, 105], False),
    ],
)
def test_what_a_scenario_cannot_show_on_the_users_model_is_said_and_not_held_against_it(complaint: str, peaks: list[int], excused: bool) -> None:
    needs = Needs(samples=2, rest=50, sizes=[1, 2], peaks=peaks)
    same = Differences(loss=0.0, norm=0.0, weight=0.0, outputs=None, tolerance_loss=1e-5, tolerance_weight=1e-3)
    run = Run("cliff", "budget", "mine.py:make", "float32", 0, needs, differences=same, complaints=[complaint])
    (judged,) = judge([run], Order("cliff", "budget", "mine.py:make", 0, 6))
    assert judged.passed is excused
    assert bool(judged.unshown) is excused
    assert judged.complaints == ([] if excused else [complaint])


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("def make():\n    raise RuntimeError('no data')", "the factory does not run: RuntimeError: no data"),
        ("def make():\n    raise SystemExit(3)", "the factory does not run: SystemExit: 3"),
        ("def make(x):\n    return x", "the factory does not run: TypeError"),
        ("import torch\ndef make():\n    return torch.nn.Linear(2, 1), print, [torch.zeros(4, 2)], 0.1", "the fourth is float"),
        (
            "import torch\ndef make():\n    m = torch.nn.Linear(2, 1)\n    return m, lambda b: m(b).mean(), lambda step: [torch.zeros(4, 2)][step]",
            "there is no batch for step 1: IndexError",
        ),
    ],
)
def test_what_is_wrong_with_the_users_factory_is_one_line(body: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"model_{abs(hash(body))}.py"
    path.write_text(body)
    assert main(["stress", "--model", f"{path}:make", "--kind", "budget", "--scenario", "steady"]) == 2
    said = capsys.readouterr().err.strip()
    assert told in said
    assert "\n" not in said
