import gc
import importlib
import logging
import os
import random
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from elastic_mbs.rehearsal.first_split import FirstSplit
from stress.limits import simcuda
from tests.helpers import strikes

# pytester tests the other one, which injects out-of-memory errors (`make test-injected`)
pytest_plugins = ["pytester", "elastic_mbs.testing"]

SEED_OPTION = "--hypothesis-seed"

# Sums in one thread come out the same on every machine, and test runs beside each other do not
# fight for cores.
torch.set_num_threads(1)

# A shell has its background jobs ignore interrupts, and their children, too: tests send some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the first call of an operator, or a neighbour on the machine, takes longer than any
# that would still mean something. Derandomized by hypothesis itself where it sees CI: not here,
# because every run is to look for new examples. What reproduces a failure is printed with it.
settings.register_profile("elastic_mbs", deadline=None, derandomize=False, print_blob=True)
# A long look by hand at one test: `pytest --hypothesis-profile=many TEST`.
settings.register_profile(
    "many", settings.get_profile("elastic_mbs"), max_examples=20_000, database=None
)
settings.load_profile("elastic_mbs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simcuda",
        action="store_true",
        help="under the simulated CUDA (stress/limits/simcuda): with `-m gpu`, the tests of a GPU "
        "without one",
    )
    parser.addoption(
        "--verify",
        action="store_true",
        help="compare whole and pieces after the first split in every test (GradientOptions.verify)"
        ", not only in those marked `verifies`",
    )


@pytest.hookimpl(tryfirst=True)  # hypothesis reads its option in the same hook
def pytest_configure(config: pytest.Config) -> None:
    """Draw a seed for examples and sweeps in CI, unless `--hypothesis-seed` gives one."""
    if os.environ.get("CI") and config.getoption(SEED_OPTION) is None:
        drawn = str(random.SystemRandom().randrange(2**32))
        config.option.hypothesis_seed = getattr(config, "workerinput", {}).get(SEED_OPTION, drawn)
    strikes.seed = config.getoption(SEED_OPTION)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the common seed."""
    node.workerinput[SEED_OPTION] = node.config.getoption(SEED_OPTION)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seed before any test, also under `--quiet`: a run that hangs has shown it then."""
    seed = session.config.getoption(SEED_OPTION)
    terminal = session.config.pluginmanager.getplugin("terminalreporter")
    if seed is not None and terminal is not None:
        terminal.write_line(f"{SEED_OPTION}={seed}")


@pytest.hookimpl(optionalhook=True)  # a machine with a GPU may be without xdist
def pytest_xdist_auto_num_workers() -> int:
    """Return two workers more than there are cores: tests of several processes often wait."""
    return (os.cpu_count() or 1) + 2


def pytest_cmdline_main(config: pytest.Config) -> None:
    """Start the same command once more under the simulated CUDA, where `--simcuda` is given."""
    if config.getoption("simcuda") and not simcuda.inside():
        problem = simcuda.trouble()
        if problem is not None:
            raise pytest.UsageError(problem)
        # gives standard output back to what follows
        config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
        simcuda.start_again()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Empty the cache before a test on a GPU, and give cuBLAS' workspace segments of its own.

    The workspace stays for good. Cut from a block that the test before has left, it would turn the
    rest of that block into room that no limit counts.
    """
    if item.get_closest_marker("gpu"):  # cuda-only
        torch.cuda.empty_cache()
        square = torch.ones(8, 8, device="cuda", requires_grad=True)
        with warnings.catch_warnings():
            # in autograd's thread torch warns, once in a process, that cuBLAS comes before anything
            # else
            warnings.simplefilter("ignore")
            (square @ square).sum().backward()


@pytest.fixture(autouse=True)
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the comparison after a first split out: its runs are no part of what a test counts."""
    if request.node.get_closest_marker("verifies") or request.config.getoption("verify"):
        return
    monkeypatch.setattr(FirstSplit, "__call__", lambda self, parts, loss_fn: None)


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """Fail the test that leaves logging changed, and not a later one that waits for a message."""
    logger = logging.getLogger("elastic_mbs")

    def settings() -> tuple[int, int, bool, bool]:
        return logging.root.manager.disable, logger.level, logger.propagate, logger.disabled

    before = settings()
    yield
    assert settings() == before, "this test has changed the settings of logging for good"


@pytest.fixture(scope="module", autouse=True)
def frozen_garbage() -> None:
    """Freeze the objects of imports and of earlier modules: recovery collects garbage often."""
    # 100,000 objects, which torch imports at the first checkpoint or optimizer step
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
