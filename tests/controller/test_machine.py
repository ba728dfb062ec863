"""Invariants of the controller, whatever happens to it in whatever order."""

import json
import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastic_mbs.controller.controller import Controller, Policy
from tests.helpers.device_sim import Device, Job, Ran

TOTAL = 10_000


class ControllerMachine(RuleBasedStateMachine):
    """One job on a device whose memory, readings and neighbours the rules change.

    `Job.call` checks every size as it is handed out.
    """

    @initialize(
        start=st.one_of(st.none(), st.integers(1, 64)),
        minimum=st.integers(1, 4),
        maximum=st.one_of(st.none(), st.integers(16, 48)),
        align=st.sampled_from([1, 1, 2, 4]),
        grow=st.booleans(),
        measured=st.booleans(),
        base=st.integers(0, 4000),
        slopes=st.lists(st.integers(5, 400), min_size=1, max_size=2),
        jitter=st.sampled_from([0.0, 0.25]),
        seed=st.integers(0, 2**16),
    )
    def prepare(
        self,
        start: int | None,
        minimum: int,
        maximum: int | None,
        align: int,
        grow: bool,
        measured: bool,
        base: int,
        slopes: list[int],
        jitter: float,
        seed: int,
    ) -> None:
        policy = Policy(minimum, maximum, align, grow, jitter=jitter)
        self.limits = policy.limits
        if start is not None:
            start = self.limits.clamp(start)
        self.held = 0
        self.device = Device(TOTAL, others=lambda _: self.held)
        self.job = Job(
            self.device,
            lambda x: max(base + slopes[0] * x, slopes[-1] * x),
            start=start,
            policy=policy,
            seed=seed,
            measured=measured,
        )
        self.disturbed()
        self.lowest: dict[tuple[str, str, int], int] = {}  # of each track, under grow=False

    def disturbed(self) -> None:
        """Start the counts of steady memory anew: memory, readings or batches have changed."""
        self.settled = False
        self.failures_since = 0
        self.moves_after_failure = 0
        self.batch: tuple[int, int] | None = None

    def check(self, ran: Ran, samples: int) -> None:
        covered = [i for a, b in ran.pieces for i in range(a, b)]
        assert covered == list(range(len(covered)))
        assert ran.floor or len(covered) == samples
        assert (
            ran.ooms <= math.floor(math.log2(max(1, ran.size))) + math.floor(math.log2(samples)) + 1
        )
        if ran.move:
            assert ran.move.after != ran.move.before
            assert ran.move.reason != "grow" or self.job.policy.grow
            # The double of what really ran: where the minimum wins, a piece is longer than the
            # size, but shorter than twice the minimum. Or a size that has run before.
            before = max(earlier.size for earlier in self.job.history)
            assert ran.move.reason != "grow" or ran.move.after <= max(
                2 * ran.move.before, 4 * self.limits.floor, before
            )
            assert ran.move.after % self.limits.align == 0
            assert ran.move.after <= (self.limits.maximum or math.inf)
            assert ran.move.reason != "grow" or self.job.sensed, "growth without a reading"

    @rule(
        samples=st.integers(1, 64),
        elements=st.sampled_from([1, 1, 2, 3]),
        name=st.sampled_from(["a", "a", "b"]),
        retries=st.sampled_from([0, 0, 0, 2]),
    )
    def any_call(self, samples: int, elements: int, name: str, retries: int) -> None:
        self.disturbed()
        self.check(self.job.call(samples, elements, name=name, retries=retries), samples)

    @rule(samples=st.sampled_from([16, 64]), calls=st.integers(1, 30))
    def steady_calls(self, samples: int, calls: int) -> None:
        """Repeat one batch: only here does the bound on failures count.

        It also counts across rules that change nothing.
        """
        if self.batch != (samples, 1):
            self.disturbed()
            self.batch = (samples, 1)
        for _ in range(calls):
            ran = self.job.call(samples, 1, name="steady")
            self.check(ran, samples)
            if ran.floor:
                self.settled = False
                return
            if self.settled:
                self.moves_after_failure += bool(self.failures_since and ran.move)
                self.failures_since += ran.ooms
            elif not ran.ooms:
                self.settled = True

    @rule(held=st.integers(0, 8000))
    def neighbour_allocates(self, held: int) -> None:
        self.held = held
        self.disturbed()

    @rule(pieces=st.integers(1, 3), samples=st.integers(1, 64))
    def call_ends_by_an_exception(self, pieces: int, samples: int) -> None:
        self.disturbed()
        self.job.call(samples, name="a", stop_after=pieces)

    @rule()
    def sensor_lost(self) -> None:
        self.job.sensed = False
        self.disturbed()

    @rule()
    def sensor_back(self) -> None:
        self.job.sensed = True
        self.job.forget_reading()
        self.disturbed()

    @rule(seconds=st.floats(0.1, 1000))
    def tick(self, seconds: float) -> None:
        """Let time pass, which changes nothing in steady memory."""
        self.device.clock.now += seconds

    @rule()
    def save_and_load(self) -> None:
        before = self.job.controller
        text = json.dumps(before.state_dict())
        self.job.controller = self.job.fresh()
        self.job.controller.load_state_dict(json.loads(text))
        after: Controller = self.job.controller
        once = json.dumps(after.state_dict())
        after.load_state_dict(json.loads(once))
        assert json.dumps(after.state_dict()) == once
        sizes = [row["size"] for row in json.loads(text)["tracks"]]
        assert sizes == [row["size"] for row in json.loads(once)["tracks"]]

    @invariant()
    def one_failure_and_then_no_move(self) -> None:
        if hasattr(self, "job"):
            assert self.failures_since <= 1
            assert self.moves_after_failure == 0

    @invariant()
    def without_growth_no_size_rises(self) -> None:
        if not hasattr(self, "job") or self.job.policy.grow:
            return
        tracks: Any = self.job.controller.state_dict()["tracks"]
        for row in tracks:
            key = row["name"], row["mode"], row["shape"]
            assert row["size"] <= self.lowest.get(key, row["size"])
            self.lowest[key] = row["size"]


ControllerMachine.TestCase.settings = settings(
    deadline=None, max_examples=200, stateful_step_count=25
)
TestController = ControllerMachine.TestCase


def test_without_growth_an_unexplained_failure_lowers_the_size_for_good() -> None:
    machine = ControllerMachine()
    machine.prepare(
        seed=8,
        start=None,
        minimum=1,
        maximum=None,
        align=1,
        measured=False,
        slopes=[398],
        grow=False,
        base=3627,
        jitter=0.25,
    )
    for held in (0, 155):
        machine.neighbour_allocates(held=held)
        machine.steady_calls(samples=64, calls=30)
        machine.without_growth_no_size_rises()
    assert machine.job.history[-1].size < machine.job.history[29].size
