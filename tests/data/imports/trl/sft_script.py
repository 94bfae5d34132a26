"""A script in the manner of TRL's and bitsandbytes' documentation: a QLoRA fine-tuning of SmolLM."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

MODEL = "HuggingFaceTB/SmolLM-135M"

quantized = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, quantization_config=quantized)
adapter = LoraConfig(
    r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"
)
arguments = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2 * 2,
    gradient_checkpointing=True,
    max_length=512,
    packing=True,
    optim="paged_adamw_8bit",
    learning_rate=2e-4,
    bf16=True,
    logging_steps=10,
)
trainer = SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=load_dataset("stanfordnlp/imdb", split="train"),
    peft_config=adapter,
)
trainer.train()
