"""The packages that the integrations work with, and the versions of them that were tested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from elastic_mbs.errors import UnsupportedError
from elastic_mbs.events import logger

Release = tuple[int, ...]


@dataclass(frozen=True)
class Framework:
    """A package with an integration, and the range of its releases that were tested."""

    package: str
    extra: str
    oldest: str
    newest: str

    @property
    def installed(self) -> str | None:
        """The version that is installed; None where none is."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    @property
    def tested(self) -> bool | None:
        """True if the installed version lies in the tested range; None where none is installed.

        Patch releases of the newest version count as tested.
        """
        found = self.installed
        return (
            None
            if found is None
            else _release(self.oldest) <= _release(found)
            and _release(found)[:2] <= _release(self.newest)[:2]
        )

    def check(self) -> None:
        """Refuse a version older than all that were tested, and warn of a newer one.

        Raises:
            UnsupportedError: the installed version is too old.
        """
        found = self.installed
        if found is None or self.tested:
            return
        if _release(found) < _release(self.oldest):
            raise UnsupportedError(
                f"{self.package} {found} is older than the oldest version that elastic_mbs was "
                f"tested with ({self.oldest}): pip install '{self.package}>={self.oldest}'"
            )
        logger.warning(
            "%s %s is newer than the versions that elastic_mbs was tested with (%s to %s): compare "
            "the first losses with a run without it",
            self.package,
            found,
            self.oldest,
            self.newest,
        )


def _release(text: str) -> Release:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


TRANSFORMERS = Framework("transformers", "hf", oldest="5.19.0", newest="5.24.0")
LIGHTNING = Framework("lightning", "lightning", oldest="2.5.5", newest="2.6.6")
PYTORCH_LIGHTNING = Framework("pytorch-lightning", "lightning", oldest="2.5.5", newest="2.6.6")
ACCELERATE = Framework("accelerate", "accelerate", oldest="1.10.0", newest="1.15.0")
TRL = Framework("trl", "trl", oldest="1.16.0", newest="1.16.0")
FRAMEWORKS = (TRANSFORMERS, LIGHTNING, PYTORCH_LIGHTNING, ACCELERATE, TRL)
