"""Scenarios: each a script, options of the training under it, and checks of its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from elastic_mbs import Policy

from ..limits import ON_GPU
from . import checks, scripts
from .checks import Check
from .scripts import Script, Supply, always

DEADLINE = 900.0  # seconds for a quick run: the built-in models

# Less patient than the default (4 calls, 100 times the loss): a scenario has a few dozen steps of a
# few milliseconds.
EAGER = Policy(patience=2, min_gain=0.0, cooldown=0.0)
_COOLING = Policy(patience=2, min_gain=0.0, cooldown=10.0)
_PATIENT = Policy(min_gain=0.0)

_COUNTED_AND_GPU = ("budget", *ON_GPU)
_FRAGMENTING = ("shim", *_COUNTED_AND_GPU)
_ALL = ("rlimit", *_FRAGMENTING)
_FALLS = (checks.bounded, checks.something_happened)


@dataclass(frozen=True)
class Scenario:
    """A way of running out of memory."""

    name: str  # name on the command line
    script: Script
    kinds: tuple[str, ...] = _COUNTED_AND_GPU  # kinds of limit that it runs under
    checks: tuple[Check, ...] = ()  # checks besides those made of every run
    steps: int = 36  # steps, unless the user says
    quick: int = 18  # steps in the bounded set
    model: str = "wide"  # model, unless the user says
    policy: Policy = EAGER
    killed: bool = False  # killed in the middle; another process resumes
    together: bool = False  # two processes at once
    evaluate: int = 0  # evaluates after every so many steps; 0 for never
    sensor_dies: bool = False  # the sensor dies in the steps of `scripts.dead`
    ends_by_error: bool = False
    wait: float = 5.0  # seconds that the runtime may wait for memory at the floor
    # Largest single allocation, as a share of the batch's need besides the model; None for no
    # limit.
    largest: float | None = None

    def all_checks(self, steps: int) -> tuple[Check, ...]:
        """Return all checks of a run of `steps` steps."""
        whole = () if self.ends_by_error else (partial(checks.went_on_to, steps=steps),)
        return (*whole, checks.exact, checks.covers_every_sample, checks.nothing_held, *self.checks)


@dataclass(frozen=True)
class Order:
    """A process of a scenario, as data that goes to it."""

    scenario: str
    kind: str  # kind of limit
    model: str  # model, as `--model` names it
    seed: int  # seed of model, batches, script and controller
    steps: int
    device: str = "cpu"
    # Bytes for a share of 1; None for the whole batch's need.
    budget: int | None = None
    process: int = 0  # number of the process; 1 for the second of two
    folder: str | None = None  # folder for checkpoints
    dies: int | None = None  # step in whose backward the process kills itself
    deadline: float = DEADLINE  # seconds after which its process counts as hung

    @property
    def entry(self) -> Scenario:
        return SCENARIOS[self.scenario]

    @property
    def own(self) -> bool:  # the model is the user's
        return ":" in self.model


LINES = {  # one line for each scenario
    "steady": "the batch fits, always: nothing may happen",
    "too_big": "the batch has never fitted: room for three tenths of it",
    "cliff": "a co-tenant takes half at once, in the middle of a backward, and leaves again",
    "sawtooth": "a neighbour leaks and is restarted, three times",
    "random_walk": "memory comes and goes at random, also in the middle of a step",
    "leak": "headroom shrinks a little with each step and never comes back",
    "long_sequences": "bursts of inputs four times as long",
    "fragmentation": "memory is free, but no large block of it can be had",
    "optimizer_first_step": "the optimizer's state does not fit at first: its step fails half-way",
    "eval_between": "evaluation between the steps, with sizes of its own, while a co-tenant comes "
    "and goes",
    "sensor_dies": "the memory sensor stops answering: no growth, training goes on; then it is "
    "back",
    "flapping": "memory that comes back for less than the patience: no storm of growths",
    "two_elastic": "two of us on one device, with room for six tenths of each",
    "one_sample_too_big": "not even one sample fits: a clear error, soon, and everything as it was",
    "kill": "SIGKILL in the middle of a backward; resumed from its checkpoint, the same curve",
}
_CATALOGUE = (
    Scenario("steady", always(Supply()), checks=(checks.nothing_happened,)),
    Scenario("too_big", always(Supply(0.3, 0.3)), _ALL, (checks.bounded, checks.cut_up)),
    Scenario("cliff", scripts.cliff, _ALL, (*_FALLS, checks.grown_back), model="gpt"),
    Scenario("sawtooth", scripts.sawtooth, _ALL, _FALLS),
    Scenario("random_walk", scripts.random_walk, _FRAGMENTING, _FALLS, model="cnn"),
    Scenario("leak", scripts.leak, ("rlimit", *_COUNTED_AND_GPU), _FALLS),
    Scenario(
        "long_sequences",
        always(Supply(1 / 3, 1 / 3)),
        checks=(checks.bounded,),
        steps=40,
        model="gpt_bursts",
    ),
    Scenario(
        "fragmentation",
        always(Supply(1.2, 1.2)),
        _FRAGMENTING,
        (checks.bounded_by_halvings, checks.broken_up),
        largest=0.1,
    ),
    # Not where the host is the device: the guard's copies would take the room that the scenario is
    # about.
    Scenario(
        "optimizer_first_step",
        always(Supply(optimizer=True)),
        checks=(checks.optimizer_struck,),
        steps=10,
        quick=6,
        model="adam",
    ),
    Scenario(
        "eval_between",
        scripts.comes_and_goes,
        checks=(checks.evaluated, checks.grown_back),
        evaluate=2,
    ),
    Scenario(
        "sensor_dies",
        scripts.blind_spot,
        checks=(checks.froze_while_blind, checks.grown_back),
        sensor_dies=True,
    ),
    Scenario(
        "flapping",
        scripts.flapping,
        _FRAGMENTING,
        (checks.calm,),
        steps=60,
        quick=36,
        policy=_PATIENT,
    ),
    Scenario(
        "two_elastic",
        always(Supply(0.6, 0.6)),
        ("shim", *ON_GPU),
        steps=40,
        quick=30,
        policy=_COOLING,
        together=True,
    ),
    Scenario(
        "one_sample_too_big",
        scripts.starving,
        checks=(checks.ended_at_the_floor,),
        steps=8,
        quick=6,
        ends_by_error=True,
        wait=0.5,
    ),
    Scenario(
        "kill", always(Supply(0.3, 0.3)), checks=(checks.resumed,), steps=16, quick=12, killed=True
    ),
)

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _CATALOGUE}
