"""Jobs under torchrun: what is killed or cut off ends, and resumes with the undisturbed curve."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import DistributedOptions, ElasticMBS
from stress.ranks.job import run_ranks, values
from stress.ranks.losses import data
from tests.helpers.ddp import FailingBackward, failing, joined, net, worst
from tests.helpers.ddp_killed import difference
from tests.helpers.ddp_train import HIT, TIMEOUT, reference
from tests.helpers.nodes import Node, free_port, namespaces, two_nodes

WALL = 200.0  # seconds after which something hangs; a busy machine is slower, not red
WAY_OUT = "End this process: torchrun starts the job again (--max-restarts)"


@pytest.fixture
def spaces() -> Iterator[tuple[str, str]]:
    try:
        with namespaces() as found:
            yield found
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this process may not make network namespaces")


def wait_for(path: Path, *nodes: Node) -> None:
    until = time.monotonic() + WALL
    while not path.exists():
        words = [node.output.read_text()[-3000:] for node in nodes]
        assert time.monotonic() < until, words
        time.sleep(0.05)


def last_words(node: Node) -> str:
    """Return the error with which the rank of a node has ended, once it has."""
    until = time.monotonic() + WALL
    while True:
        errors = [line for line in node.output.read_text().splitlines() if "PeerError: " in line]
        if errors:
            return errors[-1]
        assert time.monotonic() < until, node.output.read_text()[-3000:]
        time.sleep(0.2)


def cut_off(nodes: tuple[Node, Node], folder: Path, port: int) -> None:
    """Start a job, and cut the second node off in the middle of it."""
    for node in nodes:
        node.start(folder, "cut", port=port)
    for rank in range(2):
        wait_for(folder / f"here{rank}", *nodes)
    nodes[1].cut()
    (folder / "hit").touch()


def check_named(node: Node) -> None:
    error = last_words(node)
    assert "cannot be reached at the end of a batch (batch 8): no answer within" in error
    assert f"no answer within {TIMEOUT['cut']:g} s: rank 1 did not come" in error
    assert WAY_OUT in error


@pytest.mark.no_oom_injection
def test_a_job_resumes_after_a_rank_was_killed(tmp_path: Path) -> None:
    assert difference(tmp_path, agents=1, step=HIT) < 1e-12


@pytest.mark.no_oom_injection
def test_a_node_that_stops_is_named_and_the_job_resumes_over_two_agents(tmp_path: Path) -> None:
    with two_nodes() as nodes:
        cut_off(nodes, tmp_path, free_port())
        check_named(nodes[0])
        assert nodes[0].wait(WALL) == 1
    with two_nodes() as nodes:
        port = free_port()
        for node in nodes:
            node.start(tmp_path, "cut", port=port)
        assert [node.wait(WALL) for node in nodes] == [0, 0]
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(
        reference(2), rel=1e-12
    )


@pytest.mark.no_oom_injection
def test_both_sides_of_a_cut_link_end_within_their_time_out(
    tmp_path: Path, spaces: tuple[str, str]
) -> None:
    # The side that has lost the store has to end, too: no read of a socket there ends by itself.
    with two_nodes(spaces) as nodes:
        cut_off(nodes, tmp_path, 29500)
        check_named(nodes[0])
        other = last_words(nodes[1])
        assert "no answer within 4 s, nor from the store of the job" in other
        assert WAY_OUT in other
        assert nodes[0].wait(WALL) == 1


# ---------------------------------------------------------------------- another number of ranks


def loss_of(x: Tensor, ddp: nn.Module) -> Tensor:
    return failing(ddp(x)).pow(2).mean()


def learn(rank: int, world: int) -> dict[str, Any]:
    """Return the state of a runtime whose rank has room for a part of the batch only."""
    ddp = DDP(net())
    with ElasticMBS(ddp, distributed=DistributedOptions(timeout=20)) as mbs:
        for step in range(3):
            FailingBackward.left = rank if step == 0 else 0
            mbs.backward(loss_of, data(0, step, 8), ddp)
        return mbs.state_dict()


def resume(rank: int, world: int, states: list[dict[str, Any]]) -> tuple[int, float]:
    """Go on on more ranks; return the first size, and the error of the gradient."""
    ddp, model = DDP(net()), net()
    with ElasticMBS(ddp, distributed=DistributedOptions(timeout=20)) as mbs:
        if rank < len(states):
            mbs.load_state_dict(states[rank])
        result = mbs.backward(loss_of, data(rank, 0, 8), ddp)
    model(joined([data(each, 0, 8) for each in range(world)])).pow(2).mean().backward()
    return result.micro_batch_size, worst(ddp, model)


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_keeps_the_sizes(world: int) -> None:
    states = values(run_ranks(learn))
    found = values(run_ranks(resume, states, world=world))
    assert [size for size, _ in found] == [8, 4, 8][:world]
    assert max(error for _, error in found) < 1e-12
