"""``compile: block`` with other techniques: equal blocks share a graph, however many they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.testing import CompileCounter

from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.cli.main import main
from trainfit.spec.recipe import Adapter, Batch, Hardware, Offload, Optimizer, Recipe
from trainfit.spec.recompute import Budget, Every, LayerRun, Layers
from trainfit.step import assemble
from virtual_runs import recipe_of

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CPU = torch.device("cpu")
DEPTH, MOST_GRAPHS = 6, 4
"""More blocks than graphs for one function, of which Dynamo makes eight by default; what is over its limit
runs eagerly, and nothing says so."""
LORA = Adapter(kind="lora", rank=2)
IN_BACKWARD = Optimizer(in_backward="block")
BY_BLOCK = Layers(
    layers=tuple(LayerRun(recompute=level, count=2) for level in ("full", "none", "full"))  # pyright: ignore[reportArgumentType]
)
BOTH = {"recompute": "full", "offload": Offload(activations=True, weights=True), "optimizer": IN_BACKWARD}
CASES: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({"recompute": "full"}, 1),
    ({"recompute": "selective"}, 1),
    ({"recompute": Budget(budget=0.5)}, 1),
    # Blocks of two kinds.
    ({"recompute": Every(every=2)}, 2),
    ({"recompute": BY_BLOCK}, 2),
    # A forward without autograd, and one with it in the backward.
    ({"recompute": "full", "offload": Offload(activations=True)}, 2),
    (BOTH, 2),
    # The frozen embeddings' output needs no gradient: the first block has a graph of its own of each kind.
    ({"adapter": LORA}, 2),
    ({"adapter": LORA, "quantize": "nf4"}, 2),
    ({"adapter": LORA, "recompute": BY_BLOCK}, 3),
    ({"adapter": LORA, "recompute": Every(every=3)}, 3),
    ({"adapter": LORA, "recompute": "full", "offload": Offload(activations=True)}, 4),
    ({"adapter": Adapter(kind="prompt", tokens=4)}, 1),
    ({"adapter": Adapter(kind="prefix", tokens=4)}, 2),
    ({"loss": "chunked"}, 1),
    ({"precision": "amp-bf16", "optimizer": IN_BACKWARD}, 1),
    ({"attention": "eager", "batch": Batch(micro=1, seq=16, accumulate=2)}, 1),
    ({"accumulation": "fused", "batch": Batch(micro=1, seq=16, accumulate=2)}, 1),
]


def graphs(recipe: Recipe) -> int:
    """Captured in two steps on this CPU; an error where Dynamo gives a block up."""
    counter = CompileCounter()
    with dynamo_config.patch(fail_on_recompile_limit_hit=True, recompile_limit=MOST_GRAPHS):
        step = assemble(recipe, CPU, compiler=lambda module: module.compile(backend=counter))
        for index in range(2):
            step(step.random_batches(index))
    return counter.frame_count


@pytest.mark.parametrize(("fields", "expected"), CASES, ids=str)
def test_equal_blocks_share_a_graph(fields: dict[str, Any], expected: int) -> None:
    assert graphs(tiny_recipe("native", DEPTH, compile="block", **fields)) == expected


def test_transformers_blocks_share_a_graph() -> None:
    recipe = tiny_recipe("hf", DEPTH, compile="block", adapter=LORA, recompute=BY_BLOCK)
    assert graphs(recipe) == 3


def test_fp8_layers_share_a_graph() -> None:
    config = TINY_LLAMA | {"intermediate_size": 1040, "num_hidden_layers": DEPTH}
    fields = {"batch": Batch(micro=1, seq=16), "precision": "fp8", "compile": "block"}
    assert graphs(recipe_of(config, "native", hardware=Hardware(gpu="cpu"), **fields)) == 1


# -- an operation that refuses while code is captured: efficient attention has no grouped key heads

GROUPED = {"attention": "efficient", "precision": "bf16"}
SAYS = (
    "attention: the enabled SDPA backends have no kernel for bfloat16, head size 8, grouped key heads; "
    "use attention: sdpa or math"
)


@pytest.mark.parametrize(
    ("mode", "recompute"), [("block", "none"), ("block", "selective"), ("model", "full")]
)
def test_what_an_operation_refuses_is_reported_in_its_words(
    mode: Any, recompute: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    path.write_text(tiny_recipe("native", compile=mode, recompute=recompute, **GROUPED).model_dump_json())
    assert main(["predict", str(path)]) == 65
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"trainfit: error: {path}: {SAYS}\n"
