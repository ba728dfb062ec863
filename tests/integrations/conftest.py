from importlib.util import find_spec

# They run in an environment of their own, which has the trainers (`make frameworks`).
if any(find_spec(package) is None for package in ("accelerate", "lightning", "peft", "sentence_transformers", "transformers", "trl")):
    collect_ignore_glob = ["test_*.py"]
