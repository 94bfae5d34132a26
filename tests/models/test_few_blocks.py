"""A trace with outlines of the blocks that it does not keep predicts what one with all blocks built does."""

import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.catalog.load import gpu
from trainfit.models import few_blocks
from trainfit.models.build import build_model
from trainfit.prediction import shortening, trace
from trainfit.prediction.estimate import estimate
from trainfit.prediction.machine import machine_with
from trainfit.spec.recipe import ModelSpec, Recipe

DEEP = TINY_LLAMA | {"num_hidden_layers": 9}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 9, "vocab_size": 128, "n_positions": 64}
GEMMA3 = {
    **TINY_LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 8, "sliding_window": 8,
    "query_pre_attn_scalar": 8, "sliding_window_pattern": 3,
}  # fmt: skip


def _of(config: dict[str, Any], **fields: Any) -> Recipe:
    recipe = tiny_recipe(**{"precision": "bf16", "hardware": {"gpu": "h200"}, **fields})
    return recipe.model_copy(update={"model": ModelSpec(config=config)})


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(_of(DEEP), id="llama"),
        pytest.param(_of(GPT2), id="gpt2"),
        pytest.param(_of(GEMMA3), id="every third layer differs"),
        pytest.param(_of(DEEP, quantize="nf4", adapter={"kind": "lora"}), id="qlora"),
        pytest.param(tiny_recipe("native", 9, hardware={"gpu": "h200"}), id="native"),
        pytest.param(_of(DEEP | {"num_hidden_layers": 70}, hardware={"gpu": "h200", "count": 2}), id="ranks"),
    ],
)
def test_outlines_change_nothing(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    outlines: list[bool] = []
    check = shortening.check_no_outlines

    def checked(blocks: Any) -> None:
        check(blocks)
        outlines.append(True)

    monkeypatch.setattr(shortening, "check_no_outlines", checked)
    found = estimate(recipe, machine_with(gpu("h200")), trace.trace(recipe))
    assert outlines
    monkeypatch.setattr(trace, "few_blocks", lambda is_kept: nullcontext())
    whole = estimate(recipe, machine_with(gpu("h200")), trace.trace(recipe))
    assert json.loads(found.model_dump_json()) == json.loads(whole.model_dump_json())


def test_an_outline_has_no_memory_and_a_built_block_does() -> None:
    with few_blocks.few_blocks(lambda number, num_blocks: number in (0, num_blocks - 1)):
        model = build_model(tiny_recipe("native", 5).model, dtype=torch.float32, device="cpu")
    blocks = list(model.layers)  # pyright: ignore
    assert [few_blocks.is_outline(one) for one in blocks] == [False, True, True, True, False]
    assert all(t.is_meta == few_blocks.is_outline(one) for one in blocks for t in one.parameters())
    with pytest.raises(few_blocks.OutlinesLeftError):
        few_blocks.check_no_outlines(blocks)
