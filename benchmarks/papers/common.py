"""Parts that the tables share.

Handwritten digits that scikit-learn carries, a small net, and the places of figures and pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
TRAINED_ON = 1297  # digits of 8 × 8 pixels among the 1,797; the others are tested on
Data = tuple[Tensor, Tensor]


def digits() -> tuple[Data, Data]:
    """Return images of shape (samples, 1, 8, 8) and labels, to train on and to test on.

    They are the same ones each time.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = (
        torch.tensor(bunch.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16,
        torch.tensor(bunch.target),
    )
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAINED_ON], order[TRAINED_ON:]
    return (x[train], y[train]), (x[test], y[test])


def perceptron(seed: int) -> nn.Module:
    """Return a net of two hidden layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def cross_entropy(model: nn.Module, data: Data) -> Tensor:
    """Return the mean loss over a batch."""
    return F.cross_entropy(model(data[0]), data[1])


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Return the share of samples whose class is found, in evaluation mode."""
    model.eval()
    found = float((model(data[0]).argmax(1) == data[1]).float().mean())
    model.train()
    return found


def options(
    doc: str, name: str, *, seeds: int, epochs: int, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Return the options of the command line that all of them have."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=seeds,
        help="runs of each kind, from seed 0 on (default %(default)s)",
    )
    parser.add_argument(
        "--epochs", type=int, default=epochs, help="of each run (default %(default)s)"
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / "benchmarks" / "results" / f"papers-{name}.json",
        help="where figures go",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=ROOT / "docs" / "pictures" / f"papers-{name}.png",
        help="where the picture goes",
    )
    return parser.parse_args(arguments)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return a mean with its standard deviation, and the values themselves."""
    return {
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
        "values": [*values],
    }


def percent(found: Mapping[str, Any]) -> str:
    """Return a mean and its deviation, for a table."""
    return f"{100 * found['mean']:5.1f} ± {100 * found['deviation']:.1f} %"


def write(given: argparse.Namespace, figures: Mapping[str, Any], figure: Figure) -> None:
    """Write figures and picture where they were asked for."""
    for path in (given.json, given.picture):
        path.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": " ".join(
            [Path(sys.argv[0]).name, f"--seeds {given.seeds} --epochs {given.epochs}"]
        ),
        "torch": torch.__version__,
    }
    given.json.write_text(json.dumps({**facts, **figures}, indent=1) + "\n")
    figure.savefig(given.picture, dpi=110, metadata={"Software": None})
    print(f"written: {given.json}, {given.picture}")
