"""Random steps of a DDP job: see `tests.helpers.ddp_fuzz`, which runs longer by hand."""

import pytest

from tests.helpers.ddp_fuzz import fuzz
from tests.helpers.ranks import run_ranks, values

STEPS = 150


@pytest.mark.parametrize("seed", [1, 2])
def test_no_error_at_any_place_hangs_the_job_or_changes_a_gradient(seed: int) -> None:
    for found in values(run_ranks(fuzz, seed, STEPS, 120.0, wall=240)):
        assert found["steps"] >= STEPS
        assert found["ooms"] > 20
        assert found["early"] > 20  # sums that began while a backward ran
        assert found["typed"] > 10
        assert found["vetoed"] > 5
        assert found["stale"] == found["drifted"] == 0
        assert max(value for name, value in found.items() if name.startswith("worst")) < 1e-12
