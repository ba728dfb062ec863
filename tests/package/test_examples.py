"""Example scripts, one per way in, run as they are; tests/integrations has the trainers'."""

import pytest

from tests.helpers.examples import check_script

SCRIPTS = ["context_manager", "decorator", "loop", "embeddings", "tokens", "evaluation"]


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_learns_through_errors(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_script(script, capsys)
