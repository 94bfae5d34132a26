"""Predict and measure peak memory of training scripts for two GPUs that know nothing of trainfit.

``python -m evidence.scripts.user_scripts_several_gpus predict OUT.jsonl`` traces each script as rank 0 of
two, without a GPU; ``... measure OUT.jsonl`` runs each under torchrun on two GPUs and writes both ranks'
peaks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainfit.spec.printable import say
from trainfit.spec.provenance import commit, now

Data = dict[str, Any]

GPU = "h200"
RANKS = 2
STEPS = 3
GPT2 = {"model_type": "gpt2"}
LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_600M = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip


def _start() -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    return local_rank


def _model(config: Data) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, use_cache=False))


def _train(model: Any, optimizer: Any, vocabulary: int, batch: int, seq: int, *, autocast: bool) -> None:
    import torch

    for _ in range(STEPS):
        tokens = torch.randint(vocabulary, (batch, seq), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_gpt2() -> None:
    """GPT-2 of 124M parameters under DDP with autocast."""
    import torch

    rank = _start()
    model = torch.nn.parallel.DistributedDataParallel(_model(GPT2).to(rank), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    _train(model, optimizer, 50257, 8, 1024, autocast=True)


def fsdp2_llama_1b() -> None:
    """Llama of 1.2B parameters, built on every GPU, then sharded: fp32 weights, bf16 compute."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _start()
    with torch.device("cuda"):
        model = _model(LLAMA_1B)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    _train(model, optimizer, LLAMA_1B["vocab_size"], 2, 2048, autocast=False)


def tensor_parallel_llama_1b() -> None:
    """The same model in bf16, its attention and MLPs cut over the GPUs."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _start()
    mesh = init_device_mesh("cuda", (RANKS,))
    with torch.device("cuda"):
        model = _model(LLAMA_1B).to(torch.bfloat16)
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    for layer in model.model.layers:
        plan: Data = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, mesh, plan)
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": cut}, {"params": whole}], lr=1e-4)
    _train(model, optimizer, LLAMA_1B["vocab_size"], 2, 2048, autocast=False)


def trainer_fsdp2_qwen3_600m() -> None:
    """The Hugging Face Trainer under accelerate's FSDP2 with gradient checkpointing."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Tokens(torch.utils.data.Dataset[Data]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Data:
            tokens = torch.randint(QWEN3_600M["vocab_size"], (2048,))
            return {"input_ids": tokens, "labels": tokens}

    os.environ.update(
        ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP="Qwen3DecoderLayer", FSDP_RESHARD_AFTER_FORWARD="true",
        FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT", FSDP_CPU_RAM_EFFICIENT_LOADING="false",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, max_steps=STEPS, bf16=True, report_to=[],
            save_strategy="no", gradient_checkpointing=True, disable_tqdm=True,
        )  # fmt: skip
        Trainer(model=_model(QWEN3_600M), args=arguments, train_dataset=Tokens()).train()


SCRIPTS: tuple[Callable[[], None], ...] = (
    ddp_gpt2, fsdp2_llama_1b, tensor_parallel_llama_1b, trainer_fsdp2_qwen3_600m,
)  # fmt: skip


def predicted(script: Callable[[], None]) -> Data:
    """Return the predicted peaks of rank 0."""
    import trainfit

    start, environment = time.perf_counter(), dict(os.environ)
    try:
        found = trainfit.trace(script, gpu=GPU, steps=STEPS, world_size=RANKS)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "peak_device_bytes": found.peak_device_bytes,
        "peak_phase": found.peak_phase,
        "phases": found.phases.model_dump(),
        "step_s": found.step_s,
        "traffic": [one.model_dump() for one in found.traffic],
        "assumptions": found.assumptions,
        "versions": found.versions,
    }


def measured(script: Callable[[], None]) -> list[Data]:
    """Return the peaks of each rank, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
            "-m", "evidence.scripts.user_scripts_several_gpus", "rank", folder, "--only", script.__name__,
        ]  # fmt: skip
        environment = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "8", **os.environ}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        if done.returncode:
            ranks, _, _ = done.stderr.partition("torch/distributed/elastic")  # The launcher's log follows.
            return [{"error": ranks[-1500:]}]
        return [json.loads(Path(folder, f"{rank}.json").read_text("utf-8")) for rank in range(RANKS)]


def run_rank(script: Callable[[], None], folder: Path) -> None:
    """Run a script as one rank and write its peaks."""
    import torch
    import torch.distributed as dist

    script()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    found = {
        "rank": dist.get_rank(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_bytes_at_end": total - free,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("predict", "measure", "rank"))
    parser.add_argument("into", type=Path, help="JSON Lines to append to; rank: a folder")
    parser.add_argument("--only", nargs="*", help="names of scripts")
    arguments = parser.parse_args()
    for script in SCRIPTS:
        if arguments.only and script.__name__ not in arguments.only:
            continue
        if arguments.what == "rank":
            run_rank(script, arguments.into)
            continue
        row: Data = {"script": script.__name__, "commit": commit(), "made_at": now()}
        if arguments.what == "predict":
            row |= {"predicted": predicted(script)}
        else:
            row |= {"ranks": measured(script)}
        with arguments.into.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        say(f"{script.__name__} {json.dumps(row.get('predicted') or row['ranks'])[:300]}")


if __name__ == "__main__":
    main()
