"""A random case as plain values.

The default of each field is the plainest there is, so that a case that fails can be made smaller
field by field.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from elastic_mbs.errors import UsageError

from .layers import LAYERS

PLACES = ("call", "eval", "optimizer")
ERRORS = ("device", "host", "heap", "library", "alien")
CONTAINERS = ("pair", "dict", "nested", "items", "record", "columns")
OPTIMIZERS = (
    "sgd",
    "momentum",
    "adam",
    "adamw",
    "adam foreach",
    "adam fused",
    "adagrad",
    "rmsprop",
    "nadam",
)
SPARSE = ("sgd", "adagrad")  # optimizers that take sparse gradients


@dataclass(frozen=True)
class Fault:
    """Operations that fail."""

    step: int = 0  # number of the step
    place: str = "call"  # in the "call", in the "eval" after it, or in the "optimizer"'s step
    at: float = 0.0  # place, as a fraction of the operations without a fault, about
    times: int = 1  # operations that fail; 0 is all from there on
    gap: int = 1  # operations from one failure to the next
    # Owner of the error: a device's allocator, the "host", Python's "heap", a "library". "alien" is
    # not a lack of memory, and passes through.
    error: str = "device"


@dataclass(frozen=True)
class Plan:
    """A case."""

    seed: int = 0  # seed of weights, batches and random streams
    layers: tuple[str, ...] = ()  # layers of the network, by name
    width: int = 4  # width of the layers
    branches: int = 0  # heads beside the layers
    # Input of indices: "no", "dense" or "sparse" by the gradient of their embedding.
    tokens: str = "no"
    samples: int = 4  # samples in a batch
    length: int = 2  # positions of a sample
    steps: int = 1
    container: str = "pair"  # container of a batch
    # Terms that the loss counts: "samples", "tokens", "weights" or, by name, "both".
    count: str = "samples"
    reduction: str = "mean"
    returns: str = "loss"  # return value of the loss function: "loss", "pair", "dict" or "object"
    size: int = 2  # micro-batch at the start; 0 is "auto"
    minimum: int = 1  # smallest micro-batch
    maximum: int = 0  # largest micro-batch; 0 for none
    align: int = 1  # unit of the sizes
    grow: bool = False
    door: int = 1  # 1 `backward`, 2 the decorator, 3 the loop
    replay: str = "auto"
    outputs: str = "cpu"
    half: bool = False  # parameters are bfloat16, summed in float32
    scaler: bool = False  # the loss is scaled
    # Gradients at the start: "none", "some", "all" or "flat" (views of one buffer).
    gradients: str = "none"
    keep: bool = False  # gradients of a step stay for the next
    optimizer: str = "sgd"
    guarded: bool = False  # steps by `mbs.optimizer_step`
    clip: bool = False  # gradients are clipped
    evaluate: bool = False  # an evaluation follows each step
    sensor: str = "none"  # "budget", "none", "fails", "high", "low" or "nonsense"
    # Memory of each step as a multiple of its whole batch's need; 0 for no limit.
    limits: tuple[float, ...] = ()
    # (number of a forward in the step, multiple): the limit moves in the middle of a call.
    moves: tuple[tuple[int, float], ...] = ()
    guests: str = "no"  # leaves outside the model: "no", "weight" or "prompt"
    tied: bool = False  # the head has the embedding's weight; never drawn
    edits: bool = False  # the loss function edits its batch in place
    backward: bool = False  # a backward of the trainer's own is used
    faults: tuple[Fault, ...] = ()  # failures that are injected
    device: str = "cpu"  # device of everything; never drawn

    @property
    def separable(self) -> bool:
        """The gradient of the batch does not depend on how it is split."""
        return not self.half and all(LAYERS[name].separable for name in self.layers)

    def changes(self) -> dict[str, Any]:
        """Return the differences from the plainest case, ready for JSON."""
        found = changed(self)
        return (
            found | {"faults": [changed(fault) for fault in self.faults]} if self.faults else found
        )

    def words(self) -> str:
        """Return the differences from the plainest case, for a person."""
        shown = {
            name: json.dumps(value, separators=(",", ":")).replace('"', "")
            for name, value in self.changes().items()
        }
        return ", ".join(f"{name} {value}" for name, value in shown.items()) or "the plainest case"


def changed(value: Plan | Fault) -> dict[str, Any]:
    """Return the fields that are not at their default."""
    return {
        each.name: getattr(value, each.name)
        for each in fields(value)
        if getattr(value, each.name) != each.default
    }


def smaller(plan: Plan) -> Iterator[Plan]:
    """Yield cases that are a little plainer than this one, the greatest steps first.

    One part after the other becomes that of the plainest case.
    """
    parts = {name: value for name, value in changed(plan).items() if name != "seed"}
    # Faults and limits come last in a plan, and matter most.
    changes: list[dict[str, Any]] = [{name: getattr(Plan(), name)} for name in reversed(parts)]
    for name, value in parts.items():
        changes += [
            {name: (*value[:i], *value[i + 1 :])}
            for i in range(len(value) if isinstance(value, tuple) else 0)
        ]
    changes += [
        {"samples": samples} for samples in (plan.samples // 2, plan.samples - 1) if samples > 0
    ]
    changes += [{"steps": plan.steps - 1}] if plan.steps > 1 else []
    for i, fault in enumerate(plan.faults):
        for name in changed(fault):
            plainer = replace(fault, **{name: getattr(Fault(), name)})
            changes.append({"faults": (*plan.faults[:i], plainer, *plan.faults[i + 1 :])})
    return (replace(plan, **change) for change in changes)


def read(text: str) -> Plan:
    """Return the plan that `json.dumps(plan.changes())` has written.

    Raises a UsageError where the text is no plan.
    """
    try:
        values = _typed(Plan(), json.loads(text))
        faults = tuple(Fault(**_typed(Fault(), fault)) for fault in values.pop("faults", ()))
        moves = tuple((int(at), float(to)) for at, to in values.pop("moves", ()))
        plan = Plan(**values, faults=faults, moves=moves)
        return replace(
            plan,
            layers=tuple(name for name in plan.layers if LAYERS[name]),
            limits=tuple(map(float, plan.limits)),
        )
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(
            f"--case {text}: this is no case, which is an object as JSON such as the tool prints: "
            f"{error}"
        ) from error


def _typed(plain: Plan | Fault, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in the types that they have in a plain case."""
    return {name: type(getattr(plain, name))(value) for name, value in given.items()}


