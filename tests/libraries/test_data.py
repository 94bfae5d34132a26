"""Parquet files and datasets, and labels against TRL's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_data import MESSAGES, PLAIN, opened, saved_tokenizer
from trainfit.spec.data import Data
from trainfit.spec.errors import InputError
from trainfit.training import documents
from trainfit.training.corpus import open_corpora
from trainfit.training.data.chat import CHATML
from trainfit.training.options import TextData, TrainOptions, data_from, sources

datasets: Any = pytest.importorskip("datasets")
ROWS = [{"messages": MESSAGES, "id": number} for number in range(5)]


def tokens_of(tmp_path: Path, source: dict[str, Any]) -> np.ndarray:
    options = TrainOptions(
        out=str(tmp_path),
        eval_fraction=0.0,
        tokenizer=saved_tokenizer(tmp_path / "tokenizer", PLAIN),
        **source,
    )
    corpora = open_corpora(tmp_path / "data", options, vocabulary=400, seq=64)
    assert corpora.train.learned is not None
    return np.stack([corpora.train.tokens, corpora.train.learned])


def test_parquet_gives_the_tokens_of_jsonl(tmp_path):
    """Arrow fills the missing keys of messages with nulls, which do not reach the template."""
    rows = [{"messages": [*MESSAGES[:3], {**MESSAGES[3], "name": "x"}]} for _ in range(5)]
    (tmp_path / "json").mkdir()
    expected = opened(tmp_path / "json", rows).train
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    found = tokens_of(tmp_path, {"data": data_from(str(tmp_path / "rows.parquet"))})
    assert found[0].tolist() == expected.tokens.tolist()
    assert found[1].tolist() == expected.learned.tolist()


def test_a_dataset_by_name(tmp_path, monkeypatch):
    """A folder stands for a name on the Hub, which tests do not reach."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "named"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    section = Data(train=f"hub:{folder}", eval_split="test", max_documents=3)
    options = TrainOptions(**({"out": str(tmp_path)} | sources(section)))
    for source in (options.data, options.eval_data):
        assert source is not None
        assert [len(one.messages) for one in documents.records(source)] == [4, 4, 4]
    with pytest.raises(InputError, match="cannot be read"):
        list(documents.records(data_from(f"hub:{tmp_path / 'absent'}")))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 99 + b"PAR1"])
def test_a_file_that_is_no_parquet(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(InputError, match="not a Parquet file") as refused:
        list(documents.records(TextData(path=str(tmp_path / "a.parquet"))))
    assert "\n" not in str(refused.value)


def test_answers_are_those_that_trl_trains_on(tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    ours = opened(tmp_path, [{"messages": MESSAGES}], CHATML).train
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.pad_token = "<|endoftext|>"
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=400,
        num_key_value_heads=2,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir=str(tmp_path / "trl"), assistant_only_loss=True, report_to=[], use_cpu=True, bf16=False
        ),
        train_dataset=datasets.Dataset.from_list([{"messages": MESSAGES}]),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch["labels"][0].tolist()
    assert ours.tokens.tolist() == batch["input_ids"][0].tolist()
    assert ours.learned is not None
    assert [label != -100 for label in labels] == [bool(one) for one in ours.learned]
