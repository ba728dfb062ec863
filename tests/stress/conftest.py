import pytest

from stress.limits import child
from stress.ranks.job import server


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork children from the server of the ranks, where a test is not about how they start.

    A Python that imports torch takes seconds.
    """
    monkeypatch.setattr(child, "_SPAWN", server())