def draw(seed: int) -> Plan:
    """Draw a random case from its seed."""
    rng = random.Random(seed)

    def maybe(chance: float) -> bool:
        return rng.random() < chance

    half = maybe(0.06)
    names = [name for name, layer in LAYERS.items() if layer.half or not half]
    layers = tuple(rng.choices(names, k=rng.choice((0, 1, 1, 2, 2, 3, 4))))
    isolate = maybe(0.15)
    batch_statistics = "batchnorm" in layers
    samples = min(40, 1 + int(rng.expovariate(1 / 8)))
    align = rng.choice((1, 1, 1, 1, 2, 3, 4))
    minimum = max(2 if batch_statistics else 1, rng.choice((1, 1, 1, 1, 2, 3)))
    floor = -(-minimum // align) * align
    maximum = 0 if maybe(0.8) else floor + align * rng.randrange(6)
    size = 0 if maybe(0.3) else max(floor, rng.randint(1, max(1, samples)))
    if maximum:
        size = min(size, maximum)
    steps = rng.choice((1, 1, 2, 2, 3, 4))
    length = rng.randint(2 if batch_statistics else 1, 4)
    own_backward = not half and maybe(0.05)
    plan = Plan(
        seed=rng.getrandbits(31),
        layers=layers,
        width=rng.choice((4, 4, 6, 8)),
        tokens=rng.choices(("no", "dense", "sparse"), (5, 3, 1 if not half else 0))[0],
        samples=samples,
        length=length,
        steps=steps,
        container=rng.choice(CONTAINERS),
        count=rng.choices(("samples", "tokens", "weights", "both"), (4, 4, 2, 2))[0],
        reduction="sum" if maybe(0.2) else "mean",
        returns=rng.choices(("loss", "pair", "dict", "object"), (5, 2, 1, 1))[0],
        size=size,
        minimum=minimum,
        maximum=maximum,
        align=align,
        grow=maybe(0.5),
        door=rng.choices((1, 2, 3), (3, 2, 3))[0],
        replay="isolate" if isolate else "auto",
        outputs=rng.choice(("cpu", "cpu", "device", "none")),
        half=half,
        scaler=not half and not own_backward and maybe(0.12),
        gradients=rng.choices(("none", "some", "all", "flat"), (6, 1, 1, 1))[0],
        keep=maybe(0.12),
        optimizer=rng.choice(OPTIMIZERS),
        guarded=maybe(0.7),
        clip=maybe(0.3),
        evaluate=maybe(0.3),
        sensor=rng.choices(
            ("budget", "none", "fails", "high", "low", "nonsense"), (4, 2, 1, 1, 1, 1)
        )[0],
        limits=()
        if maybe(0.5)
        else tuple(
            round(0.05 * 40 ** rng.random(), 3) if maybe(0.8) else 0.0 for _ in range(steps)
        ),
        guests=rng.choices(("no", "weight", "prompt"), (8, 1, 1))[0],
        edits=maybe(0.04),
        backward=own_backward,
        faults=()
        if maybe(0.25)
        else tuple(_fault(rng, steps) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))),
    )
    if plan.limits and maybe(0.4):
        moves = tuple(
            (rng.randint(1, 8), round(0.05 * 40 ** rng.random(), 3))
            for _ in range(rng.randint(1, 3))
        )
        plan = replace(plan, moves=moves)
    if plan.tokens == "sparse" and plan.optimizer not in SPARSE:
        plan = replace(plan, optimizer=rng.choice(SPARSE), clip=False)
    return _branched(plan, random.Random(f"{seed}:branches"))


