"""What the README points at is there."""

import re
from pathlib import Path

import elastic_mbs
from tests.helpers.room import ROOT

README = (ROOT / "README.md").read_text()


def test_every_link_and_picture_exists() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert len(targets) > 10
    assert [target for target in targets if not (Path(ROOT) / target).exists()] == []


def test_every_name_of_the_package_that_it_imports_is_public() -> None:
    names = {name.strip() for line in re.findall(r"^from elastic_mbs import (.+)$", README, re.MULTILINE) for name in line.split(",")}
    assert names
    assert names <= set(elastic_mbs.__all__)
