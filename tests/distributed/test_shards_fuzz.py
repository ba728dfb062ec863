"""Random steps of a sharded job: see `tests.helpers.shards_fuzz`, which runs longer by hand."""

import pytest

from tests.helpers.ranks import run_ranks, values
from tests.helpers.shards_fuzz import fuzz


@pytest.mark.parametrize(("world", "steps"), [(2, 60), (4, 25)])
def test_no_error_at_any_place_hangs_the_job_or_changes_a_gradient(world: int, steps: int) -> None:
    every = values(run_ranks(fuzz, world, steps, 120.0, world=world, wall=240))
    assert sum(found["ooms"] for found in every) > 10
    for found in every:
        assert found["steps"] >= steps
        assert found["typed"] > 3
        assert found["vetoed"] > 3
        assert (found["replicated"] > 0) is (world == 4)
        assert found["stale"] == found["drifted"] == 0
        assert max(value for name, value in found.items() if name.startswith("worst")) < 1e-12
