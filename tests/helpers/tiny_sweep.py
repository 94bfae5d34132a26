"""A sweep of one tiny model, as a file's text, and workers that are forks of the sweep's process."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, NoReturn

from trainfit.sweeps import worker
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


def forked_worker(
    role: str, device: str, environment: dict[str, str], log: IO[bytes]
) -> "subprocess.Popen[bytes]":
    """Stand in for ``worker.start``: a fork of this process, which has imported torch."""

    def serve() -> NoReturn:
        os.closerange(3, 1024)  # Popen waits until the child has closed its pipe, as exec would.
        os.environ.update(environment)
        gc.freeze()
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        code: Any = 1
        try:
            code = worker.main(role, device)
        except SystemExit as ended:
            code = ended.code
        finally:
            os._exit(code)

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
    return subprocess.Popen([""], preexec_fn=serve, start_new_session=True, **pipes)
