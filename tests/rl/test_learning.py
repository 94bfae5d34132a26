"""A small model learns: supervised from answers that are mostly wrong, then by GRPO from rewards alone."""

import json
import random
from pathlib import Path
from typing import Any

from tiny_policies import options_for, rollouts_in, trained
from trainfit.api.exports import export
from trainfit.rl.environments.arithmetic import Arithmetic
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.training.loop import train
from trainfit.training.options import TextData

MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 64,
}  # fmt: skip
LARGEST, RIGHT = 2, 0.4
COMMON: dict[str, Any] = {"precision": "fp32", "hardware": {"gpu": "cpu"}}


def write_answers(file: Path) -> None:
    """Write tasks with answers of which under a half are right."""
    tasks, choose = Arithmetic(LARGEST, seed=1), random.Random(0)
    with file.open("w") as rows:
        for number in range(4000):
            task = tasks.prompt(number)
            right = eval(task.removesuffix("="))
            answer = right if choose.random() < RIGHT else choose.randint(-LARGEST, 2 * LARGEST)
            rows.write(json.dumps({"prompt": task, "completion": str(answer)}) + "\n")


def test_rewards_teach_arithmetic(tmp_path: Path) -> None:
    write_answers(tmp_path / "answers.jsonl")
    native = {"config": MODEL, "implementation": "native"}
    batch = {"micro": 16, "seq": 64}
    supervised = recipe_from(
        {"model": native, "batch": batch, "data": {"pack": "documents"}, "optimizer": {"lr": 3e-3}, **COMMON}
    )
    data = TextData(path=str(tmp_path / "answers.jsonl"))
    train(supervised, options_for(tmp_path / "supervised", 250, data=data))
    export(tmp_path / "supervised", tmp_path / "model")
    policy = recipe_from({
        "model": {**native, "weights": str(tmp_path / "model")}, "batch": {"micro": 128, "seq": 16},
        "optimizer": {"lr": 1e-3}, **COMMON,
        "objective": {
            "name": "grpo", "arguments": {"largest": LARGEST}, "group": 16, "prompts": 8, "max_prompt": 8,
            "max_new": 4, "kl": 0.01, "reference": "copy", "rollout": {"kv_cache": "fp32", "batch": 128},
        },
    })  # fmt: skip
    tokenizer = str(tmp_path / "model" / "tokenizer.json")
    options = options_for(tmp_path / "policy", 80, tokenizer=tokenizer, eval_sequences=256)
    summary = trained(policy, options)
    rewards = [one["shares"]["right"] for one in rollouts_in(tmp_path / "policy")]
    before, after = sum(rewards[:5]) / 5, sum(rewards[-10:]) / 10
    assert before < 0.55
    assert after > 0.7
    assert after > before + 0.25
    shares = summary.evaluations[-1].shares
    assert shares is not None
    assert shares["right"] > 0.7
