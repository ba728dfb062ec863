"""The pytest plugin's hooks; what it is for stands in `elastic_mbs.testing`."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any
from unittest import mock

import pytest

from elastic_mbs.testing.faults import RandomFaults, is_chosen, noting_compile

MARKER = "no_oom_injection"
_FAULTS = pytest.StashKey[RandomFaults]()
_SEED = "oom_injection_seed"
_COUNT = "oom_injection"
_SHOWN = 20  # most errors that a report lists: a property test may have met thousands


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("elastic_mbs", "out-of-memory errors in elastic_mbs calls")
    group.addoption(
        "--oom-injection",
        choices=("never", "random", "always"),
        default="never",
        help="make operations inside guarded attempts of elastic_mbs run out of memory: in half "
        "of the tests, chosen by seed and name, or in all",
    )
    group.addoption(
        "--oom-injection-seed",
        type=int,
        metavar="N",
        default=None,
        help="where errors strike; the same seed repeats them (default: drawn)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker, draws a seed where none was given, and follows `torch.compile`."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}: out-of-memory errors are not injected here: it asserts how many there are, "
        "sizes, or memory",
    )
    if config.option.oom_injection_seed is None:
        given: int | None = getattr(config, "workerinput", {}).get(_SEED)
        config.option.oom_injection_seed = (
            random.SystemRandom().randrange(2**31) if given is None else given
        )
    if config.option.oom_injection != "never":
        # for the whole run: a test that patches `torch.compile` itself puts this one back
        patch = noting_compile()
        patch.start()
        config.add_cleanup(patch.stop)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Gives a worker of pytest-xdist the seed of all."""
    node.workerinput[_SEED] = node.config.option.oom_injection_seed


def pytest_report_header(config: pytest.Config) -> str | None:
    """Mode and seed."""
    return (
        None
        if config.option.oom_injection == "never"
        else f"oom injection: {_options(config.option)}"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Runs the test's body under errors, where it is chosen.

    Fixtures are left alone: they may serve tests that are not.
    """
    mode, seed = item.config.option.oom_injection, item.config.option.oom_injection_seed
    left_alone = (
        mode == "never" or item.get_closest_marker(MARKER) is not None or _is_state_machine(item)
    )
    if left_alone or (mode == "random" and not is_chosen(seed, item.nodeid)):
        return (yield)
    faults = item.stash[_FAULTS] = RandomFaults(seed, item.nodeid, always=mode == "always")
    try:
        with faults, _each_example_anew(item, faults):
            return (yield)
    finally:
        # from here it comes to xdist's controller, and into junit.xml
        item.user_properties.append((_COUNT, len(faults.hits)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tells in a failing test's report what was injected, and how to repeat it."""
    report = yield
    faults = item.stash.get(_FAULTS, None)
    if faults is not None and report.when == "call" and report.failed:
        head = f"{len(faults.hits)} in {faults.attempts} attempts, at most {_SHOWN} of them here, the last ones"
        report.sections.append(
            (
                "injected out-of-memory errors",
                "\n  ".join([head, *faults.hits[-_SHOWN:]]) + f"\nrepeat with: {_command(item)}",
            )
        )
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells how much was injected: a suite that was never struck has shown nothing."""
    option = terminalreporter.config.option
    if option.oom_injection != "never":
        reports = [
            report
            for found in terminalreporter.stats.values()
            for report in found
            if isinstance(report, pytest.TestReport)
        ]
        counts = [
            int(str(value))
            for report in reports
            if report.when == "call"
            for name, value in report.user_properties
            if name == _COUNT
        ]
        struck = sum(count > 0 for count in counts)
        terminalreporter.write_line(
            f"oom injection: {sum(counts)} errors in {struck} tests of {len(counts)} chosen "
            f"({_options(option)})"
        )


def _options(option: Any) -> str:
    return (
        f"--oom-injection={option.oom_injection} --oom-injection-seed={option.oom_injection_seed}"
    )


def _command(item: pytest.Item) -> str:
    """What runs a test under the same errors, from the folder of pytest's configuration."""
    named = "".join([f"-p {name} " for name in item.config.option.plugins if name == __package__])
    return f"pytest {named}{_options(item.config.option)} '{item.nodeid}'"


def _is_state_machine(item: pytest.Item) -> bool:
    """Whether it is a hypothesis test whose examples do not begin at a function that can be wrapped: the same example would meet other errors."""
    body = getattr(item, "obj", None)
    return getattr(body, "is_hypothesis_test", False) and not hasattr(body, "hypothesis")


def _each_example_anew(item: pytest.Item, faults: RandomFaults) -> AbstractContextManager[object]:
    """Has each example of a hypothesis test begin at the first draw, so that what it does follows from its arguments, as hypothesis demands."""
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is None:
        return nullcontext()
    inner: Callable[..., Any] = handle.inner_test

    @wraps(inner)
    def anew(*args: Any, **kwargs: Any) -> Any:
        faults.restart(f"{args[1:] if getattr(item, 'cls', None) else args} {kwargs}")
        return inner(*args, **kwargs)

    return mock.patch.object(handle, "inner_test", anew)
