"""Failures of a training run on two GPUs: killed, resumed, stopped, signalled.

    python -m evidence.scripts.train_several_gpus RESULTS.jsonl [--device cpu] [--folder FOLDER]

Trains a model of 0.6B parameters with FSDP2 and with DDP, ends one rank, and compares the losses after a
resume with those of an unbroken run, bit by bit. Prints a table; RESULTS.jsonl gets a line a case.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainfit.training.log import LOG

MODEL = (
    "model.implementation=native", "batch.micro=4", "batch.seq=1024", "precision=bf16", "attention=sdpa",
    "optimizer.lr=1e-4", "hardware.gpu=h200",
)  # fmt: skip
TINY = {
    "model": {
        "config": {
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 384,
            "max_position_embeddings": 1024,
        },
    },
}  # fmt: skip
"""For a trial of this program on a CPU."""
STEPS, SAVE_EVERY, END_AT = 30, 10, 16
"""Optimizer steps, interval of checkpoints, and the step in which a rank is ended."""
LIMIT_S = 100.0


class Run:
    """One start of ``trainfit train --gpus 2``."""

    def __init__(self, out: Path, arguments: list[str]):
        self.out, self._errors = out, out.with_suffix(".errors")
        self._start_s = time.monotonic()
        self._pids: dict[int, int] = {}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainfit", "train", *arguments, "--out", str(out), "--gpus", "2"],
                stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the ranks, by rank."""
        launcher = self._process.pid
        with suppress(OSError):  # A rank or the launcher ends meanwhile.
            for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                self._pids |= {int(one[5:]): int(pid) for one in variables if one.startswith(b"RANK=")}
        return self._pids

    def wait_for(self, step: int) -> None:
        """Wait until the log has a step, or the run has ended."""
        while self._process.poll() is None and max(losses(self.out), default=0) < step:
            if time.monotonic() - self._start_s > LIMIT_S:
                raise SystemExit(f"no step {step} after {LIMIT_S:.0f} s: {self.end()}")
            time.sleep(0.02)

    def end(self) -> dict[str, Any]:
        """Wait for the end; return exit code, message and time."""
        pids = self.ranks().values()
        waited_s = time.monotonic()
        try:
            self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        ended_s = time.monotonic()
        printed = self._errors.read_text(errors="replace").splitlines()
        lines = [line for line in printed if line.startswith("trainfit:")]
        return {
            "exit_code": self._process.returncode,
            "message": " | ".join(lines),
            "until_end_s": round(ended_s - waited_s, 2),
            "whole_s": round(ended_s - self._start_s, 2),
            "orphans": sum(Path(f"/proc/{pid}").exists() for pid in pids),
        }


def losses(out: Path) -> dict[int, float]:
    """Return the losses in a run's log, by step; the unfinished last line is left out."""
    path = out / LOG
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "train-several-gpus")
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    recipe, settings = "qwen3-0.6b", list(MODEL)
    if given.device == "cpu":
        recipe, settings = str(given.folder / "recipe.yaml"), ["batch.seq=128", "hardware.gpu=h200"]
        Path(recipe).write_text(json.dumps(TINY))
    common = [
        recipe, *(word for setting in settings for word in ("--set", setting)),
        "--device", given.device, "--steps", str(STEPS),
        "--data", "stories:1000", "--no-tensorboard",
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []

    def start(name: str, *more: str) -> Run:
        return Run(given.folder / name, [*common, *more])

    def note(case: str, run: Run, equal_to: Path | None = None) -> None:
        rows.append({"case": case, **run.end(), "steps": len(losses(run.out))})
        if equal_to is not None:
            rows[-1]["equal_losses"] = losses(run.out) == losses(equal_to)
        given.results.parent.mkdir(parents=True, exist_ok=True)
        with given.results.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        sys.stderr.write(f"{json.dumps(rows[-1])}\n")

    for strategy in ("fsdp", "ddp"):
        chosen = ("--set", f"parallel.strategy={strategy}")
        whole = start(f"{strategy}-whole", *chosen)
        note(f"{strategy}: unbroken", whole)
        if strategy == "fsdp":
            case, number = "rank 1 gets SIGKILL", signal.SIGKILL
        else:
            case, number = "rank 0 gets SIGSTOP", signal.SIGSTOP
        chosen += ("--save-every", str(SAVE_EVERY))
        broken = start(f"{strategy}-broken", *chosen)
        broken.wait_for(END_AT)
        os.kill(broken.ranks()[number == signal.SIGKILL], number)
        note(f"{strategy}: {case}", broken)
        resumed = start(f"{strategy}-broken", *chosen, "--resume")
        note(f"{strategy}: resumed", resumed, equal_to=whole.out)
    print_table(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows, and each message below."""
    columns = ("case", "exit_code", "steps", "until_end_s", "whole_s", "orphans", "equal_losses")
    lines = [columns, *(tuple(str(row.get(column, "")) for column in columns) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        sys.stdout.write(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + "\n"
        )
    for row in rows:
        if row["message"]:
            sys.stdout.write(f"{row['case']}: {row['message']}\n")


if __name__ == "__main__":
    main()
