"""Rules of the house.

Import-linter holds the layers (pyproject.toml), ruff the complexity.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.helpers.room import ROOT

CODE = ("elastic_mbs", "stress", "benchmarks", "examples", "tools")
SOURCES = {".py", ".c", ".cpp", ".h", ".js", ".css", ".html"}


def files_of(folder: str) -> list[Path]:
    found = (ROOT / folder).rglob("*")
    return sorted(path for path in found if path.suffix in SOURCES and "results" not in path.parts)


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


# torch's names, and those of named tuples
NOT_OURS = {*dir(torch.nn.Module()), *dir(torch.Tensor), "_make", "_replace"}
PACKAGE = {
    path: ast.parse(path.read_text()) for path in files_of("elastic_mbs") if path.suffix == ".py"
}


def functions() -> Iterator[tuple[str, int]]:
    for path, tree in PACKAGE.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                code = node.body[ast.get_docstring(node) is not None :] or node.body
                head = node.body[0].lineno - node.lineno
                yield (
                    f"{path.name}:{node.name}",
                    head + (code[-1].end_lineno or 0) - code[0].lineno + 1,
                )


def private_names(tree: ast.Module) -> set[str]:
    """Return the names that a module's classes define: `self._x`, and `_x` in a class body."""
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"self", "cls"}
    }
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        names |= {
            node.id
            for line in owner.body
            for node in ast.walk(line)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        names |= {line.name for line in owner.body if isinstance(line, ast.FunctionDef)}
    return {name for name in names if name.startswith("_") and not name.endswith("__")}


def foreign_privates() -> Iterator[str]:
    ours = {path: private_names(tree) for path, tree in PACKAGE.items()}
    everywhere = set().union(*ours.values())
    for path, tree in PACKAGE.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in everywhere - ours[path] - NOT_OURS:
                yield f"{path.name}:{node.lineno} {ast.unparse(node)}"


def test_no_folder_has_more_than_13_modules() -> None:
    modules = [
        path.parent for root in CODE for path in files_of(root) if path.name != "__init__.py"
    ]
    assert {folder for folder in modules if modules.count(folder) > 13} == set()


def test_no_file_has_more_than_500_lines() -> None:
    long = [path for root in (*CODE, "tests") for path in files_of(root) if lines_of(path) > 500]
    assert long == []


def test_no_function_has_more_than_40_lines() -> None:
    assert [(name, lines) for name, lines in functions() if lines > 40] == []


def test_no_module_uses_what_is_private_to_another() -> None:
    assert list(foreign_privates()) == []
