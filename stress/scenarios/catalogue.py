"""The scenarios: each a script, options of the training under it, and what is asserted of its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from elastic_mbs import Policy

from . import checks, scripts
from .checks import Check
from .scripts import Script, Supply, always

DEADLINE = 900.0
"""Seconds for what is quick: the built-in models."""

EAGER = Policy(patience=2, min_gain=0.0, cooldown=0.0)
"""Less patient than the default (4 calls, 5 s): a scenario has a few dozen steps of a few milliseconds. Does not depend on the machine's speed."""
PATIENT = Policy(patience=4, min_gain=0.0, cooldown=1.0)
FLOOR_SECONDS = 10.0

_COUNTED_AND_GPU = ("budget", "cuda")
_FRAGMENTING = ("budget", "shim", "cuda")
_ALL = ("budget", "shim", "rlimit", "cuda")
_FALLS = (checks.bounded, checks.something_happened)


class Play(Enum):
    """How many processes a scenario has."""

    TRAIN = "one"
    KILL = "one that is killed in the middle, and one that resumes"
    TWO = "two at once"


@dataclass(frozen=True)
class Scenario:
    """One of the ways in which memory runs out."""

    name: str  # as on the command line
    line: str  # what happens, in one line
    script: Script
    kinds: tuple[str, ...] = _COUNTED_AND_GPU  # of limit that it runs under
    checks: tuple[Check, ...] = ()  # what is asserted besides what always is
    steps: int = 36  # unless the user says
    quick: int = 18  # in the bounded set
    model: str = "wide"  # unless the user says
    policy: Policy = EAGER
    play: Play = Play.TRAIN
    evaluate: int = 0  # every so many steps; 0 for never
    dead: Callable[[int, int], bool] | None = None  # whether the sensor is dead in a step (step, steps in all)
    ends_by_error: bool = False
    wait: float = 5.0  # seconds that the runtime may wait for memory at the floor
    largest: float | None = None  # single allocation, as a share of what the batch takes besides the model; None for no limit

    def evaluates(self, step: int, steps: int) -> bool:
        """Whether there is an evaluation after this step; the last one has no batch to follow it."""
        return self.evaluate > 0 and step % self.evaluate == self.evaluate - 1 and step + 1 < steps

    def all_checks(self, steps: int) -> tuple[Check, ...]:
        """All that is asserted of a run of so many steps."""
        whole = () if self.ends_by_error else (checks.went_on_to(steps),)
        return (*whole, checks.exact, checks.covers_every_sample, checks.nothing_held, *self.checks)


@dataclass(frozen=True)
class Order:
    """One process of a scenario, as data that goes to it."""

    scenario: str
    kind: str  # of limit
    model: str  # as `--model` names it
    seed: int  # of model, batches, script and controller
    steps: int
    device: str = "cpu"
    budget: int | None = None  # bytes that stand for a share of 1; None for what the whole batch takes
    process: int = 0  # 1 for the second of two
    together: bool = False  # with another process on one device
    folder: str | None = None  # for checkpoints
    dies: int | None = None  # the step in whose backward the process kills itself
    deadline: float = DEADLINE  # seconds after which a process of it counts as hung

    @property
    def entry(self) -> Scenario:
        """The scenario itself."""
        return SCENARIOS[self.scenario]

    @property
    def own(self) -> bool:
        """Whether the model is the user's own."""
        return ":" in self.model


_CATALOGUE = (
    Scenario("steady", "the batch fits, always: nothing may happen", always(Supply()), checks=(checks.nothing_happened,)),
    Scenario("too_big", "the batch has never fitted: room for three tenths of it", always(Supply(0.3, 0.3)), _ALL, (checks.bounded, checks.cut_up)),
    Scenario(
        "cliff",
        "a co-tenant takes half at once, in the middle of a backward, and leaves again",
        scripts.cliff,
        _ALL,
        (*_FALLS, checks.grown_back),
        model="gpt",
    ),
    Scenario("sawtooth", "a neighbour leaks and is restarted, three times", scripts.sawtooth, _ALL, _FALLS),
    Scenario(
        "random_walk",
        "memory comes and goes at random, also in the middle of a step",
        scripts.random_walk,
        _FRAGMENTING,
        _FALLS,
        model="cnn",
    ),
    Scenario(
        "leak",
        "headroom shrinks a little with each step and never comes back",
        scripts.leak,
        ("budget", "rlimit", "cuda"),
        _FALLS,
    ),
    Scenario(
        "long_sequences",
        "bursts of inputs four times as long",
        always(Supply(1 / 3, 1 / 3)),
        checks=(checks.bounded,),
        model="gpt_bursts",
        steps=40,
    ),
    Scenario(
        "fragmentation",
        "memory is free, but no large block of it can be had",
        always(Supply(1.2, 1.2)),
        _FRAGMENTING,
        (checks.bounded, checks.broken_up),
        largest=0.1,
    ),
    Scenario(
        "optimizer_first_step",
        "the optimizer's state does not fit at first: its step fails half-way",
        always(Supply(optimizer=True)),
        _COUNTED_AND_GPU,  # where the host is the device, the guard's copies take the room that the scenario is about
        (checks.optimizer_struck,),
        model="adam",
        steps=10,
        quick=6,
    ),
    Scenario(
        "eval_between",
        "evaluation between the steps, with sizes of its own, while a co-tenant comes and goes",
        scripts.comes_and_goes,
        checks=(checks.evaluated, checks.grown_back),
        evaluate=2,
    ),
    Scenario(
        "sensor_dies",
        "the memory sensor stops answering: no growth, training goes on; then it is back",
        scripts.blind_spot,
        checks=(checks.froze_while_blind(scripts.dead), checks.grown_back),
        dead=scripts.dead,
    ),
    Scenario(
        "flapping",
        "memory that comes back for less than the patience: no storm of growths",
        scripts.flapping,
        _FRAGMENTING,
        (checks.calm(PATIENT.cooldown),),
        policy=PATIENT,
        steps=60,
        quick=36,
    ),
    Scenario(
        "two_elastic",
        "two of us on one device, with room for six tenths of each",
        always(Supply(0.6, 0.6)),
        ("shim", "cuda"),
        play=Play.TWO,
        steps=40,
        quick=30,
        policy=Policy(patience=2, min_gain=0.0, cooldown=0.5),
    ),
    Scenario(
        "one_sample_too_big",
        "not even one sample fits: a clear error, soon, and everything as it was",
        scripts.starving,
        checks=(checks.ended_at_the_floor(FLOOR_SECONDS),),
        ends_by_error=True,
        steps=8,
        quick=6,
        wait=0.5,
    ),
    Scenario(
        "kill",
        "SIGKILL in the middle of a backward; resumed from its checkpoint, the same curve",
        always(Supply(0.3, 0.3)),
        checks=(checks.resumed,),
        play=Play.KILL,
        steps=16,
        quick=12,
    ),
)

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _CATALOGUE}
