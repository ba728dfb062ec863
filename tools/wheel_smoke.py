"""Smoke test of the installed wheel, for `make wheel-test`.

Trains three steps in a budget too small for the batch, with every gradient checked, and runs a
scenario of the stress tool.
"""

import copy
import importlib.util
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import elastic_mbs
from elastic_mbs import ElasticMBS, MemoryBudget


def loss_fn(batch: torch.Tensor, net: torch.nn.Module) -> torch.Tensor:
    """Return the mean of the squared output; the batch of 64 needs 48 MiB of activations."""
    loss: torch.Tensor = net(batch).square().mean(dim=(1, 2)).mean()
    return loss


def main() -> None:
    """Run a plain loop, then the same one under a budget, and compare."""
    package = Path(elastic_mbs.__file__).parent
    assert package.is_relative_to(sys.prefix), f"imported from {package}, not from the wheel"
    assert (package / "py.typed").exists(), "py.typed is not in the wheel"

    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    ).double()
    model = copy.deepcopy(plain)
    batches = [torch.randn(64, 512, 16, dtype=torch.float64) for _ in range(3)]
    expected = []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(batch, plain).backward()
        expected.append(
            [
                parameter.grad.clone()
                for parameter in plain.parameters()
                if parameter.grad is not None
            ]
        )
        optimizer.step()

    ooms = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryBudget("24MiB"), ElasticMBS(model, micro_batch_size=64) as mbs:
        for batch, reference in zip(batches, expected, strict=True):
            optimizer.zero_grad()
            ooms += mbs.backward(loss_fn, batch, model).ooms
            for parameter, gradient in zip(model.parameters(), reference, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)
            optimizer.step()
    assert ooms > 0, "the budget was never exceeded"
    check_stress_tool(package)
    check_description()
    print(
        f"wheel: 3 steps, {ooms} out-of-memory recovered, gradients exact; one scenario of the "
        "stress tool passed"
    )


def check_description() -> None:
    """Check that the page of an index has no link to a file, which would be missing there."""
    text = metadata.distribution("elastic-mbs").read_text("METADATA") or ""
    assert "## What it promises" in text, text
    links = r"\]\((?!https?:|#)[^)]*\)|^\[[\w-]+\]: (?!https?:).*$|src(set)?=\"(?!https?:)"
    assert not (found := re.search(links, text, re.MULTILINE)), found


def check_stress_tool(package: Path) -> None:
    """Check that the stress tool lies inside the package, without results and C++ sources."""
    tool = package / "stress"
    assert not (tool / "results").exists(), "stress/results is in the wheel"
    foreign = [path.name for path in package.rglob("*") if path.suffix in {".c", ".cpp", ".h"}]
    assert not foreign, f"sources of C and C++ are in the wheel: {foreign}"
    assert importlib.util.find_spec("stress") is None, "the wheel takes the top-level name `stress`"
    script = Path(sys.executable).with_name("elastic-mbs")
    for command in ([str(script), "stress"], [sys.executable, "-m", "elastic_mbs.stress"]):
        told = subprocess.run(
            [*command, "--help"], capture_output=True, text=True, check=True
        ).stdout
        assert "usage: elastic-mbs stress" in told, told
    told = subprocess.run(
        [str(script), "stress", "--kind", "shim"], capture_output=True, text=True, check=False
    ).stderr
    assert "source distribution" in told, told
    page = Path("stress.html")
    scenario = [
        str(script),
        "stress",
        "--scenario",
        "cliff",
        "--kind",
        "budget",
        "--steps",
        "12",
        "--html",
        str(page),
    ]
    told = subprocess.run(scenario, capture_output=True, text=True, check=True).stdout
    assert "1 of 1 passed" in told, told
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


if __name__ == "__main__":
    main()
