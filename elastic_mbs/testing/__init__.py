"""For tests of training code: memory that runs out where a test wants it to, and a pytest plugin that makes it run out anywhere.

`MemoryBudget` is a device of a given size; `InjectOOM` makes chosen operations fail, whatever there is.

The plugin runs a test suite that you have already under out-of-memory errors. In the `conftest.py` at its top:

```python
pytest_plugins = ["elastic_mbs.testing"]    # or on the command line: pytest -p elastic_mbs.testing
```

- `--oom-injection=never` (the default): nothing is installed, nothing is slower.
- `--oom-injection=random`: about half of the tests, chosen by seed and name, run under errors.
- `--oom-injection=always`: all tests do, and every call is struck at its first attempt if that is long enough.
- `--oom-injection-seed=N`: where they strike. Drawn by default and printed in the header; a failing test's report has a section with what was
  injected and the command that repeats it. All workers of pytest-xdist have the same seed.

In a chosen test operations that can allocate raise `torch.OutOfMemoryError`, in forward and in backward of a piece (training and eval, all doors)
and in `mbs.optimizer_step`. Code outside of these is never hit, fixtures are not, and neither are other threads. A call meets at most two such
errors, and none before something has committed since the last one, so a test that is right without errors and exact under replay passes with them.
A failure means that something in the step function is not: it counts its own runs, edits what outlives it, or asserts a number of pieces. Tests
which do that on purpose are marked:

```python
@pytest.mark.no_oom_injection               # asserts exact numbers of OOMs, sizes, or memory
def test_halves_the_micro_batch(): ...
```

In a hypothesis test each example starts again, and what it meets follows from its arguments, so that it can be run again; state machines, whose
examples cannot be told apart from outside, are left alone. So are steps that go through `torch.compile`, which does not run under the dispatch
mode that injects, if it was called in the test's body or on a module of the model, and so is what runs under the test's own `InjectOOM`.
Parametrised tests have errors of their own for each id.

pytest is imported only by the plugin. There is no entry point: it would import torch into every run of pytest wherever this package is installed.

PYTEST_DONT_REWRITE: it may have been imported before pytest loads it as a plugin.
"""

from __future__ import annotations

from typing import Any

from elastic_mbs.memory import MemoryBudget
from elastic_mbs.testing.injection import InjectOOM

__all__ = ["InjectOOM", "MemoryBudget"]


def pytest_addoption(parser: Any, pluginmanager: Any) -> None:
    """Brings the plugin's hooks in; called by pytest alone."""
    from elastic_mbs.testing import plugin

    pluginmanager.register(plugin, plugin.__name__)
