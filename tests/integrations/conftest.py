from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import Tensor


def absent(*packages: str) -> bool:
    return any(find_spec(package) is None for package in packages)


# They run in an environment of their own, which has the trainers (`make frameworks`). That of a GPU
# may have what one of them needs alone.
if absent("accelerate", "transformers"):
    collect_ignore_glob = ["test_*.py"]
elif absent("lightning", "peft", "sentence_transformers", "trl"):
    collect_ignore_glob = ["test_[!g]*.py"]  # all but test_gpu_trainer.py


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The losses of transformers begin with `logits.float()`."""
    import transformers

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    transformers.logging.set_verbosity_error()
