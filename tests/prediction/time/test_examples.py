"""Two shipped examples against their records; tests/libraries has all of them."""

import pytest

from shipped_examples import check_step

FAST = ("image_classification.py --model vit --steps 7", "hf_trainer.py --model llama --steps 7")


@pytest.mark.parametrize("command", FAST)
def test_an_examples_step_takes_what_was_measured(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_step(command, monkeypatch)
