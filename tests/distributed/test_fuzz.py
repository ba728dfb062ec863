"""Random steps of jobs of several ranks: `python -m stress ranks` runs longer by hand."""

import pytest
from torch.distributed.fsdp import FSDPModule

from stress.ranks.job import run_ranks, values
from stress.ranks.round import run_round
from stress.ranks.training import TOLERANCE, Counts


def steps_of(kind: str, seed: int, steps: int, world: int) -> Counts:
    """Run one round, and return the figures of all ranks."""
    counts = Counts()
    for found in values(run_ranks(run_round, kind, seed, steps, None, world=world, wall=240)):
        counts.merge(found)
    assert counts.steps == steps
    assert counts.ooms > 10
    assert counts.typed.total() > 3 * world
    assert counts.vetoed > 3 * world
    return counts


@pytest.mark.parametrize("seed", [1, 2])
def test_no_error_at_any_place_hangs_replicas_or_changes_a_gradient(seed: int) -> None:
    counts = steps_of("ddp", seed, steps=100, world=2)
    assert counts.early > 20  # sums that began while a backward ran
    assert not counts.wrong
    assert counts.worst < TOLERANCE


IN_STEP = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch is older than lock-step"
)


@pytest.mark.parametrize(
    ("kind", "world", "steps"),
    [("fsdp2", 2, 120), ("hsdp", 4, 40), pytest.param("lockstep", 2, 50, marks=IN_STEP)],
)
def test_no_error_at_any_place_hangs_shards_or_changes_a_gradient(
    kind: str, world: int, steps: int
) -> None:
    counts = steps_of(kind, world, steps, world)
    assert counts.evaluated > 0
    assert not counts.wrong
    assert counts.worst < TOLERANCE
