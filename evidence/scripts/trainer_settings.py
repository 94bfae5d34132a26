"""transformers' Trainer with its users' usual settings: what ``plan``'s choices are compared with.

    python -m evidence.scripts.trainer_settings OUT.jsonl [--model NAME ...] [--seconds N] [--several]
        [--tiny]

bf16 weights and autocast, SDPA, fused AdamW, gradient checkpointing for large models; each also with
torch_compile and with Liger's kernels. With ``--several``, on two GPUs by torchrun: FSDP2, whose weights
accelerate turns into fp32 unless nothing is cast (``pure``), and DDP. The micro-batch is the largest power
of two within the tokens of a step that runs; the rest of the step is accumulated. Random weights and tokens.
Every run is a process of its own. A row is not a Record: fields of the run, status, seconds of each step
after the first two, peaks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from evidence.scripts.plan_choices import GOALS, SEVERAL, Goal
from trainfit.spec.printable import say
from trainfit.spec.provenance import commit, now

Row = dict[str, Any]

LARGE_PARAMS = 3e9
"""Models from this size are trained with gradient checkpointing."""
STEPS, WARMUP = 5, 2
LIMIT_S = 150.0


class Setting(NamedTuple):
    """What users vary."""

    compile: bool = False
    liger: bool = False
    strategy: str = ""
    """Of several GPUs: ``fsdp2`` or ``ddp``."""
    pure: bool = False
    """bf16 weights without autocast, and no fp32 copy of them."""


ALONE = (Setting(), Setting(liger=True), Setting(compile=True), Setting(compile=True, liger=True))
"""Of all models before the next, the quick ones first."""
TOGETHER = (
    Setting(strategy="fsdp2"),
    Setting(strategy="fsdp2", liger=True),
    Setting(strategy="fsdp2", liger=True, pure=True),
    Setting(strategy="ddp", liger=True),
    Setting(strategy="fsdp2", pure=True),
    Setting(strategy="ddp"),
    Setting(compile=True, strategy="fsdp2"),
)
"""The same of two GPUs."""
LIGER = ("llama", "mistral", "gemma", "qwen2", "qwen3")
"""Model types that Liger's kernels know, of those used here."""


def train(run: Row) -> Row:
    """Train for a few steps in this process; return seconds of the steps and peaks."""
    import torch
    from torch.utils.data import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from trainfit.catalog.load import model_config

    data = dict(model_config(run["model"]))
    if run["tiny"]:
        data |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
        data |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(**data)
    config.use_cache = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = run.get("count", 1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if run["tune"] != "full":
        from peft import LoraConfig, get_peft_model

        model.requires_grad_(False)
        targets = [
            name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        ]
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
        model.enable_input_require_grads()

    class Tokens(Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 1 << 16

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            chance = torch.Generator().manual_seed(index)
            tokens = torch.randint(0, config.vocab_size, (run["seq"],), generator=chance)
            return {"input_ids": tokens, "labels": tokens.clone()}

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times = list[float]()

        def _read(self) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self._read()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self._read()

    clock = Clock()
    several: Row = {}
    if run.get("strategy") == "fsdp2":
        wrapped = {"activation_checkpointing": run["checkpointing"]}
        several = {"fsdp": True, "fsdp_config": {"version": 2, **wrapped}}
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=run["micro"],
            gradient_accumulation_steps=run["tokens_per_step"] // run["seq"] // run["micro"] // ranks,
            bf16=not run.get("pure"), gradient_checkpointing=run["checkpointing"] and not several,
            torch_compile=run["compile"],
            use_liger_kernel=run["liger"], optim="adamw_torch_fused", max_steps=STEPS + WARMUP,
            save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
            dataloader_num_workers=0 if run["tiny"] else 2, use_cpu=device == "cpu",
            **several,
        )  # fmt: skip
        Trainer(model=model, args=settings, train_dataset=Tokens(), callbacks=[clock]).train()
    steps_s = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)][WARMUP:]
    found: Row = {"status": "done", "steps_s": steps_s, "step_s": statistics.median(steps_s)}
    found["tokens_per_s"] = run["tokens_per_step"] / found["step_s"]
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {
            "gpu": torch.cuda.get_device_name(), "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(), "device_bytes_at_end": total - free,
        }  # fmt: skip
    return found


