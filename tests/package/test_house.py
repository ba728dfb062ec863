"""Rules of the house.

Import-linter holds the layers (pyproject.toml), ruff the complexity.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.helpers.room import ROOT
from tests.helpers.writers import Writers, find_writers

CODE = ("elastic_mbs", "stress", "benchmarks", "examples", "tools")
# Openings that pydocstyle's D401 lets pass: it holds verbs to the imperative form alone.
PRONOUN = re.compile(
    r"(What|Whether|Those|That|Which|Where|Of|The same|As|Has|When|How|Why|To|All|One)\b"
)
SOURCES = {".py", ".c", ".cpp", ".h", ".js", ".css", ".html"}


def files_of(folder: str) -> list[Path]:
    found = (ROOT / folder).rglob("*")
    return sorted(path for path in found if path.suffix in SOURCES and "results" not in path.parts)


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


# torch's names, and those of named tuples
NOT_OURS = {*dir(torch.nn.Module()), *dir(torch.Tensor), "_make", "_replace"}


@functools.cache
def package() -> dict[Path, ast.Module]:
    """Return the trees of the package's sources. Every worker imports this file, few read them."""
    found = (path for path in files_of("elastic_mbs") if path.suffix == ".py")
    return {path: ast.parse(path.read_text()) for path in found}


def functions() -> Iterator[tuple[str, int]]:
    for path, tree in package().items():
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
    ours = {path: private_names(tree) for path, tree in package().items()}
    everywhere = set().union(*ours.values())
    for path, tree in package().items():
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


def openings() -> Iterator[str]:
    """Yield the place and the first line of every docstring."""
    for path in (path for root in CODE for path in files_of(root) if path.suffix == ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
            ) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"


def test_a_docstring_opens_with_a_verb_or_a_noun() -> None:
    found = [each for each in openings() if PRONOUN.match(each.partition(": ")[2])]
    assert found == []


@functools.cache
def writers_of_the_engine() -> Writers:
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): (
            path.read_text()
        )
        for path in package()
    }
    return find_writers(sources, "elastic_mbs.engine")


def test_a_field_of_the_engine_is_assigned_in_one_module() -> None:
    found = writers_of_the_engine()
    assert found.several() == {}
    assert len(found.modules) > 50  # or the search would find nothing


def test_the_object_of_every_assignment_to_a_field_of_the_engine_is_known() -> None:
    # Lightning's own results have no annotations.
    foreign = "elastic_mbs.integrations.lightning_private"
    unknown = writers_of_the_engine().unknown
    assert [each for each in unknown if not each.startswith(foreign)] == []
