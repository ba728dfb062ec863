"""Tools for tests of training code, and a pytest plugin that makes memory run out anywhere.

`MemoryBudget` is a device of a given size; `InjectOOM` makes chosen operations fail. The plugin
runs your test suite under out-of-memory errors:

```python
pytest_plugins = ["elastic_mbs.testing"]    # in the conftest.py at its top,
                                            # or on the command line: pytest -p elastic_mbs.testing
```

- `--oom-injection=never` (the default): nothing is installed, nothing is slower.
- `--oom-injection=random`: about half of the tests, chosen by seed and name, run under errors.
- `--oom-injection=always`: all tests do, and every call is struck at its first attempt if that is
  long enough.
- `--oom-injection-seed=N`: the seed of the places. Drawn by default and printed in the header; a
  failing test's report lists the injected errors and the command that repeats them.

In a chosen test, operations of a piece's forward and backward (training and eval, all doors) and of
`mbs.optimizer_step` raise `torch.OutOfMemoryError`; fixtures, other threads and all other code are
never hit. A call meets at most two such errors, so a test that is exact under replay passes with
them. A test that fails counts its own runs, edits what outlives it, or asserts a number of pieces;
where that is meant, mark it `@pytest.mark.no_oom_injection`.

In a hypothesis test the errors of an example follow from its arguments. Nothing is injected into
state machines, whose examples cannot be told apart from outside, into steps that go through
`torch.compile`, which does not run under a dispatch mode, and under the test's own `InjectOOM`.

PYTEST_DONT_REWRITE: the package may have been imported before pytest loads it as a plugin. There is
no entry point: it would import torch into every run.
"""

from __future__ import annotations

from typing import Any

from elastic_mbs.memory import MemoryBudget
from elastic_mbs.testing.injection import InjectOOM

__all__ = ["InjectOOM", "MemoryBudget"]


def pytest_addoption(parser: Any, pluginmanager: Any) -> None:
    """Register the plugin's hooks; called by pytest alone."""
    from elastic_mbs.testing import plugin

    pluginmanager.register(plugin, plugin.__name__)
