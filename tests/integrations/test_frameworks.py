import pytest

from elastic_mbs.cli.doctor.machine import trainers
from elastic_mbs.errors import UnsupportedError
from elastic_mbs.integrations import frameworks
from elastic_mbs.integrations.frameworks import FRAMEWORKS, Framework


def with_version(monkeypatch: pytest.MonkeyPatch, found: str) -> Framework:
    monkeypatch.setattr(frameworks, "version", lambda package: found)
    return Framework("trainer", "extra", oldest="2.5", newest="2.6.6")


def test_every_framework_is_installed_here_in_a_tested_version() -> None:
    assert {framework.package: framework.tested for framework in FRAMEWORKS} == {
        "transformers": True,
        "lightning": True,
        "pytorch-lightning": True,
        "accelerate": True,
        "trl": True,
    }


@pytest.mark.parametrize("found", ["2.5.0", "2.5", "2.6.0rc1", "2.6.9", "2.6.6.post0"])
def test_every_release_between_the_oldest_and_the_newest_passes(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    assert with_version(monkeypatch, found).tested
    with_version(monkeypatch, found).check()


def test_an_older_version_is_refused_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        UnsupportedError, match=r"trainer 2\.4\.9 is older .* pip install 'trainer>=2\.5'"
    ):
        with_version(monkeypatch, "2.4.9").check()


@pytest.mark.parametrize("found", ["2.7", "3.0.1"])
def test_a_newer_version_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str
) -> None:
    with_version(monkeypatch, found).check()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("elastic_mbs", "WARNING")
    assert f"trainer {found} is newer" in record.getMessage()


def test_an_absent_package_is_neither_tested_nor_refused() -> None:
    absent = Framework("no-such-package-of-ours", "extra", oldest="1", newest="1")
    assert (absent.installed, absent.tested) == (None, None)
    absent.check()


def test_the_doctor_names_what_is_installed_and_whether_it_was_tested() -> None:
    assert {(trainer.package, trainer.tested) for trainer in trainers()} == {
        ("transformers", True),
        ("lightning", True),
        ("pytorch-lightning", True),
        ("accelerate", True),
        ("trl", True),
    }
