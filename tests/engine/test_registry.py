"""`ElasticMBS.of(model)` finds the runtime of a model, in whatever file the loop is."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_mbs import ElasticMBS, Policy, UsageError, elastic_step
from tests.helpers.steps import mlp, quiet


def loss_fn(model: nn.Module) -> Any:
    return lambda batch: model(batch).pow(2).mean()


def test_a_loop_elsewhere_finds_the_runtime_of_its_model() -> None:
    model = mlp()
    with ElasticMBS(model, **quiet()) as mbs:
        assert ElasticMBS.of(model) is mbs


def test_sizes_are_kept_between_loops_that_have_the_model_alone() -> None:
    model = mlp()

    options = quiet(micro_batch_size=2)

    def train_one_epoch(model: nn.Module) -> None:
        mbs = ElasticMBS.of(model, **options)
        mbs.backward(loss_fn(model), torch.ones(4, 6, dtype=torch.float64))

    train_one_epoch(model)
    gc.collect()
    train_one_epoch(model)
    assert ElasticMBS.of(model).stats.calls == 2


def test_the_latest_runtime_is_found() -> None:
    model = mlp()
    first = ElasticMBS.of(model, **quiet())
    second = ElasticMBS(model, **quiet())
    assert ElasticMBS.of(model) is second
    del second
    assert ElasticMBS.of(model, **quiet()) is not first


def test_each_module_of_a_runtime_finds_it() -> None:
    generator, discriminator = mlp(), mlp()
    mbs = ElasticMBS([generator, discriminator], **quiet())
    assert ElasticMBS.of(generator) is ElasticMBS.of(discriminator) is mbs


def test_a_compiled_model_has_the_runtime_of_its_module() -> None:
    model = mlp()
    compiled: Any = torch.compile(model, backend="eager")
    mbs = ElasticMBS(compiled, **quiet())
    assert ElasticMBS.of(model) is ElasticMBS.of(compiled) is mbs


def test_the_decorators_runtime_is_found() -> None:
    model = mlp()
    step = elastic_step(model, **quiet())(loss_fn(model))
    assert ElasticMBS.of(model) is step.mbs


def test_other_options_are_refused() -> None:
    model = mlp()
    ElasticMBS.of(model, policy=Policy(grow=False))
    ElasticMBS.of(model, policy=Policy(grow=False))
    with pytest.raises(UsageError, match=r"was made with policy=Policy\(.*grow=False"):
        ElasticMBS.of(model, policy=Policy())
    with pytest.raises(UsageError, match=r"no reduction=, and reduction='sum' was asked for"):
        ElasticMBS.of(model, reduction="sum")
    with pytest.raises(UsageError, match=r"of\(\) got a list"):
        ElasticMBS.of([model])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_of_a_model_has_a_runtime_of_its_own(copied: Any) -> None:
    model = mlp()
    mbs = ElasticMBS.of(model, **quiet())
    twin = copied(model)
    assert ElasticMBS.of(twin, **quiet()) is not mbs
    assert ElasticMBS.of(model) is mbs


def test_a_model_and_its_runtime_end_together() -> None:
    model = mlp()
    runtime = weakref.ref(ElasticMBS.of(model, **quiet()))
    parameter = weakref.ref(next(model.parameters()))
    gc.collect()
    assert runtime() is not None
    del model
    gc.collect()
    assert runtime() is None
    assert parameter() is None


def test_a_saved_model_loads_where_elastic_mbs_is_not_installed(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ElasticMBS.of(model, **quiet())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    (tmp_path / "model.pt").write_bytes(buffer.getvalue())
    code = (
        "import sys, torch; sys.modules['elastic_mbs'] = None; "
        "print(type(torch.load('model.pt', weights_only=False)).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "Linear\n"
