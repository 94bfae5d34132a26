"""Conversations, a small tokenizer with a chat template, and corpora made of them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainfit.spec.data import Data
from trainfit.training.corpus import Corpora, open_corpora
from trainfit.training.options import TextData, TrainOptions

TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = f"{{% for m in messages %}}{TURN}{{% endfor %}}{ASK}"

ASKED, ANSWERED = "Where is it?", "In the attic, on the shelf."
MESSAGES = [
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": ANSWERED},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Gone."},
]


def saved_tokenizer(folder: Path, template: str | None) -> str:
    """Save a byte-level tokenizer with ChatML's tokens as transformers does."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    tokenizer.train_from_iterator([ASKED, ANSWERED] * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template,
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.save_pretrained(str(folder))
    return str(folder)


def written(path: Path, rows: list[Any]) -> TextData:
    text = json.dumps(rows, indent=1) if path.suffix == ".json" else "\n".join(map(json.dumps, rows))
    path.write_text(text)
    return TextData(path=str(path))


def opened(
    tmp_path: Path, rows: list[Any], template: str | None = PLAIN, *, seq: int = 64, **data: Any
) -> Corpora:
    options = TrainOptions(
        out=str(tmp_path), data=written(tmp_path / "rows.jsonl", rows), eval_fraction=0.0,
        tokenizer=saved_tokenizer(tmp_path / "tokenizer", template), chat_template=data.get("chat_template"),
    )  # fmt: skip
    return open_corpora(tmp_path / "data", options, vocabulary=400, seq=seq, data=Data(**data))
