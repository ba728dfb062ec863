from importlib.util import find_spec


def absent(*packages: str) -> bool:
    return any(find_spec(package) is None for package in packages)


# They run in an environment of their own, which has the trainers (`make frameworks`). A machine with a GPU may have the first three alone.
if absent("accelerate", "lightning", "transformers"):
    collect_ignore_glob = ["test_*.py"]
elif absent("peft", "sentence_transformers", "trl"):
    collect_ignore_glob = ["test_[!g]*.py"]  # all but test_gpu_trainer.py
