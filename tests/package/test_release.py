"""Agreement of published files: versions, classifiers and the matrix of the tests."""

import inspect
import re
import tomllib
from typing import Any

import yaml

import elastic_mbs
from elastic_mbs.options import GROUPS
from tests.helpers.room import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_one_version_everywhere() -> None:
    assert read_yaml("CITATION.cff")["version"] == elastic_mbs.__version__
    entry = re.search(r"^## .*?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entry
    assert entry[1] == elastic_mbs.__version__


def test_the_tests_run_on_what_the_classifiers_name() -> None:
    matrix = read_yaml(".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: 3." in each]
    assert matrix["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"
    oldest = next(need for need in PROJECT["dependencies"] if need.startswith("torch"))
    assert matrix["torch"] == [f"torch=={oldest.removeprefix('torch>=')}.*", "torch"]


def test_the_checks_are_parts_of_ci() -> None:
    jobs = read_yaml(".github/workflows/tests.yml")["jobs"]
    parts = re.findall(r'^  "(\w+) ', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {*jobs["checks"]["strategy"]["matrix"]["part"], "docs", "test"} == {*parts}


def test_what_is_published_needs_no_tools() -> None:
    assert {"dev", "docs", "test"} & {*PROJECT["optional-dependencies"]} == set()


def frozen(what: str) -> str:
    """Return the text of one point of the list of frozen names, by its first words."""
    text = (ROOT / "SECURITY.md").read_text()
    points = text.partition("### Frozen")[2].partition("###")[0].split("\n- ")
    return next(point for point in points if point.startswith(what))


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_frozen_methods_have_their_parameters() -> None:
    methods = re.findall(r"`(\w+)\(([^)`]*)\)`", frozen("`ElasticMBS`"))
    assert methods
    for name, parameters in methods:
        there = inspect.signature(getattr(elastic_mbs.ElasticMBS, name)).parameters
        assert set(re.findall(r"\w+", parameters)) <= {*there}, name


def test_every_method_of_the_runtime_is_frozen() -> None:
    runtime = elastic_mbs.ElasticMBS
    members = set().union(*(public(kind) for kind in runtime.__mro__[:-1]))
    assert set(re.findall(r"`(\w+)[(`]", frozen("`ElasticMBS`"))[1:]) == members


def test_every_group_of_options_is_frozen() -> None:
    names = re.findall(r"`(\w+)`", frozen("the options"))[1:]
    assert {*names} == {kind.__name__ for kind in GROUPS.values()}
