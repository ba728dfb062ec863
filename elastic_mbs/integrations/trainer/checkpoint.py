"""The sizes that a rank has learned, in the folder of a trainer's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastic_mbs.errors import UsageError
from elastic_mbs.runtime import ElasticMBS

_NAME = "elastic_mbs.json"


def save_sizes(trainer: Any, checkpoint: str) -> None:
    """Save what this rank has learned."""
    path = _file(trainer, checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)  # another rank can be the first
    path.write_text(json.dumps(trainer.elastic.state_dict()))


def load_sizes(trainer: Any, runtime: ElasticMBS, checkpoint: str) -> None:
    """Load what this rank had learned, where it is there.

    Raises:
        UsageError: the file holds something else.
    """
    path = _file(trainer, checkpoint)
    if not path.exists():
        return
    try:
        runtime.load_state_dict(json.loads(path.read_text()))
    except (UsageError, json.JSONDecodeError) as error:
        raise UsageError(f"{path}: {error}. Remove the file to resume without it") from error


def _file(trainer: Any, checkpoint: str) -> Path:
    rank = f".rank{trainer.args.process_index}" if trainer.args.world_size > 1 else ""
    whole = Path(checkpoint, _NAME)
    return whole.with_name(f"{whole.stem}{rank}{whole.suffix}")
