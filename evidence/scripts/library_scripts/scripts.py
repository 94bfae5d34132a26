"""Twelve training scripts, each as a user of its library writes it: a function that trains and returns.

Sizes are such that an H100 decides the time of most steps; models are of about 0.1 to 0.6 billion parameters.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 12
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards boil quartz in vexing jars".split()
SIZES: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32768, "max_position_embeddings": 4096, "bos_token_id": 2,
    "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
CHAT = """{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
SCRIPTS: dict[str, Callable[[Path], None]] = {}
BEFORE: dict[str, Callable[[Path], None]] = {}
"""What is made in the folder before the script: a checkpoint that it loads."""


def script(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Register a script by its function's name; it is called with an empty folder."""
    SCRIPTS[function.__name__] = function
    return function


def tokenizer() -> Any:
    """Return a tokenizer with one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<pad>", "<|end|>", "<|user|>", "<|assistant|>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.add_special_tokens(special)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="<unk>", pad_token="<pad>", eos_token="<|end|>"
    )
    made.chat_template = CHAT
    return made


def text(number: int, length: int) -> str:
    """Return so many words, different for each number."""
    return " ".join(WORDS[(number * 7 + k * k) % len(WORDS)] for k in range(length))


def model(kind: str = "llama", **changes: Any) -> Any:
    """Return a random model in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**SIZES, **changes}), dtype=torch.float32
    )


def rows(batch: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of random ids with their labels."""
    ids = torch.randint(5, 20, (batch * STEPS * 4, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_options(batch: int, **changes: Any) -> dict[str, Any]:
    """Return what all of transformers' and TRL's trainers are given."""
    return {
        "max_steps": STEPS, "per_device_train_batch_size": batch, "bf16": True, "report_to": [],
        "save_strategy": "no", "logging_steps": 4, "disable_tqdm": True, "dataloader_num_workers": 0,
        **changes,
    }  # fmt: skip


@script
def trainer_full(folder: Path) -> None:
    """transformers' Trainer, bf16 autocast, recomputation."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(folder), **trainer_options(8, gradient_checkpointing=True))
    Trainer(model(), arguments, train_dataset=rows(8, 2048)).train()  # type: ignore[arg-type]


@script
def trl_sft(folder: Path) -> None:
    """TRL's SFTTrainer, packing, its default loss."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"text": text(n, 900)} for n in range(400)])
    arguments = SFTConfig(str(folder), max_length=2048, packing=True, **trainer_options(4))
    SFTTrainer(model("qwen2"), args=arguments, train_dataset=data, processing_class=tokenizer()).train()


@script
def trl_sft_liger(folder: Path) -> None:
    """TRL's SFTTrainer with Liger's kernels, without recomputation."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"text": text(n, 1200)} for n in range(200)])
    arguments = SFTConfig(
        str(folder),
        max_length=1024,
        use_liger_kernel=True,
        gradient_checkpointing=False,
        **trainer_options(8),
    )
    SFTTrainer(model("llama"), args=arguments, train_dataset=data, processing_class=tokenizer()).train()


@script
def trl_dpo(folder: Path) -> None:
    """TRL's DPOTrainer with its frozen reference."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    asked = [{"role": "user", "content": text(3, 100)}]
    data = Dataset.from_list(
        [
            {
                "prompt": asked,
                "chosen": [{"role": "assistant", "content": text(n, 400)}],
                "rejected": [{"role": "assistant", "content": text(n + 1, 400)}],
            }
            for n in range(200)
        ]
    )
    arguments = DPOConfig(str(folder / "out"), max_length=512, **trainer_options(4))
    DPOTrainer(
        str(folder / "model"), args=arguments, train_dataset=data, processing_class=tokenizer()
    ).train()


@script
def trl_grpo(folder: Path) -> None:
    """TRL's GRPOTrainer, rollouts by transformers' generate."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": text(n, 100)}]} for n in range(200)])

    def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        return [float(number % 3) for number, _ in enumerate(completion_ids)]

    arguments = GRPOConfig(
        str(folder), num_generations=8, max_completion_length=64, num_iterations=1, **trainer_options(8)
    )
    # An end that is never drawn: every rollout has its full length.
    made = model("llama", num_hidden_layers=8, eos_token_id=32000)
    GRPOTrainer(
        made, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer()
    ).train()


