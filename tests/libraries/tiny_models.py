"""Tiny models, tokenizers and data of the tests with other libraries, made here without a network."""

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = """{% for message in messages %}{{ '<|' + message['role'] + '|>' }}\
{% if message['role'] == 'assistant' %}{% generation %}\
{{ message['content'] + '<|end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
SPECIAL = ["<unk>", "<pad>", "<|end|>", "<|user|>", "<|assistant|>"]
QUESTION, ANSWER = "what is two plus three", "two plus three is five "
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512, "bos_token_id": 2,
    "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a chat template that marks the assistant's turns."""
    tokens = Tokenizer(models.BPE(unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokens.train_from_iterator([QUESTION, ANSWER], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="<unk>", pad_token="<pad>", eos_token="<|end|>"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def model(kind: str = "llama", **changes: Any) -> Any:
    """Return a random model in bf16."""
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def texts(number: int = 32) -> Dataset:
    """Return plain texts of different lengths."""
    return Dataset.from_list([{"text": ANSWER * (n % 5 + 1)} for n in range(number)])


def chats(number: int = 32) -> Dataset:
    """Return conversations of one turn."""
    return Dataset.from_list([{"messages": [*asked(), said(n % 5 + 1)]} for n in range(number)])


def preferences(number: int = 32) -> Dataset:
    """Return a prompt with a chosen and a rejected answer."""
    return Dataset.from_list(
        [{"prompt": asked(), "chosen": [said(n % 3 + 1)], "rejected": [said(4)]} for n in range(number)]
    )


def prompts(number: int = 32) -> Dataset:
    """Return prompts alone."""
    return Dataset.from_list([{"prompt": asked()} for _ in range(number)])


def asked() -> list[dict[str, str]]:
    """Return the user's turn."""
    return [{"role": "user", "content": QUESTION}]


def said(times: int) -> dict[str, str]:
    """Return an assistant's turn."""
    return {"role": "assistant", "content": ANSWER * times}