def in_process(run: Row, limit_s: float) -> Row:
    """Train in a process of its own; an ending without a result is named."""
    command = [sys.executable, "-m"]
    if run.get("count", 1) > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={run['count']}", "-m"]
    command += ["evidence.scripts.trainer_settings", "--train", json.dumps(run)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"status": "timeout"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    (Path(tempfile.gettempdir()) / "trainer-failed.txt").write_text(done.stderr, encoding="utf-8")
    words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    last = next((line for line in reversed(words) if "Error" in line), words[-1])
    status = "out-of-memory" if "OutOfMemoryError" in done.stderr else "crashed"
    return {"status": status, "message": last[:300]}


def run_of(goal: Goal, setting: Setting, tiny: bool) -> Row | None:
    """Return the run of a model, its micro-batch still to be found; None: Liger does not know the model."""
    from trainfit.catalog.load import model, model_config

    row = model(goal.model)
    if setting.liger and model_config(goal.model)["model_type"] not in LIGER:
        return None
    several = {"count": goal.count, "strategy": setting.strategy, "pure": setting.pure}
    return {
        "model": goal.model, "seq": 64 if tiny else goal.seq, "tune": goal.tune,
        "tokens_per_step": 256 if tiny else goal.tokens_per_step,
        "checkpointing": row is not None and (row.published_params or 0) >= LARGE_PARAMS,
        "compile": setting.compile, "liger": setting.liger, "tiny": tiny,
        **(several if goal.count > 1 else {}),
    }  # fmt: skip


def measured(run: Row, largest: int, limit_s: float) -> Row:
    """Return the run with the largest micro-batch that runs, from ``largest`` down."""
    began, micro = time.monotonic(), largest
    while True:
        one = {**run, "micro": micro}
        found = in_process(one, min(LIMIT_S, limit_s - (time.monotonic() - began)))
        if found["status"] != "out-of-memory" or micro == 1:
            return {**one, **found}
        micro //= 2


def main() -> None:
    """Measure every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--model", action="append", help="only these")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of the whole command")
    parser.add_argument("--several", action="store_true", help="on two GPUs")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--train", help="train one run in this process and print its row")
    args = parser.parse_args()
    if args.train:
        row = train(json.loads(args.train))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(row))
        return
    if args.out is None:
        parser.error("OUT.jsonl is missing")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    deadline = time.monotonic() + args.seconds
    fitting: dict[tuple[str | bool, ...], int] = {}
    # 4-bit weights need bitsandbytes.
    every = SEVERAL if args.several else GOALS
    goals = [one for one in every if one.tune != "qlora" and (not args.model or one.model in args.model)]
    for setting, goal in itertools.product(TOGETHER if args.several else ALONE, goals):
        run = run_of(goal, setting, args.tiny)
        if run is None:
            continue
        left = deadline - time.monotonic()
        if left < LIMIT_S / 3:
            say(f"stopped: {left:.0f} s are left")
            return
        # Compiled runs start with the micro-batch that fits uncompiled.
        kind = goal.model, *setting[1:]
        largest = int(run["tokens_per_step"] // run["seq"] // goal.count)
        row = measured(run, fitting.get(kind) or largest, left)
        if row["status"] == "done":
            fitting.setdefault(kind, row["micro"])
        with args.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**row, "at": now(), "commit": commit()}) + "\n")
        say(
            f"{row['model']} micro {row['micro']} checkpointing {row['checkpointing']} compile "
            f"{row['compile']} liger {row['liger']} {setting.strategy}{' pure' * setting.pure}: "
            f"{row['status']} {row.get('tokens_per_s', 0):,.0f} "
            f"tokens/s {row.get('message', '')}"
        )


if __name__ == "__main__":
    main()
