"""The example scripts of the trainers run as they are: they learn although memory runs out."""

from pathlib import Path

import pytest

from tests.helpers.examples import check_script

SCRIPTS = [
    "accelerate_loop",
    "fabric_loop",
    "post_training/dpo_trainer",
    "post_training/grpo_trainer",
    "post_training/kto_trainer",
    "post_training/reward_trainer",
    "post_training/rloo_trainer",
    "lightning_trainer",
    "transformers_trainer",
]


# trl's own default says it in the old words
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")
@pytest.mark.no_oom_injection
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_learns_through_errors(
    script: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # where a trainer leaves its files
    check_script(script, capsys)
