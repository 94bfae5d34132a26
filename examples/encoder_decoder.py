"""Train a transformers encoder-decoder (T5 or BART, from its configuration) in a plain PyTorch loop.

    python examples/encoder_decoder.py                  # trains; on a GPU it prints the memory it took
    python examples/encoder_decoder.py --predict        # what that run will take, on a machine without a GPU
    python examples/encoder_decoder.py --tiny           # a toy size, for a CPU

The task: write the source backwards. Sources differ in length and are padded, as text is. Nothing here but
the last lines of ``main`` knows of trainfit.
"""

import argparse
import functools
import json
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForSeq2SeqLM, get_linear_schedule_with_warmup

SIZES = {
    "t5": dict(
        vocab_size=32128,
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=24,
        num_heads=16,
        decoder_start_token_id=0,
    ),
    "bart": dict(
        vocab_size=50265, d_model=1024, encoder_layers=12, decoder_layers=12, max_position_embeddings=1024
    ),
}
"""google-t5/t5-large and facebook/bart-large."""
TINY = {
    "t5": dict(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0),
    "bart": dict(
        vocab_size=128, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64,
    ),
}  # fmt: skip


class Reversal(Dataset):
    """Random sequences of ``source`` tokens, a few of them padding; the target is the source backwards."""

    def __init__(self, length: int, source: int, target: int, vocabulary: int, pad: int):
        self.length, self.source, self.target, self.vocabulary, self.pad = (
            length,
            source,
            target,
            vocabulary,
            pad,
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        source = torch.randint(3, self.vocabulary, (self.source,), generator=generator)
        length = self.source - index % (self.source // 4)
        mask = (torch.arange(self.source) < length).long()
        source = source.masked_fill(mask == 0, self.pad)
        labels = source[:length].flip(0)[: self.target]
        labels = torch.nn.functional.pad(labels, (0, self.target - len(labels)), value=-100)
        return {"input_ids": source, "attention_mask": mask, "labels": labels}


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train for ``args.steps`` steps; the last loss and the seconds of a step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = AutoConfig.for_model(args.model, **(TINY if args.tiny else SIZES)[args.model])
    model = AutoModelForSeq2SeqLM.from_config(config)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    model.to(device)
    if args.compile:
        model.compile()
    source, target = (32, 16) if args.tiny else (args.source, args.target)
    dataset = Reversal(args.steps * args.batch_size, source, target, config.vocab_size, config.pad_token_id)
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=device == "cuda",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=args.steps)

    model.train()
    loss_value, seconds = 0.0, 0.0
    for step, batch in enumerate(loader):
        start = time.perf_counter()
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            outputs = model(**batch)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss_value = outputs.loss.item()
        seconds = time.perf_counter() - start
        print(f"step {step + 1}: loss {loss_value:.3f}, {seconds:.3f} s", file=sys.stderr)
    return {"loss": loss_value, "step_s": seconds}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(SIZES), default="t5")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--source", type=int, default=512, help="tokens of a source")
    parser.add_argument("--target", type=int, default=128, help="tokens of a target")
    parser.add_argument("--checkpointing", action="store_true", help="recompute each layer in the backward")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--tiny", action="store_true", help="a toy model")
    parser.add_argument("--predict", action="store_true", help="do not train: say what training will take")
    parser.add_argument("--gpu", default="h200", help="the GPU to predict for")
    args = parser.parse_args(arguments)
    if args.predict:
        import trainfit

        traced = trainfit.trace(functools.partial(train, args), gpu=args.gpu)
        print(traced, file=sys.stderr)
        print(json.dumps({"example": f"encoder_decoder/{args.model}", "predicted": traced.model_dump()}))
        return 0
    report: dict[str, object] = {"example": f"encoder_decoder/{args.model}", **train(args)}
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
