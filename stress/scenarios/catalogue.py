"""The scenarios: each a script, options of the training in it, and what is asserted of its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from elastic_mbs import Policy

from . import checks, weather
from .checks import Check
from .weather import Script

Play = Literal["train", "kill", "two"]

EAGER = Policy(patience=2, min_gain=0.0, cooldown=0.0)
"""Less patient than the default (4 calls, 5 s), because a scenario has a few dozen steps of a few milliseconds; and it does not depend on how fast
the machine is."""

PATIENT = Policy(patience=4, min_gain=0.0, cooldown=1.0)

FLOOR_SECONDS = 10.0

_ALL = ("budget", "cuda")


@dataclass(frozen=True)
class Scenario:
    """One of the ways in which memory runs out.

    Attributes:
        name: as on the command line.
        line: what happens, in one line.
        script: memory from step to step.
        kinds: kinds of limit that it runs under.
        checks: what is asserted beside what always is.
        steps: how many, unless the user says.
        quick: how many in the bounded set.
        model: what is trained, unless the user says.
        policy: how eager the controller is.
        play: "train" in one process, "kill" it in the middle and resume, "two" at once.
        evaluate: every so many steps; 0 for never.
        dead: whether the sensor is dead in a step (step, steps in all); None for never.
        ends_by: class of the error that must end it.
        wait: seconds that the runtime may wait for memory at the floor.
        largest: largest single allocation, as a share of what the batch takes beside the model; None for no limit.
    """

    name: str
    line: str
    script: Script
    kinds: tuple[str, ...] = _ALL
    checks: tuple[Check, ...] = ()
    steps: int = 36
    quick: int = 18
    model: str = "wide"
    policy: Policy = EAGER
    play: Play = "train"
    evaluate: int = 0
    dead: Callable[[int, int], bool] | None = None
    ends_by: str | None = None
    wait: float = 5.0
    largest: float | None = None

    def evaluates(self, step: int, steps: int) -> bool:
        """Whether there is an evaluation after this step; the last one has no batch to follow it."""
        return self.evaluate > 0 and step % self.evaluate == self.evaluate - 1 and step + 1 < steps

    def everything(self, steps: int) -> tuple[Check, ...]:
        """All that is asserted of a run of so many steps."""
        whole = (checks.went_on_to(steps),) if self.ends_by is None else ()
        return (*whole, checks.exact, checks.covers_every_sample, checks.nothing_held, *self.checks)


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("steady", "the batch fits, always: nothing may happen", weather.steady, checks=(checks.nothing_happened,)),
        Scenario(
            "too_big",
            "the batch has never fitted: room for three tenths of it",
            weather.too_big,
            ("budget", "shim", "rlimit", "cuda"),
            (checks.bounded, checks.cut_up),
        ),
        Scenario(
            "cliff",
            "a co-tenant takes half at once, in the middle of a backward, and leaves again",
            weather.cliff,
            ("budget", "shim", "rlimit", "cuda"),
            (checks.bounded, checks.something_happened, checks.grown_back),
            model="gpt",
        ),
        Scenario(
            "sawtooth",
            "a neighbour leaks and is restarted, three times",
            weather.sawtooth,
            ("budget", "shim", "rlimit", "cuda"),
            (checks.bounded, checks.something_happened),
        ),
        Scenario(
            "random_walk",
            "memory comes and goes at random, also in the middle of a step",
            weather.random_walk,
            ("budget", "shim", "cuda"),
            (checks.bounded, checks.something_happened),
            model="cnn",
        ),
        Scenario(
            "leak",
            "headroom shrinks a little with each step and never comes back",
            weather.leak,
            ("budget", "rlimit", "cuda"),
            (checks.bounded, checks.something_happened),
        ),
        Scenario(
            "long_sequences", "bursts of inputs four times as long", weather.long_sequences, checks=(checks.bounded,), model="gpt_bursts", steps=40
        ),
        Scenario(
            "fragmentation",
            "memory is free, but no large block of it can be had",
            weather.whole_but_broken,
            ("budget", "shim", "cuda"),
            (checks.bounded, checks.broken_up),
            largest=0.1,
        ),
        Scenario(
            "optimizer_first_step",
            "the optimizer's state does not fit at first: its step fails half-way",
            weather.narrow,
            ("budget", "cuda"),  # where the host is the device, the guard's copies take the room that the scenario is about
            (checks.optimizer_struck,),
            model="adam",
            steps=10,
            quick=6,
        ),
        Scenario(
            "eval_between",
            "evaluation between the steps, with sizes of its own, while a co-tenant comes and goes",
            weather.comes_and_goes,
            checks=(checks.evaluated, checks.grown_back),
            evaluate=2,
        ),
        Scenario(
            "sensor_dies",
            "the memory sensor stops answering: no growth, training goes on; then it is back",
            weather.blind_spot,
            checks=(checks.froze_while_blind(weather.dead), checks.grown_back),
            dead=weather.dead,
        ),
        Scenario(
            "flapping",
            "memory that comes back for less than the patience: no storm of growths",
            weather.flapping,
            ("budget", "shim", "cuda"),
            (checks.calm(PATIENT.cooldown),),
            policy=PATIENT,
            steps=60,
            quick=36,
        ),
        Scenario(
            "two_elastic",
            "two of us on one device, with room for six tenths of each",
            weather.shared,
            ("shim", "cuda"),
            play="two",
            steps=40,
            quick=30,
            policy=Policy(patience=2, min_gain=0.0, cooldown=0.5),
        ),
        Scenario(
            "one_sample_too_big",
            "not even one sample fits: a clear error, soon, and everything as it was",
            weather.starving,
            checks=(checks.ended_at_the_floor(FLOOR_SECONDS),),
            ends_by="MicroBatchFloorError",
            steps=8,
            quick=6,
            wait=0.5,
        ),
        Scenario(
            "kill",
            "SIGKILL in the middle of a backward; resumed from its checkpoint, the same curve",
            weather.too_big,
            checks=(checks.resumed,),
            play="kill",
            steps=16,
            quick=12,
        ),
    )
}
"""By name."""
