"""Published GPU-hours of Llama 3.1's pretraining, the MFU that they imply, and predictions at these tokens.

``python -m evidence.scripts.tables.budgets OUT.jsonl`` predicts the recipes anew.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from evidence.scripts.published_runs import RESULTS, SEVERAL_HOSTS
from trainfit.catalog.load import gpu
from trainfit.catalog.load import model as find_model
from trainfit.report.table import markdown_grid
from trainfit.spec.units import format_count

FILE = RESULTS[SEVERAL_HOSTS].parent / "budgets.jsonl"
GPU = "h100-sxm"
COMMON = {
    "batch": {"micro": 1, "seq": 8192}, "precision": "mixed-bf16", "attention": "cudnn",
}  # fmt: skip


class Budget(NamedTuple):
    """A published budget: GPU-hours from the model card, tokens of the pretraining."""

    model: str
    gpu_hours: float
    tokens: float
    recipe: dict[str, Any]
    """Fields beside those of COMMON."""

    @property
    def params(self) -> int:
        found = find_model(self.model).published_params
        assert found is not None
        return found

    @property
    def mfu(self) -> float:
        """Six FLOPs a parameter and token over the hours at the dense bf16 peak."""
        peak = gpu(GPU).peak_flops_per_s["bf16"]
        return 6 * self.params * self.tokens / (self.gpu_hours * 3600 * peak)


BUDGETS = (
    Budget("llama-3.1-8b", 1.46e6, 15e12,
           {"hardware": {"count": 64}, "compile": "block", "loss": "chunked"}),
    Budget("llama-3.1-70b", 7.0e6, 15e12,
           {"hardware": {"count": 256}, "recompute": "full", "loss": "chunked"}),
    Budget("llama-3.1-405b", 30.84e6, 15.6e12,
           {"hardware": {"count": 1024}, "parallel": {"tensor": 8}, "recompute": "full",
            "batch": {"micro": 4}}),
)  # fmt: skip
"""GPU-hours: https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md (H100-80GB,
cumulative, "15T+" tokens). The 405B model saw 15.6T tokens: https://arxiv.org/abs/2407.21783, section 3."""


def recipe_of(budget: Budget) -> Any:
    """Return the predicted recipe."""
    from trainfit.spec.parsing.recipe_file import recipe_from

    model = {"model": {"config": budget.model, "implementation": "native"}, "hardware": {"gpu": GPU}}
    return recipe_from({**COMMON, **model}, over=budget.recipe)


def predicted(budget: Budget) -> dict[str, Any]:
    """Return the prediction of a budget's recipe, and of a run over the same tokens."""
    from trainfit.api.calls import predict
    from trainfit.report.words import describe
    from trainfit.spec.provenance import commit

    found = predict(recipe_of(budget))
    run = found.run(budget.tokens)
    assert found.fits
    assert found.mfu is not None
    return {
        "model": budget.model, "words": describe(found.recipe), "recipe_id": found.recipe_id,
        "commit": commit(), "versions": found.versions, "num_gpus": found.num_gpus, "mfu": found.mfu,
        "gpu_hours": run.gpu_hours, "run_s": run.run_s, "dollars": run.dollars,
    }  # fmt: skip


def rows() -> list[tuple[Budget, dict[str, Any]]]:
    """Return every budget with its kept prediction."""
    kept = {row["model"]: row for row in map(json.loads, FILE.read_text("utf-8").splitlines())}
    return [(one, kept[one.model]) for one in BUDGETS]


def table() -> str:
    """Return published hours and implied MFU, predicted MFU, hours and days."""
    heads = ["model", "tokens", "published GPU-hours", "MFU by 6N, %", "predicted: H100s", "MFU, %", 
             "GPU-hours", "days", "published / predicted"]  # fmt: skip
    lines = [
        [
            one.model, format_count(one.tokens), f"{one.gpu_hours:,.0f}", f"{one.mfu:.1%}".rstrip("%"),
            f"{row['num_gpus']:,}", f"{row['mfu']:.1%}".rstrip("%"), f"{row['gpu_hours']:,.0f}",
            f"{row['run_s'] / 86400:,.0f}", f"{one.gpu_hours / row['gpu_hours']:.1f}",
        ]
        for one, row in rows()
    ]  # fmt: skip
    return markdown_grid(heads, lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    into = parser.parse_args().out
    into.write_text("".join(f"{json.dumps(predicted(one))}\n" for one in BUDGETS), "utf-8")
