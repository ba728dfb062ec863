"""A compiled model needs few graphs, and each graph is counted."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elastic_mbs import CallDone, ElasticMBS, MemoryOptions, Policy
from elastic_mbs.events import Event
from elastic_mbs.memory import Headroom
from tests.helpers.steps import Pair, off_by, whole_gradient

pytestmark = pytest.mark.no_oom_injection


@pytest.mark.parametrize(("dynamic", "most"), [(None, 3), (True, 2), (False, 5)])
def test_a_run_with_failures_and_growth_needs_few_graphs(dynamic: bool | None, most: int) -> None:
    """Automatic shapes are static at first and dynamic from the second length on.

    A model with static shapes is compiled once for each length.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    model = torch.compile(plain, backend="aot_eager", dynamic=dynamic)
    batch = torch.randn(97, 8, dtype=torch.float64), torch.randint(0, 4, (97,))
    longest, events, lengths = [200], list[Event](), set[int]()

    class Sensor:
        def read(self) -> Headroom:
            return Headroom(longest[0], 200, 200 - longest[0], "test", 0.0)

    def loss_fn(piece: Pair) -> torch.Tensor:
        if len(piece[0]) > longest[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return F.cross_entropy(model(piece[0]), piece[1])

    wanted = whole_gradient(plain, lambda twin: F.cross_entropy(twin(batch[0]), batch[1]))
    policy, memory = (
        Policy(patience=1, jitter=0.0, cooldown=0.0, min_gain=0.0),
        MemoryOptions(sensor=Sensor(), monitor_interval=0),
    )
    with ElasticMBS(plain, policy=policy, memory=memory, on_event=events.append) as mbs:
        for step in range(30):
            longest[0] = 40 if 5 <= step < 15 else 200
            result = mbs.backward(loss_fn, batch)
            shapes = {stop - start for start, stop in result.partition}
            assert result.ooms or len(shapes) <= 2
            lengths |= shapes
            assert off_by(plain, wanted) <= 1e-12
            plain.zero_grad()
        assert result.partition == ((0, 97),)
        assert len(lengths) > 2
        assert 1 <= mbs.stats.graphs <= most
        assert mbs.stats.graphs == sum(
            event.graphs for event in events if isinstance(event, CallDone)
        )
