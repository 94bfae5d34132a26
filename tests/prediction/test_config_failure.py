"""A config.json that transformers takes and cannot run is the config's fault.

What only fails with us is ours.
"""

import json
from pathlib import Path

import pytest

from trainfit.cli.main import main
from trainfit.prediction import trace
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from

SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
MORE_EXPERTS_CHOSEN_THAN_THERE = {
    **SIZES, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4,
}  # fmt: skip
ROTARY_WIDER_THAN_A_HEAD = {
    "model_type": "gptj", "vocab_size": 100, "n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 64,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LENGTH_IS_IN_THE_CONFIG = {"model_type": "reformer", "vocab_size": 100, "is_decoder": True}


@pytest.mark.parametrize(
    ("config", "exception", "precision"),
    [
        (MORE_EXPERTS_CHOSEN_THAN_THERE, "RuntimeError: k not in range", "bf16"),
        (ROTARY_WIDER_THAN_A_HEAD, "RuntimeError: Attempting to broadcast", "amp-bf16"),
        (LENGTH_IS_IN_THE_CONFIG, "ValueError: If training, make sure that config.axial_pos_shape", "bf16"),
    ],
)
def test_a_forward_that_transformers_itself_cannot_run_is_refused_in_one_line(
    config: dict, exception: str, precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(config))
    settings = ["--set", "batch.seq=32", "--set", f"precision={precision}"]
    code = main(["predict", str(path), *settings, "--no-cache"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "[transformers]" not in line]
    assert code == 65
    assert "odd.json: model.config" in line
    assert exception in line
    assert "correct the config" in line


def test_a_forward_that_reads_values_of_its_tensors_is_refused() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    parts = ("patcher", "encoder", "decoder", "global")
    config = {"model_type": "blt", "vocab_size": 260, **{f"{part}_config": sizes for part in parts}}
    with pytest.raises(InputError, match=r"depends on values of its tensors \(modeling_blt\.py, line \d+\)"):
        trace.trace(recipe_from({"model": {"config": config}, "batch": {"seq": 32}}))


def test_it_is_told_apart_in_compiled_code_too() -> None:
    recipe = recipe_from(
        {"model": {"config": ROTARY_WIDER_THAN_A_HEAD}, "batch": {"seq": 32}, "compile": "block"}
    )
    with pytest.raises(InputError, match="RuntimeError: Attempting to broadcast"):
        trace.trace(recipe)


@pytest.mark.parametrize("config", [{**SIZES, "model_type": "llama"}, ROTARY_WIDER_THAN_A_HEAD])
def test_a_failure_elsewhere_stays_ours(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(trace, "run_steps", broken)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        trace.trace(recipe_from({"model": {"config": config}, "batch": {"seq": 32}}))