@script
def qlora_bitsandbytes(folder: Path) -> None:
    """bitsandbytes' nf4 with double quantisation, PEFT's LoRA, 8-bit AdamW."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(
        folder / "model", quantization_config=quantized, dtype=torch.bfloat16, device_map={"": 0}
    )
    data = Dataset.from_list([{"text": text(n, 1200)} for n in range(200)])
    arguments = SFTConfig(str(folder / "out"), max_length=1024, optim="adamw_bnb_8bit", **trainer_options(8))
    adapter = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    SFTTrainer(
        base, args=arguments, train_dataset=data, processing_class=tokenizer(), peft_config=adapter
    ).train()


@script
def bitsandbytes_adamw8bit(folder: Path) -> None:
    """A plain loop in bf16 with bitsandbytes' 8-bit AdamW."""
    import bitsandbytes

    made = model("llama").to("cuda", torch.bfloat16)
    optimizer = bitsandbytes.optim.AdamW8bit(made.parameters(), lr=1e-4)
    data = rows(8, 1024)
    for step in range(STEPS):
        batch = torch.stack([row["input_ids"] for row in data[step * 8 : step * 8 + 8]]).cuda()
        made(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@script
def liger_loop(folder: Path) -> None:
    """A plain loop in bf16 with all of Liger's kernels."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    made = model("llama").to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(made.parameters(), fused=True)
    data = rows(8, 2048)
    for step in range(STEPS):
        batch = torch.stack([row["input_ids"] for row in data[step * 8 : step * 8 + 8]]).cuda()
        made(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@script
def accelerate_loop(folder: Path) -> None:
    """accelerate: bf16, accumulation over two batches, clipping."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    made = model("mistral", sliding_window=None)
    optimizer = torch.optim.AdamW(made.parameters())
    loader = DataLoader(rows(8, 1024), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    made, optimizer, loader = accelerator.prepare(made, optimizer, loader)
    for number, batch in enumerate(loader):
        if number == 2 * STEPS:
            break
        with accelerator.accumulate(made):
            accelerator.backward(made(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@script
def lightning_fit(folder: Path) -> None:
    """Lightning's Trainer, bf16-mixed, accumulation."""
    import lightning
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = model("gpt_neox", rotary_pct=0.25)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.network(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=STEPS, accumulate_grad_batches=2,
        gradient_clip_val=1.0, default_root_dir=folder, enable_model_summary=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(rows(8, 1024), batch_size=8))  # type: ignore[arg-type]


class Block(nn.Module):
    """A GPT block as nanoGPT has it: fused projections, flash attention, GELU."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (one.view(b, s, self.heads, width // self.heads).transpose(1, 2) for one in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """GPT-2's small model: tied head, learned positions."""

    def __init__(self, vocabulary: int = 50304, width: int = 768, layers: int = 12, s: int = 1024):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(s, width)
        self.blocks = nn.ModuleList(Block(width, 12) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


@script
def nanogpt_loop(folder: Path) -> None:
    """nanoGPT's loop: autocast, compiled model, accumulation over 2, clipping, cosine."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    made = Gpt().cuda()
    optimizer = torch.optim.AdamW(made.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(made)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for _ in range(2):
            ids = torch.randint(0, 50000, (16, 1025)).pin_memory().cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = compiled(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@script
def lora_peft_loop(folder: Path) -> None:
    """PEFT's LoRA on a bf16 model in a plain loop, with recomputation."""
    from peft import LoraConfig, get_peft_model

    base = model("qwen3", head_dim=64).to("cuda", torch.bfloat16)
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    made = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    data = rows(8, 2048)
    for step in range(STEPS):
        batch = torch.stack([row["input_ids"] for row in data[step * 8 : step * 8 + 8]]).cuda()
        made(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


BEFORE["trl_dpo"] = lambda folder: model("qwen2").save_pretrained(folder / "model")
BEFORE["qlora_bitsandbytes"] = lambda folder: (
    model("llama").to(torch.bfloat16).save_pretrained(folder / "model")
)


@contextmanager
def prepared(name: str) -> Iterator[Callable[[], None]]:
    """Yield a script as a function without arguments, with a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        if name in BEFORE:
            BEFORE[name](Path(folder))
        yield partial(SCRIPTS[name], Path(folder))