def _branched(plan: Plan, rng: random.Random) -> Plan:
    """Give some cases branches, room to split, and late faults in a call after a clean one.

    Their pieces have partly committed when they fail.
    """
    if plan.half or rng.random() > 0.4:
        return plan
    steps = max(2, plan.steps)
    layers = plan.layers
    if rng.random() < 0.7:
        # The other layers are replayed from the start of the batch.
        layers = tuple(name for name in layers if LAYERS[name].separable)
    unit = -(-plan.minimum // plan.align) * plan.align
    late = (
        Fault(step, "call", round(rng.uniform(0.15, 0.75), 4), 1, 1) for step in range(1, steps)
    )
    plan = replace(
        plan,
        branches=rng.randint(1, 3),
        steps=steps,
        layers=layers,
        samples=max(plan.samples, 4 * unit),
        maximum=0,
    )
    plan = replace(
        plan,
        size=max(plan.size, 2 * unit),
        replay="auto",
    )
    return (
        replace(plan, limits=(), moves=(), faults=(*plan.faults[:1], *late))
        if rng.random() < 0.7
        else plan
    )


def _fault(rng: random.Random, steps: int) -> Fault:
    return Fault(
        step=rng.randrange(steps),
        place=rng.choices(PLACES, (8, 1, 2))[0],
        at=round(rng.random() * 1.1, 4),
        times=rng.choices((1, 2, 3, 6, 12, 0), (10, 4, 3, 2, 1, 2))[0],
        gap=rng.choice((1, 1, 2, 3, 5, 9, 17, 40)),
        error=rng.choices(ERRORS, (10, 4, 2, 2, 1))[0],
    )
