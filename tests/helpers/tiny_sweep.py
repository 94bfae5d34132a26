"""A sweep of one tiny model, as a file's text."""

from pathlib import Path
from typing import Any

from trainfit.sweeps.read import read_sweep

MODEL = (
    "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 1, vocab_size: 384, max_position_embeddings: 64}"
)
BASE = (
    f"base: {{model: {{config: {MODEL}}}, precision: fp32, batch: {{micro: 4, seq: 32}}, "
    "hardware: {gpu: cpu}, optimizer: {lr: 3.0e-3}}\ndevice: cpu\n"
)


def sweep_of(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return read_sweep(path)
