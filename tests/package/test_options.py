"""Options that make no sense are refused when they are given, by name and with a way out."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_mbs import (
    ElasticMBS,
    GradientOptions,
    MemoryOptions,
    Policy,
    RecoveryOptions,
    elastic_step,
)
from elastic_mbs.errors import UsageError
from elastic_mbs.options import GROUPS, Options, Settings, check_names
from stress.flat_options import grouped

BAD: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({"micro_batch_size": value}, f"micro_batch_size={value!r}", "'auto'")
        for value in (0, -1, 2.0, "8", "Auto", True, None, (4,))
    ),
    *(
        ({"min_micro_batch_size": value}, f"min_micro_batch_size={value!r}", "at least 1")
        for value in (0, -3, 1.5, "2", True)
    ),
    *(
        ({"align": value}, f"align={value!r}", "at least 1")
        for value in (0, -8, 8.0, None, "8", False)
    ),
    *(
        (
            {"max_micro_batch_size": value},
            f"max_micro_batch_size={value!r}",
            "None or a whole number",
        )
        for value in (0, -1, 4.0, "8", True)
    ),
    (
        {"max_micro_batch_size": 3, "min_micro_batch_size": 4},
        "max_micro_batch_size=3",
        "at least min_micro_batch_size=4",
    ),
    (
        {"micro_batch_size": 3, "min_micro_batch_size": 4},
        "micro_batch_size=3",
        "outside [min_micro_batch_size=4, max_micro_batch_size=None]",
    ),
    (
        {"micro_batch_size": 9, "max_micro_batch_size": 8},
        "micro_batch_size=9",
        "outside [min_micro_batch_size=1, max_micro_batch_size=8]",
    ),
    *(
        ({"reduction": value}, f"reduction={value!r}", "'mean'")
        for value in ("none", "Mean", None, ["sum"])
    ),
    *(
        ({"escalate": value}, f"escalate={value!r}", 'use "auto"')
        for value in ("swap", None, ("swap",), ["swap", "offload"], 3, [])
    ),
    *(
        ({"escalate": value}, f"escalate={value!r}", f"use escalate={meant!r}")
        for value, meant in (
            ("checkpoint", ("checkpoint",)),
            (["tile", "offload"], ("tile", "offload")),
            (("offload",) * 2, ("offload",)),
        )
    ),
    *(({"replay": value}, f"replay={value!r}", "'isolate'") for value in ("piece", None, True)),
    *(
        ({"accumulate_dtype": value}, f"accumulate_dtype={value!r}", "torch.float32")
        for value in (torch.bfloat16, torch.float16, torch.int32, "float32", float)
    ),
    (
        {"scaler": torch.amp.GradScaler("cpu"), "backward": lambda loss: None},
        "scaler= and backward=",
        "leave scaler out",
    ),
    *(
        ({"wait_for_memory": value}, f"wait_for_memory={value!r}", "at least 0")
        for value in (-1, -0.5, float("nan"), None, "30")
    ),
    ({"align": 8, "max_micro_batch_size": 4}, "align=8", "leaves no size"),
    *(
        ({name: value}, f"{name}={value!r}", "a number of at least 0")
        for name in ("jitter", "margin", "min_gain", "cooldown", "changed")
        for value in ("5%", None, -0.1, float("nan"))
    ),
    *(({"seed": value}, f"seed={value!r}", "None or a whole number") for value in ("a", 0.5, [1])),
    *(
        ({"monitor_interval": value}, f"monitor_interval={value!r}", "at least 0")
        for value in (-1.0, "1", float("inf"))
    ),
    *(({"count": value}, f"count={value!r}", "count_tokens") for value in (3, "labels")),
    *(({"device": value}, str(value), "device") for value in ("nowhere", 3.5)),
    *(
        ({"generators": value}, "generator", says)
        for value, says in (
            (["state"], "str"),
            ([3], "int"),
            (7, "no sequence of random generators"),
        )
    ),
    *(({name: 3}, f"{name}=3", "function") for name in ("is_oom", "on_fatal", "backward")),
    *(({"on_event": value}, "on_event", "function") for value in (3, [print, 3])),
    ({"scaler": 2.0}, "scaler=2.0", "GradScaler"),
    ({"sensor": "nvml"}, "sensor='nvml'", "MemorySensor"),
    (
        {"policy": {"patience": 3, "align": 2}},
        "policy={'patience': 3, 'align': 2} is no elastic_mbs.Policy",
        "write policy=Policy(patience=3, align=2)",
    ),
    ({"recovery": "isolate"}, "recovery='isolate'", "write recovery=RecoveryOptions(...)"),
    ({"pieces": "by_size"}, "pieces='by_size'", "'by_length'"),
    *(
        ({"pieces": "by_length", "length": value}, f"length={value!r}", "attention mask")
        for value in (None, 3.0, True, ["mask"])
    ),
    *(
        (
            {"pieces": "by_length", "length": "mask", "trim": {"ids": value}},
            f"trim says {value!r}",
            "or None",
        )
        for value in ("1", True, 1.0)
    ),
    *(
        ({name: value}, "length= and trim=", "pieces='by_length'")
        for name, value in (("length", "mask"), ("trim", {"ids": 1}))
    ),
    *(({"outputs": value}, f"outputs={value!r}", "'device'") for value in ("gpu", "CPU", True, 1)),
]


@pytest.mark.parametrize(("options", "value", "way_out"), BAD, ids=[str(case[1]) for case in BAD])
def test_a_bad_value_is_refused_by_name_with_a_way_out(
    options: dict[str, Any], value: str, way_out: str
) -> None:
    with pytest.raises(UsageError) as caught:
        ElasticMBS(nn.Linear(1, 1), **grouped(options))
    assert value in str(caught.value)
    assert way_out in str(caught.value)


def test_what_makes_sense_is_accepted_as_it_is() -> None:
    sizes = {
        "micro_batch_size": 8,
        "min_micro_batch_size": 8,
        "max_micro_batch_size": 8,
        "align": 8,
    }
    settings = Settings(**grouped({**sizes, "accumulate_dtype": torch.float64}))
    assert {name: {**vars(settings), **vars(settings.policy)}[name] for name in sizes} == sizes
    assert settings.gradients.accumulate_dtype is torch.float64


@given(st.integers(-1, 9), st.integers(-1, 9), st.none() | st.integers(-1, 9))
def test_sizes_are_accepted_exactly_when_they_are_ordered(
    size: int, low: int, high: int | None
) -> None:
    sensible = 1 <= low <= size and (high is None or size <= high)
    try:
        Settings(
            micro_batch_size=size,
            policy=Policy(min_micro_batch_size=low, max_micro_batch_size=high),
        )
    except UsageError:
        assert not sensible
    else:
        assert sensible


@pytest.mark.parametrize("door", [ElasticMBS, elastic_step])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"wait_for_memory": 5},
            "'wait_for_memory': it belongs to MemoryOptions: "
            "memory=MemoryOptions(wait_for_memory=5)",
        ),
        (
            {"min_micro_batch_size": 2},
            "it belongs to Policy: policy=Policy(min_micro_batch_size=2)",
        ),
        (
            {"accumulate_dtype": torch.float32},
            "gradients=GradientOptions(accumulate_dtype=…)",
        ),
        ({"generators": []}, "recovery=RecoveryOptions(generators=…)"),
        ({"micro_batchsize": 4}, "no option 'micro_batchsize': did you mean micro_batch_size=…"),
        ({"wait_memory": 4}, "did you mean memory=MemoryOptions(wait_for_memory=…)"),
        ({"zzz": 4}, "no option 'zzz': there are micro_batch_size, count, reduction"),
    ],
)
def test_an_option_in_the_wrong_place_is_told_its_own(
    door: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        door(nn.Linear(1, 1), **options)
    assert str(caught.value).startswith(f"{door.__name__} has no option")
    assert message in str(caught.value)


def test_every_option_is_documented_and_every_group_named() -> None:
    text = inspect.getdoc(ElasticMBS) or ""  # Python 3.13 takes the indentation away by itself
    assert all(f"    {name}: " in text for name in Options.__annotations__)
    assert set(GROUPS) <= set(Options.__annotations__)
    for name, group in GROUPS.items():
        if name != "policy":  # which has a page of its own, with all of its fields
            assert all(f"`{field.name}`" in text for field in fields(group)), name


def test_options_that_are_taken_and_other_things_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^fit sets scaler= by itself: leave it out"):
        check_names("fit", {"scaler": None}, taken=("scaler",))
    with pytest.raises(UsageError, match="True is no dict of options"):
        check_names("fit", True)
    check_names("fit", {"mine": 1, "name": "a"}, own=("mine",))


@pytest.mark.parametrize(
    "options",
    [
        GradientOptions(),
        GradientOptions(noise_scale=50),
        RecoveryOptions(replay="isolate", escalate=("offload",)),
        MemoryOptions(device=None, wait_for_memory=5.0),
    ],
)
def test_options_show_what_was_given(options: Any) -> None:
    assert eval(repr(options)) == options
    assert repr(MemoryOptions(prefetch=False)) == "MemoryOptions(prefetch=False)"


def test_none_stands_for_a_groups_default() -> None:
    everything: Options = {"policy": None, "memory": None, "name": None}
    assert Settings.of(everything) == Settings()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Policy(escalate=("offload",)), r"recovery=RecoveryOptions\(escalate=…\)"),  # type: ignore[call-arg]  # the mistake
        (lambda: RecoveryOptions(patience=3), r"policy=Policy\(patience=3\)"),  # type: ignore[call-arg]  # the mistake
        (lambda: MemoryOptions(name="x"), r"ElasticMBS\(model, name=…\)"),  # type: ignore[call-arg]  # the mistake
        (lambda: Policy(patienc=3), r"did you mean patience=…\?"),  # type: ignore[call-arg]  # the mistake
    ],
)
def test_an_option_in_the_wrong_group_names_its_own(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_a_method_that_is_missing_names_the_one_that_is_meant() -> None:
    mbs = ElasticMBS(nn.Linear(2, 2))
    with pytest.raises(AttributeError, match=r"did you mean evaluate\(\)\?"):
        mbs.eval  # noqa: B018  # looking it up is the mistake
    assert not hasattr(mbs, "nothing_like_it")
