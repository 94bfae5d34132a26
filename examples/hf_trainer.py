"""Train a causal language model with transformers.Trainer (needs accelerate).

    python examples/hf_trainer.py                  # trains; on a GPU it prints the memory it took
    python examples/hf_trainer.py --predict        # what that run will take, on a machine without a GPU
    python examples/hf_trainer.py --tiny           # a toy size, for a CPU

Nothing here but the last lines of ``main`` knows of trainfit: the Trainer's own loop is traced, with its
mixed precision, its clipping and its batches fetched ahead.
"""

import argparse
import contextlib
import functools
import json
import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

SIZES = {
    "gpt2": dict(n_embd=1024, n_layer=24, n_head=16),
    "llama": dict(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
}  # fmt: skip
"""openai-community/gpt2-medium and TinyLlama/TinyLlama-1.1B."""
TINY = {
    "gpt2": dict(vocab_size=128, n_embd=32, n_layer=2, n_head=4),
    "llama": dict(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    ),
}  # fmt: skip


class CountingUp(Dataset):
    """Sequences of tokens that count upwards from a random start: something that a small model learns."""

    def __init__(self, length: int, seq: int, vocabulary: int):
        starts = torch.randint(0, vocabulary, (length, 1), generator=torch.Generator().manual_seed(0))
        self.tokens = (starts + torch.arange(seq)) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].clone()}


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train for ``args.steps`` steps; the mean loss and the seconds of a step."""
    config = AutoConfig.for_model(args.model, **(TINY if args.tiny else SIZES)[args.model], use_cache=False)
    model = AutoModelForCausalLM.from_config(config)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    seq = 32 if args.tiny else args.seq
    per_step = args.batch_size * args.accumulate
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch_size,
            gradient_accumulation_steps=args.accumulate,
            bf16=args.bf16 and torch.cuda.is_available(),
            torch_compile=args.compile,
            max_steps=args.steps,
            learning_rate=1e-4,
            warmup_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            seed=0,
        )
        dataset = CountingUp(args.steps * per_step, seq, config.vocab_size)
        trainer = Trainer(model=model, args=training, train_dataset=dataset)
        result = trainer.train()
    return {"loss": result.training_loss, "step_s": result.metrics["train_runtime"] / args.steps}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(SIZES), default="gpt2")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true", help="recompute each layer in the backward")
    parser.add_argument("--fp32", dest="bf16", action="store_false", help="no mixed precision")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="the Trainer's torch_compile")
    parser.add_argument("--tiny", action="store_true", help="a toy model")
    parser.add_argument("--predict", action="store_true", help="do not train: say what training will take")
    parser.add_argument("--gpu", default="h200", help="the GPU to predict for")
    args = parser.parse_args(arguments)
    if args.predict:
        import trainfit

        with contextlib.redirect_stdout(sys.stderr):  # the Trainer prints its losses
            traced = trainfit.trace(functools.partial(train, args), gpu=args.gpu)
        print(traced, file=sys.stderr)
        print(json.dumps({"example": f"hf_trainer/{args.model}", "predicted": traced.model_dump()}))
        return 0
    with contextlib.redirect_stdout(sys.stderr):
        report: dict[str, object] = {"example": f"hf_trainer/{args.model}", **train(args)}
    if torch.cuda.is_available():
        report["measured"] = {
            "gpu": torch.cuda.get_device_name(),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
