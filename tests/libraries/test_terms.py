"""The names of other libraries in docs/concepts.md exist in these libraries."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/concepts.md"
ROWS = [line.split("|")[1:-1] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
NAME = re.compile(r"`([\w.]+)`")


def names(column: int) -> list[str]:
    return [name for row in ROWS if len(row) == 4 for name in NAME.findall(row[column])]


def fields(*kinds: type) -> set[str]:
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


def test_names_of_hugging_face() -> None:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from peft import LoraConfig
    from transformers import TrainingArguments
    from transformers.distributed import DistributedConfig
    from transformers.utils.quantization_config import BitsAndBytesConfig
    from trl.trainer.sft_config import SFTConfig

    known = fields(TrainingArguments, ParallelismConfig, FullyShardedDataParallelPlugin, LoraConfig)
    known |= fields(SFTConfig, DistributedConfig) | {"LoraConfig", "DistributedConfig"}
    known |= {name for name in ("load_in_4bit",) if hasattr(BitsAndBytesConfig, name)}
    found = names(1)
    assert len(found) > 15
    assert [name for name in found if name not in known] == []


def _torchtitan() -> Iterator[str]:
    from torchtitan.components import loss
    from torchtitan.config import configs
    from torchtitan.distributed import activation_checkpoint

    yield from fields(configs.TrainingConfig, configs.ParallelismConfig, configs.CompileConfig)
    yield from (*vars(activation_checkpoint), *vars(loss), "compile")


def test_names_of_torchtitan() -> None:
    found = names(2)
    assert len(found) > 15
    assert [name for name in found if name not in set(_torchtitan())] == []


@pytest.mark.parametrize("row", [row for row in ROWS if len(row) == 2 and "objective" in row[0]])
def test_names_of_trl(row: list[str]) -> None:
    from trl.trainer.grpo_config import GRPOConfig

    assert {name for name in NAME.findall(row[1])} <= fields(GRPOConfig)
