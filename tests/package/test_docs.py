"""README and docs: their Python runs, their links exist, and every error has its entry."""

import ast
import re
from pathlib import Path

import pytest
import torch

import elastic_mbs
from elastic_mbs import errors
from tests.helpers.room import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?P<why><!-- not run: .+ -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
TEXTS = {page: page.read_text() for page in PAGES}
NOTEBOOK = ROOT / "docs" / "examples" / "memory-budget.md"
EXAMPLES = [page for page in PAGES if BLOCK.search(TEXTS[page]) and page != NOTEBOOK]
CELL = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d.]*\d|\d")


def world() -> dict[str, object]:
    """Return the names that the pages take for granted: those of the first block of them all."""
    torch.manual_seed(0)
    first = BLOCK.search(TEXTS[ROOT / "docs" / "getting-started.md"])
    assert first is not None
    names: dict[str, object] = {}
    exec(first["code"], names)
    return names


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
def test_every_block_of_python_runs(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # for the run logs
    for block in BLOCK.finditer(TEXTS[page]):
        code = compile(
            block["code"],
            f"{page.name}:{TEXTS[page][: block.start('code')].count(chr(10)) + 1}",
            "exec",
        )
        if block["why"] is None:
            exec(code, world())


@pytest.mark.no_oom_injection
def test_the_notebook_prints_its_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    cells = CELL.findall(TEXTS[NOTEBOOK])
    for code, output in cells:
        exec(code, names)
        printed = capsys.readouterr().out
        assert NUMBER.sub("N", printed) == NUMBER.sub("N", output)
        # another release of torch may take a little more memory
        shown = [float(number) for number in NUMBER.findall(output)]
        assert [float(number) for number in NUMBER.findall(printed)] == pytest.approx(
            shown, rel=0.1
        )
    assert len(cells) >= 10


def test_every_file_that_is_linked_or_named_exists() -> None:
    # mkdocs looks at the links of its pages
    targets = re.findall(r"\]\(([^)#:]+)\)|^\[\d+\]: (\S+)$", TEXTS[README], re.MULTILINE)
    assert len(targets) > 20
    named = [
        name for text in TEXTS.values() for name in re.findall(r"`([a-z_]+/[\w/]+\.py)`", text)
    ]
    paths = [
        (ROOT / path, ROOT / "elastic_mbs" / path)
        for path in [*("".join(target) for target in targets), *named]
    ]
    assert [places[0] for places in paths if not any(place.exists() for place in places)] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip()) for text in headings}


def test_every_page_that_code_refers_to_has_the_section() -> None:
    sources = [
        source
        for folder in ("elastic_mbs", "stress", "tests")
        for source in (ROOT / folder).rglob("*.py")
    ]
    broken = [
        (source.name, page, anchor)
        for source in sources
        for page, anchor in re.findall(
            r"\b(docs/[\w/-]+\.md)(?:#([\w-]+))?", source.read_text(encoding="utf-8")
        )
        if not (ROOT / page).exists() or (anchor and anchor not in anchors(ROOT / page))
    ]
    assert broken == []


def told(node: ast.AST) -> str:
    """Return the text of a string in code, with "…" for each value that is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(told, node.values))
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"
    return re.sub(r"\{[^{}]*\}", "…", text)


def test_the_quoted_texts_of_refused_replays_are_those_of_the_code() -> None:
    texts = {
        told(node)
        for source in (ROOT / "elastic_mbs").rglob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.JoinedStr | ast.Constant)
    }
    page = TEXTS[ROOT / "docs" / "troubleshooting.md"]
    section = page.partition("### ReplayUnsafeError")[2].partition("\n### ")[0]
    quoted = [" ".join(text.split()) for text in re.findall(r'^- "([^"]+)"', section, re.MULTILINE)]
    assert len(quoted) >= 8
    assert [quote for quote in quoted if not any(quote in text for text in texts)] == []


def test_the_readme_is_read_in_a_few_minutes() -> None:
    lines = TEXTS[README].splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 120] == []


def test_every_error_and_every_public_name_is_documented() -> None:
    entries = re.findall(r"^### (\w+)$", TEXTS[ROOT / "docs" / "troubleshooting.md"], re.MULTILINE)
    assert {name for name in vars(errors) if name.endswith("Error")} - {"ElasticMBSError"} == set(
        entries
    )
    reference = "".join(text for page, text in TEXTS.items() if page.parent.name == "reference")
    named = {
        *re.findall(r"::: elastic_mbs\.(\w+)$", reference, re.MULTILINE),
        *re.findall(r"^ +- (\w+)$", reference, re.MULTILINE),
    }
    modules = {*vars(errors), *vars(elastic_mbs.events), "MemoryBudget"}
    assert [
        name
        for name in elastic_mbs.__all__
        if name not in named | modules and name != "__version__"
    ] == []
