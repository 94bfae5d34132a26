"""Training runs small enough for tests, and an observer that keeps the events it receives."""

import json
import os
import signal
from pathlib import Path

from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.training.observer import EvalMetrics, RunStart, StepMetrics, TrainSummary
from trainfit.training.options import SyntheticData, TrainOptions

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 384, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 384, "n_positions": 64}


def tiny(*settings: str, config: dict = LLAMA) -> Recipe:
    data = {
        "model": {"config": config, "name": "tiny"},
        "batch": {"micro": 4, "seq": 32},
        "precision": "fp32",
    }
    return recipe_from(data, ["optimizer.lr=3e-3", *settings])


def options_for(out: Path, steps: int, **more) -> TrainOptions:
    data = SyntheticData(num_documents=60)
    return TrainOptions(
        **({"out": str(out), "steps": steps, "data": data, "eval_fraction": 0.1, "eval_sequences": 8} | more)
    )


class Listener:
    """Notes everything; ``do`` is called after each step."""

    def __init__(self, do=lambda metrics: None):
        self.do, self.events, self.steps, self.closed = do, [], [], 0

    def on_start(self, run: RunStart) -> None:
        self.run = run
        self.events.append("start")

    def on_step(self, metrics: StepMetrics) -> None:
        self.events.append(metrics.step)
        self.steps.append(metrics)
        self.do(metrics)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self.events.append("eval")

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.events.append("saved")

    def on_end(self, summary: TrainSummary) -> None:
        self.events.append("end")

    def close(self) -> None:
        self.closed += 1


def stop_at(step: int, number: int = signal.SIGTERM):
    return lambda metrics: os.kill(os.getpid(), number) if metrics.step == step else None


def losses_in_log(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "one line a step, none twice"
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}
