"""Shell completion: names of the catalog, without torch."""

import pytest

from trainfit.cli import completion
from trainfit.cli.main import main


@pytest.mark.parametrize(
    ("words", "among", "not_among"),
    [
        ("trainfit predict qwen3", "qwen3-8b", "gpt2"),
        ("trainfit predict tiny", "tiny-cpu", "gpt2"),
        ("trainfit plan gpt2 --gpu h200,rtx-4", "h200,rtx-4090", "h200"),
        ("trainfit train gpt2 --precision amp", "amp-bf16", "bf16"),
        ("trainfit predict gpt2 --set batch.", "batch.micro=", "seed="),
        ("trainfit bench at", "attention", "flash"),
        ("trainfit gpus b2", "b200", "h200"),
        ("trainfit models gpt", "gpt2", "h200"),
        ("trainfit pre", "predict", "plan"),
    ],
)
def test_a_shell_is_given_the_names_that_begin_so(
    words: str,
    among: str,
    not_among: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("_TRAINFIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    found = capsys.readouterr().out.split()
    assert among in found
    assert not_among not in found


def test_every_name_that_is_completed_is_one_that_is_taken() -> None:
    from trainfit.catalog.load import gpu

    assert [gpu(name).name for name in completion.gpus("")] == completion.gpus("")
    assert "h200" in completion.gpus("H2")
