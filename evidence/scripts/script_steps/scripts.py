"""Training scripts of plain PyTorch and of real libraries, which know nothing of trainfit.

Each trains a model of random weights on random data for ``steps`` optimizer steps. ``small`` shrinks the
batch, not the model: the host then decides the step.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

Script = Callable[[int, bool], None]


def _causal(kind: str, **fields: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, use_cache=False, **fields))


LLAMA_600M = {
    "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 20, "num_attention_heads": 24,
    "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
QWEN3_600M = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2_1_5B = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


def _token_rows(count: int, seq: int, vocabulary: int, **more: Any) -> Any:
    import torch

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = torch.randint(vocabulary, (seq,))
            return {"input_ids": tokens, "labels": tokens.clone(), **more}

    return Rows()


def _trainer(model: Any, rows: Any, steps: int, batch: int, **arguments: Any) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch, max_steps=steps, report_to=[],
            save_strategy="no", disable_tqdm=True, logging_steps=10, **arguments,
        )  # fmt: skip
        Trainer(model=model, args=settings, train_dataset=rows).train()


# May be learned from


def trainer_llama_recompute(steps: int, small: bool) -> None:
    """Trainer, a Llama of 0.6B parameters, bf16 autocast, activation checkpointing."""
    batch, seq = (1, 64) if small else (4, 1024)
    rows = _token_rows(4096, seq, 32000)
    _trainer(_causal("llama", **LLAMA_600M), rows, steps, batch, bf16=True, gradient_checkpointing=True)


def trainer_gpt2(steps: int, small: bool) -> None:
    """Trainer, GPT-2 of 124M parameters, bf16 autocast, two micro-batches."""
    batch, seq = (1, 64) if small else (8, 512)
    rows = _token_rows(4096, seq, 50257)
    _trainer(_causal("gpt2"), rows, steps, batch, bf16=True, gradient_accumulation_steps=2)


def loop_qwen3(steps: int, small: bool) -> None:
    """A plain loop, Qwen3-0.6B, autocast, four micro-batches, clipping, the loss read each step."""
    import torch

    batch, seq = (1, 64) if small else (2, 1024)
    model = _causal("qwen3", **QWEN3_600M).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        total = 0.0
        for _ in range(4):
            tokens = torch.randint(151936, (batch, seq)).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss / 4
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def plain_gpt(steps: int, small: bool) -> None:
    """A GPT of 124M parameters written by hand, autocast, fused AdamW, a learning rate each step."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, width: int, heads: int):
            super().__init__()
            self.heads = heads
            self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, seq, width = x.shape
            parts = self.qkv(self.norm_1(x)).split(width, dim=2)
            q, k, v = (p.view(batch, seq, self.heads, -1).transpose(1, 2) for p in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).contiguous().view(batch, seq, width))
            return x + self.down(F.gelu(self.up(self.norm_2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(50304, 768), nn.Embedding(1024, 768)
            self.blocks = nn.ModuleList(Block(768, 12) for _ in range(12))
            self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 50304, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    batch, seq = (1, 64) if small else (12, 1024)
    model = Gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 10)
        tokens = torch.randint(50304, (batch, seq + 1)).pin_memory().cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def trainer_lora_recompute(steps: int, small: bool) -> None:
    """Trainer with PEFT's LoRA on all linear layers, Qwen2.5-1.5B in bf16, activation checkpointing."""
    import torch
    from peft import LoraConfig, get_peft_model

    batch, seq = (1, 64) if small else (4, 512)
    model = _causal("qwen2", **QWEN2_1_5B).to(torch.bfloat16)
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = _token_rows(4096, seq, 151936)
    _trainer(model, rows, steps, batch, bf16=True, gradient_checkpointing=True)


def lightning_gpt2(steps: int, small: bool) -> None:
    """Lightning, GPT-2 of 124M parameters, bf16-mixed, a learning-rate schedule."""
    import pytorch_lightning as pl
    import torch

    batch, seq = (1, 64) if small else (8, 512)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _causal("gpt2")

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    loader = torch.utils.data.DataLoader(_token_rows(4096, seq, 50257), batch_size=batch)
    trainer = pl.Trainer(
        max_steps=steps, precision="bf16-mixed", accelerator="gpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)


def resnet_loop(steps: int, small: bool) -> None:
    """A plain loop, ResNet-50, channels_last, autocast, SGD with momentum."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    batch, size = (2, 64) if small else (64, 224)
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).cuda()
    model = model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        images = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (batch,), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accelerate_bert(steps: int, small: bool) -> None:
    """Accelerate, BERT base with masked words, padding masks, bf16, a linear schedule."""
    import torch
    from accelerate import Accelerator
    from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

    batch, seq = (1, 32) if small else (32, 128)
    accelerator = Accelerator(mixed_precision="bf16")
    model = BertForMaskedLM(BertConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = _token_rows(8192, seq, 30522, attention_mask=torch.ones(seq, dtype=torch.int64))
    loader = torch.utils.data.DataLoader(rows, batch_size=batch, shuffle=True, drop_last=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, 1000)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    for number, data in enumerate(loader):
        if number == steps:
            break
        loss = model(**data).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


# Held out


def trainer_bert_fp16(steps: int, small: bool) -> None:
    """Trainer, BERT base classifies sequences, fp16 with a loss scale."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    batch, seq = (1, 32) if small else (32, 128)

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8192

        def __getitem__(self, index: int) -> dict[str, Any]:
            mask = torch.ones(seq, dtype=torch.int64)
            return {"input_ids": torch.randint(30522, (seq,)), "attention_mask": mask, "labels": index % 2}

    _trainer(BertForSequenceClassification(BertConfig()), Rows(), steps, batch, fp16=True)


def vit_average(steps: int, small: bool) -> None:
    """A plain loop, ViT base, autocast, AdamW, a moving average of the weights."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    batch = 2 if small else 64
    model = ViTForImageClassification(ViTConfig(num_labels=1000)).cuda().train()
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for _ in range(steps):
        images = torch.randn(batch, 3, 224, 224, device="cuda")
        labels = torch.randint(1000, (batch,), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, parameter in zip(average, model.parameters(), strict=True):
                kept.lerp_(parameter, 0.001)


def lora_loop(steps: int, small: bool) -> None:
    """A plain loop with PEFT's LoRA, Qwen3-0.6B in bf16, the loss read every step."""
    import torch
    from peft import LoraConfig, get_peft_model

    batch, seq = (1, 64) if small else (2, 1024)
    model = _causal("qwen3", **QWEN3_600M).to(torch.bfloat16).cuda()
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(steps):
        tokens = torch.randint(151936, (batch, seq)).to("cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def trainer_t5(steps: int, small: bool) -> None:
    """Trainer, T5 base, bf16 autocast, activation checkpointing."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    batch, seq = (1, 32) if small else (8, 256)
    config = T5Config(
        d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0, use_cache=False
    )

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": torch.randint(32128, (seq,)), "labels": torch.randint(32128, (seq,))}

    model = T5ForConditionalGeneration(config)
    _trainer(model, Rows(), steps, batch, bf16=True, gradient_checkpointing=True)


# Held out from the second fit


def trainer_qwen3(steps: int, small: bool) -> None:
    """Trainer, Qwen3-0.6B, bf16 autocast."""
    batch, seq = (1, 64) if small else (2, 512)
    rows = _token_rows(4096, seq, 151936)
    _trainer(_causal("qwen3", **QWEN3_600M), rows, steps, batch, bf16=True)


def lightning_bert(steps: int, small: bool) -> None:
    """Lightning, BERT base classifies sequences, fp16 with a loss scale."""
    import pytorch_lightning as pl
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    batch, seq = (1, 32) if small else (32, 128)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = BertForSequenceClassification(BertConfig())

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(input_ids=batch["input_ids"], labels=batch["labels"][:, 0] % 2).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=2e-5)

    loader = torch.utils.data.DataLoader(_token_rows(8192, seq, 30522), batch_size=batch)
    trainer = pl.Trainer(
        max_steps=steps, precision="16-mixed", accelerator="gpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)


def accelerate_vit(steps: int, small: bool) -> None:
    """Accelerate, ViT small, bf16, two micro-batches, clipping."""
    import torch
    from accelerate import Accelerator
    from transformers import ViTConfig, ViTForImageClassification

    batch = 2 if small else 64
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    config = ViTConfig(num_labels=100, hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    for _ in range(2 * steps):
        with accelerator.accumulate(model):
            images = torch.randn(batch, 3, 224, 224, device="cuda")
            labels = torch.randint(100, (batch,), device="cuda")
            accelerator.backward(model(pixel_values=images, labels=labels).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def loop_opt_recompute(steps: int, small: bool) -> None:
    """A plain loop, OPT-125M in fp32, activation checkpointing, SGD, the loss read every step."""
    import torch

    batch, seq = (1, 64) if small else (2, 512)
    model = _causal("opt").cuda()
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        tokens = torch.randint(50272, (batch, seq), device="cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


LEARNED: tuple[Script, ...] = (
    trainer_llama_recompute, trainer_gpt2, loop_qwen3, plain_gpt, trainer_lora_recompute, lightning_gpt2,
    resnet_loop, accelerate_bert,
)  # fmt: skip
HELD_OUT: tuple[Script, ...] = (trainer_bert_fp16, vit_average, lora_loop, trainer_t5)
"""From the first fit; the second learned from them too."""
HELD_OUT_AGAIN: tuple[Script, ...] = (trainer_qwen3, lightning_bert, accelerate_vit, loop_opt_recompute)


def named(name: str) -> Script:
    """Return a script by its name."""
    return next(script for script in (*LEARNED, *HELD_OUT, *HELD_OUT_AGAIN) if script.__name__ == name)


def quiet() -> None:
    """Keep libraries from looking for the network or a terminal."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
