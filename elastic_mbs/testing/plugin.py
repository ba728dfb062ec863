"""Hooks of the pytest plugin that `elastic_mbs.testing` documents."""

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
_SHOWN = 20  # errors in a report, at most: a property test may have met thousands


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
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
    """Register the marker, draw a seed if none was given, and follow `torch.compile`."""
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
    """Give a worker of pytest-xdist the common seed."""
    node.workerinput[_SEED] = node.config.option.oom_injection_seed


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return mode and seed."""
    return (
        None
        if config.option.oom_injection == "never"
        else f"oom injection: {_options(config.option)}"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the body of a chosen test under errors.

    Fixtures are left alone: they may serve other tests.
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
        # a property reaches xdist's controller and junit.xml
        item.user_properties.append((_COUNT, len(faults.hits)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """List the injected errors in a failing test's report, with the command that repeats them."""
    report = yield
    faults = item.stash.get(_FAULTS, None)
    if faults is not None and report.when == "call" and report.failed:
        head = (
            f"{len(faults.hits)} in {faults.attempts} attempts, "
            f"at most {_SHOWN} of them here, the last ones"
        )
        report.sections.append(
            (
                "injected out-of-memory errors",
                "\n  ".join([head, *faults.hits[-_SHOWN:]]) + f"\nrepeat with: {_command(item)}",
            )
        )
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the number of errors: a suite that was never struck has shown nothing."""
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
    """Return the command that repeats a test with its errors, from the configuration's folder."""
    named = "".join([f"-p {name} " for name in item.config.option.plugins if name == __package__])
    return f"pytest {named}{_options(item.config.option)} '{item.nodeid}'"


def _is_state_machine(item: pytest.Item) -> bool:
    """Return whether it is a hypothesis test without a function that begins each example.

    Without one to wrap, the same example would meet other errors.
    """
    body = getattr(item, "obj", None)
    return getattr(body, "is_hypothesis_test", False) and not hasattr(body, "hypothesis")


def _each_example_anew(item: pytest.Item, faults: RandomFaults) -> AbstractContextManager[object]:
    """Begin each example of a hypothesis test at the first draw.

    Its course then follows from its arguments alone, as hypothesis demands.
    """
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is None:
        return nullcontext()
    inner: Callable[..., Any] = handle.inner_test

    @wraps(inner)
    def anew(*args: Any, **kwargs: Any) -> Any:
        faults.restart(f"{args[1:] if getattr(item, 'cls', None) else args} {kwargs}")
        return inner(*args, **kwargs)

    return mock.patch.object(handle, "inner_test", anew)
