"""The options of `ElasticMBS`: `Options` by name, groups of rarer ones, and `Settings` for all.

One group is elsewhere: how sizes are chosen, `elastic_mbs.controller.policy.Policy`.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from itertools import permutations
from typing import Any, Literal, TypedDict

import torch

from elastic_mbs.batch.cut import Dims
from elastic_mbs.batch.join import Fill, Pad, check_pad
from elastic_mbs.batch.lengths import Length, Trim
from elastic_mbs.batch.reader import Count
from elastic_mbs.controller.policy import Limits, Policy
from elastic_mbs.errors import ElasticMBSError, UsageError
from elastic_mbs.events import Sink
from elastic_mbs.memory import MemorySensor
from elastic_mbs.rollback.random_streams import check_generators

Reduction = Literal["mean", "sum"]

Pieces = Literal["in_order", "by_length"]

OutputPlace = Literal["auto", "cpu", "device"] | None


Rung = Literal["logits", "checkpoint", "tile", "offload"]

# of `RecoveryOptions.escalate`, from the one that takes the least time to the one with the most
RUNGS: tuple[Rung, ...] = ("logits", "checkpoint", "tile", "offload")


class _Group:
    """A group of options."""

    def __repr__(self) -> str:
        """Return the options that differ from their defaults."""
        given = [
            f"{item.name}={getattr(self, item.name)!r}"
            for item in fields(self)  # type: ignore[arg-type]  # each group is a dataclass
            if getattr(self, item.name) != item.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class GradientOptions(_Group):
    """Options of the gradients: how they are made and summed.

    Attributes:
        accumulate_dtype: type in which half-precision gradients are summed over the pieces;
            `torch.float32` keeps them exact to one rounding, for one extra copy of the gradients in
            that type.
        backward: a trainer's own `backward(loss)`, used in place of `loss.backward()`.
        noise_scale: calls over which the gradient noise scale is averaged, as
            `StepResult.noise_scale`; None leaves it out. It takes one extra copy of the gradients,
            a norm per piece, and a wait for the device per call. A call of one piece, or one that
            finds gradients, adds nothing.
        draws: "piece" draws random numbers (noise, dropout) as `loss_fn` asks for them, so they
            depend on the split. "sample" gives each sample numbers of its own, the same for every
            split. They are drawn row by row, so it is slow where samples are small; torch's numbers
            only, with the samples as the first dimension.
        verify: after the first call of each loss function that was split, its loss of a few samples
            is compared with the one put together from pieces, as `ElasticMBS.verify` does: "warn"
            (the default) tells what is wrong in a warning, "error" raises it, "off" leaves it out.
            Of `ElasticMBS.backward` and `elastic_step` only.
    """

    accumulate_dtype: torch.dtype | None = None
    backward: Callable[[torch.Tensor], object] | None = None
    noise_scale: int | None = None
    draws: Literal["piece", "sample"] = "piece"
    verify: Literal["warn", "error", "off"] = "warn"

    def __post_init__(self) -> None:
        _check_choice(self, "draws", "piece", "sample")
        if self.accumulate_dtype not in (None, torch.float32, torch.float64):
            raise UsageError(
                f"accumulate_dtype={self.accumulate_dtype!r} is not wider than half precision: "
                "use torch.float32, or None"
            )
        if self.noise_scale is not None and (
            type(self.noise_scale) is not int or self.noise_scale < 1
        ):
            raise UsageError(
                f"noise_scale={self.noise_scale!r} is no number of calls of at least 1: use 50, "
                "or None to leave it out"
            )
        _check_choice(self, "verify", "warn", "error", "off")
        _check_callables(self, "backward")


@dataclass(frozen=True, repr=False)
class RecoveryOptions(_Group):
    """Options of recovery from an out-of-memory error.

    Attributes:
        replay: "auto" starts the batch over after a piece that has failed in the middle of its
            backward. "isolate" keeps each piece's gradients apart until it has succeeded (one extra
            copy of the gradients), so that piece alone runs again. With "isolate" the pieces of
            both passes of `backward_embeddings` are the same, for an `embed_fn` whose samples
            depend on each other in ways that torch cannot show, such as MoE capacity.
        generators: random generators of the user's (torch, random, numpy) that a step draws from,
            to be rolled back too.
        is_oom: a predicate for errors that this package does not recognise as out-of-memory.
        escalate: measures that are taken, one after the other, when the smallest micro-batch does
            not fit, and taken back when there is more memory; "auto" takes all, in this order, and
            first the fastest one with which it fits, where `ElasticMBS.plan` has compared them.
            "logits" runs a linear head and the cross-entropy after it in chunks of rows, with their
            gradients made at once: for large vocabularies. "checkpoint" runs blocks of the
            model again in backward, a quarter of them more at each step: by its own
            `gradient_checkpointing_enable`, or the children of its longest `nn.ModuleList` or
            `nn.Sequential`. "tile" runs modules whose positions do not depend on each other, as the
            MLPs of a transformer, on a few positions at a time, each tile again in backward: for
            long samples. "offload" keeps the tensors that forward saves for backward on the host
            ("auto" leaves it out on a CPU without a `MemoryBudget`, where it gains nothing).
        on_fatal: called with the error, state already restored, before a call ends by a
            `RecoveryError`: the chance to save.
    """

    replay: Literal["auto", "isolate"] = "auto"
    generators: Sequence[Any] = ()
    is_oom: Callable[[BaseException], bool] | None = None
    escalate: tuple[Rung, ...] | Literal["auto"] = ()
    on_fatal: Callable[[ElasticMBSError], object] | None = None

    def __post_init__(self) -> None:
        _check_choice(self, "replay", "auto", "isolate")
        every = [rungs for n in range(len(RUNGS) + 1) for rungs in permutations(RUNGS, n)]
        if self.escalate not in ("auto", *every):
            raise UsageError(
                f'escalate={self.escalate!r} is neither "auto" nor a tuple of "logits", '
                f'"checkpoint", "tile" and "offload", each once at most: use {self._meant()}'
            )
        if (problem := check_generators(self.generators)) is not None:
            raise UsageError(problem)
        _check_callables(self, "is_oom", "on_fatal")

    def _meant(self) -> str:
        """Return what was probably meant by an `escalate` that is refused."""
        given: object = self.escalate
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, list | tuple) or not names:
            return '"auto"'
        unknown = any(name not in RUNGS for name in names)
        return '"auto"' if unknown else f"escalate={tuple(dict.fromkeys(names))!r}"

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """The rungs of `escalate`, in order."""
        return RUNGS if self.escalate == "auto" else self.escalate


@dataclass(frozen=True, repr=False)
class MemoryOptions(_Group):
    """Options of memory: where pieces go, how memory is read, how long a call waits for it.

    Attributes:
        device: where pieces are moved: "auto" is the model's device, None leaves them where they
            are.
        prefetch: on an accelerator the next piece of a batch in pinned memory
            (`DataLoader(pin_memory=True)`) is copied to the device while this one computes, for the
            memory of one more piece's input; pieces below 1 MiB are not. "pin" pins each piece of
            a batch that is not pinned; False loads each piece when its turn comes.
        sensor: a `MemorySensor` in place of the device's own; one that is also a `UsageMeter`
            replaces the device's meter, too.
        monitor_interval: seconds between memory readings, in a thread of its own; 0 reads in the
            step's thread.
        wait_for_memory: seconds that one call may wait for others to free memory, when the smallest
            micro-batch does not fit.
        host_guard: True keeps training on a CPU from being killed at the limit of its container (or
            of the machine): around each piece the process is held to what others leave, so that its
            allocator fails instead. Linux only; see `memory.HostGuard`. A size (`"64MiB"`) is its
            margin.
    """

    device: torch.device | str | None = "auto"
    prefetch: bool | Literal["pin"] = True
    sensor: MemorySensor | None = None
    monitor_interval: float = 1.0
    wait_for_memory: float = 30.0
    host_guard: bool | str = False

    def __post_init__(self) -> None:
        _check_choice(self, "prefetch", True, False, "pin")
        if self.sensor is not None and not isinstance(self.sensor, MemorySensor):
            raise UsageError(f"sensor={self.sensor!r} is no MemorySensor: it has no read()")
        for name in ("monitor_interval", "wait_for_memory"):
            if not _are_seconds(value := getattr(self, name)):
                raise UsageError(
                    f"{name}={value!r} is not a finite number of seconds of at least 0"
                )


@dataclass(frozen=True, repr=False)
class DistributedOptions(_Group):
    """Options of a job of many processes (`DistributedDataParallel`, `fully_shard`).

    Attributes:
        timeout: seconds that a rank waits for the others where they meet. It has to be longer than
            what one of them does alone: an evaluation, a checkpoint, replays.
        overlap: sum gradients while the last piece's backward still runs, which takes one more copy
            of them; for DDP.
        mode: "local" gathers a model of `fully_shard` once a call. "lockstep" gathers each layer
            when it runs, for models that do not fit whole, and starts over on all ranks where one
            runs out: experimental, with torch 2.13 and newer.
    """

    timeout: float = 600.0
    overlap: bool = False
    mode: Literal["local", "lockstep"] = "local"

    def __post_init__(self) -> None:
        if not (_are_seconds(self.timeout) and self.timeout):
            raise UsageError(f"timeout={self.timeout!r} is not a finite number of seconds above 0")
        if not isinstance(self.overlap, bool):
            raise UsageError(f"overlap={self.overlap!r} is neither True nor False")
        _check_choice(self, "mode", "local", "lockstep")


class Options(TypedDict, total=False):
    """The options of `ElasticMBS`, by name; its docstring describes each of them."""

    micro_batch_size: int | Literal["auto"]
    count: Count
    reduction: Reduction
    dims: Dims | None
    pieces: Pieces
    length: Length
    trim: Trim | None
    scaler: torch.amp.GradScaler | None
    outputs: OutputPlace
    pad: Fill
    log: str | os.PathLike[str] | None
    on_event: Sink | Iterable[Sink]
    optimizers: Sequence[torch.optim.Optimizer]
    name: str | None
    enabled: bool
    policy: Policy | None
    gradients: GradientOptions | None
    recovery: RecoveryOptions | None
    memory: MemoryOptions | None
    distributed: DistributedOptions | None


GROUPS: dict[str, type[Any]] = {
    "policy": Policy,
    "gradients": GradientOptions,
    "recovery": RecoveryOptions,
    "memory": MemoryOptions,
    "distributed": DistributedOptions,
}


def _checked_init(group: type[Any]) -> Callable[..., None]:
    """Return the `__init__` of a group, which refuses names that are options of another one."""
    made, own = group.__init__, [item.name for item in fields(group)]

    @wraps(made)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in own:
                meant = _meant(name, options, Options.__annotations__, own=group)
                raise UsageError(f"{group.__name__} has no option {name!r}: {meant}")
        made(self, *args, **options)

    return checked


def check_names(
    what: str,
    options: object,
    *,
    own: Collection[str] = (),
    taken: Collection[str] = (),
) -> None:
    """Refuse names that are no options of `what`, with the name that was probably meant.

    Args:
        what: the function or class that takes the options.
        options: options by name.
        own: names of options that `what` has besides those of `ElasticMBS`.
        taken: names of options of `ElasticMBS` that `what` sets by itself.

    Raises:
        UsageError: an option that `what` does not take, or no options at all.
    """
    known = [name for name in (*Options.__annotations__, *own) if name not in taken]
    if not isinstance(options, Mapping):
        raise UsageError(f"{what}: {options!r} is no dict of options; there are {', '.join(known)}")
    for name in options:
        if name in taken:
            raise UsageError(f"{what} sets {name}= by itself: leave it out")
        if name not in known:
            raise UsageError(f"{what} has no option {name!r}: {_meant(name, options, known)}")


def _meant(
    name: object,
    options: Mapping[Any, Any],
    known: Collection[str],
    own: type[Any] | None = None,
) -> str:
    """Return the way to give an option that is not known by this name.

    It was given to the runtime, or to the group `own`.
    """
    text = str(name)
    grouped = {item.name: (at, kind) for at, kind in GROUPS.items() for item in fields(kind)}
    if text in grouped:
        at, kind = grouped[text]
        value = options[name]
        shown = repr(value) if isinstance(value, bool | int | float | str) else "…"
        return f"it belongs to {kind.__name__}: {at}={kind.__name__}({text}={shown})"
    if own is not None and text in known:
        return f"it is an option of ElasticMBS itself: ElasticMBS(model, {text}=…)"
    mine = [] if own is None else [item.name for item in fields(own)]
    near = difflib.get_close_matches(text, mine or [*known, *grouped], n=3)
    ways = [
        f"{grouped[each][0]}={grouped[each][1].__name__}({each}=…)"
        if each in grouped and own is None
        else f"{each}=…"
        for each in near
    ]
    return f"did you mean {' or '.join(ways)}?" if ways else f"there are {', '.join(mine or known)}"


for _group in GROUPS.values():
    _group.__init__ = _checked_init(_group)


@dataclass(frozen=True)
class Settings:
    """The options of a runtime, fixed for its life."""

    name: str = "elastic_mbs"
    micro_batch_size: int | Literal["auto"] = "auto"
    reduction: Reduction = "mean"
    scaler: torch.amp.GradScaler | None = None
    outputs: OutputPlace = "auto"
    pad: Pad = None
    policy: Policy = field(default_factory=Policy)
    gradients: GradientOptions = field(default_factory=GradientOptions)
    recovery: RecoveryOptions = field(default_factory=RecoveryOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    distributed: DistributedOptions = field(default_factory=DistributedOptions)
    pieces: Pieces = "in_order"
    limits: Limits = field(init=False, repr=False)  # of the policy; read in every call

    def __post_init__(self) -> None:
        for name, group in GROUPS.items():
            _check_group(name, getattr(self, name), group)
        object.__setattr__(self, "limits", self.policy.limits)
        size = self.micro_batch_size
        if not (
            size == "auto" or (isinstance(size, int) and not isinstance(size, bool) and size >= 1)
        ):
            raise UsageError(
                f"micro_batch_size={size!r} is neither 'auto' nor a whole number of at least 1"
            )
        low, high = self.limits.minimum, self.limits.maximum
        if size != "auto" and not (low <= size and (high is None or size <= high)):
            raise UsageError(
                f"micro_batch_size={size} lies outside [min_micro_batch_size={low}, "
                f"max_micro_batch_size={high}]"
            )
        _check_choice(self, "reduction", "mean", "sum")
        _check_outputs(self)
        _check_choice(self, "pieces", "in_order", "by_length")
        if self.pieces == "by_length" and self.gradients.noise_scale is not None:
            raise UsageError(
                "noise_scale= needs pieces of samples drawn at random, and pieces='by_length' "
                "sorts them: use one of the two"
            )
        if self.scaler is not None and self.gradients.backward is not None:
            raise UsageError(
                "scaler= and backward= were both given; a trainer's own backward scales the loss "
                "by itself, so leave scaler out"
            )
        if self.scaler is not None and not (
            hasattr(self.scaler, "scale") and hasattr(self.scaler, "unscale_")
        ):
            raise UsageError(
                f"scaler={self.scaler!r} is no torch.amp.GradScaler: it has no scale() and "
                "unscale_()"
            )

    @classmethod
    def of(cls, options: Options) -> Settings:
        """Return the settings that the user's options make; None stands for a group's default."""
        own = {item.name for item in fields(cls) if item.init}
        given: dict[str, Any] = {name: value for name, value in options.items() if name in own}
        for name in ("name", *GROUPS):
            if given.get(name, ...) is None:
                del given[name]
        return cls(**given)

    def for_model(self, *, normalises_batch: bool, group: int) -> Settings:
        """Return the settings for a model: its groups of samples stay together.

        Where the user gave no smallest micro-batch and the model has BatchNorm it is 2, because one
        sample has no statistics.
        """
        policy = self.policy
        align = math.lcm(policy.align, group)
        for name, size in (
            ("micro_batch_size", self.micro_batch_size),
            ("max_micro_batch_size", policy.max_micro_batch_size),
        ):
            if group > 1 and isinstance(size, int) and size % align:
                raise UsageError(
                    f"{name}={size} is no multiple of {align}: the model normalises over groups "
                    "of samples (GhostBatchNorm)"
                )
        minimum = policy.min_micro_batch_size
        if policy.max_tokens is not None and (group > 1 or (minimum is None and normalises_batch)):
            raise UsageError(
                f"max_tokens={policy.max_tokens} can leave a piece one sample, and the model has "
                "BatchNorm: leave it out, or say min_micro_batch_size=1 if one is enough"
            )
        if minimum is None and 1 not in (self.micro_batch_size, policy.max_micro_batch_size):
            minimum = 2 if normalises_batch else 1
        return replace(self, policy=replace(policy, align=align, min_micro_batch_size=minimum))

    @property
    def plain(self) -> bool:
        """True if a piece's backward is `loss.backward()` and adds to `.grad` in place."""
        return self.scaler is None and self.gradients.backward is None and not self.isolates

    @property
    def isolates(self) -> bool:
        """True if each piece's gradient is kept apart until it has succeeded."""
        gradients = self.gradients
        return (
            self.recovery.replay == "isolate"
            or gradients.accumulate_dtype is not None
            or gradients.noise_scale is not None
        )


def _check_group(name: str, given: object, group: type[Any]) -> None:
    if not isinstance(given, group):
        pairs = given.items() if isinstance(given, Mapping) else ()
        written = ", ".join(f"{key}={value!r}" for key, value in pairs) or "..."
        raise UsageError(
            f"{name}={given!r} is no elastic_mbs.{group.__name__}: write "
            f"{name}={group.__name__}({written})"
        )


def _check_choice(options: object, name: str, *choices: str | bool | None) -> None:
    if (value := getattr(options, name)) not in choices:
        raise UsageError(f"{name}={value!r} is not known: use {' or '.join(map(repr, choices))}")


def _are_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _check_outputs(settings: Settings) -> None:
    _check_choice(settings, "outputs", "auto", "cpu", "device", None)
    check_pad(settings.pad)


def _check_callables(options: object, *names: str) -> None:
    for name in names:
        if (value := getattr(options, name)) is not None and not callable(value):
            raise UsageError(f"{name}={value!r} cannot be called: give a function, or None")
