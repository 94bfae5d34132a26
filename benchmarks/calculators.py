"""Write the table of published calculators: ``python -m benchmarks.calculators [RECIPE ...]``.

Without recipes: the shipped ones, and the Ultrascale widget's presets as the models that they are named
after. ``--into docs/reference/calculators.md`` rewrites what stands between that file's two marks; else the
Markdown is printed.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from trainfit.catalog.load import recipes
from trainfit.prediction.calculators import ultrascale
from trainfit.prediction.calculators.compare import Comparison, compare
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.printable import say
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import load_recipe, recipe_from
from trainfit.spec.units import format_bytes, format_flops

BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"

PRESET_MODELS = {
    "Llama 3 8B": ("llama-3.1-8b", 1),
    "Llama 3 70B": ("llama-3.1-70b", 8),
    "Llama 3 405B": ("llama-3.1-405b", 8),
}
"""The widget's presets: the catalog's model of that name, and the ranks it splits over."""


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calculators", description=__doc__)
    parser.add_argument("recipes", nargs="*", type=Path, help="recipe files; the shipped ones without any")
    parser.add_argument("--into", type=Path, help="a Markdown file with the two marks; printed without it")
    options = parser.parse_args(arguments)
    try:
        text = markdown(options.recipes)
        if options.into is None:
            say(text)
        else:
            options.into.write_text(
                put_between_marks(options.into.read_text(encoding="utf-8"), text), encoding="utf-8"
            )
    except InputError as error:
        say(str(error), err=True)
        return EXIT_BAD_INPUT
    return 0


def markdown(paths: Iterable[Path]) -> str:
    """Tables by recipe, from predictions made now."""
    chosen = list(paths)
    named = [(path.stem, load_recipe(path)) for path in chosen or recipes().values()]
    from trainfit.prediction.estimate import (
        predict,  # Brings torch: only once the recipes are known to be good.
    )

    sections = [section(name, recipe, compare(recipe, predict(recipe))) for name, recipe in named]
    if not chosen:
        sections.append(
            presets_section(
                {name: predict(recipe).peak_allocated_bytes for name, recipe in preset_recipes().items()}
            )
        )
    return "\n\n".join(sections)


def section(name: str, recipe: Recipe, rows: Iterable[Comparison]) -> str:
    """One recipe's table."""
    batch = recipe.batch
    head = (
        f"### {name}\n\n{recipe.model.display_name}, {batch.micro} x {batch.seq} tokens, {recipe.precision}, "
    )
    head += f"{recipe.optimizer.name}, recompute {recipe.recompute}, attention {recipe.attention}\n\n"
    lines = ["| calculator | quantity | it says | virtual GPU | difference |", "|---|---|---:|---:|---:|"]
    for row in rows:
        shown = format_bytes if row.unit == "bytes" else format_flops
        off = "n/a" if row.difference is None else f"{row.difference:+.1%}"
        lines.append(
            f"| {row.calculator} | {row.quantity} | {shown(row.theirs)} | {shown(row.ours)} | {off} |"
        )
    return head + "\n".join(lines)


def preset_recipes() -> dict[str, Recipe]:
    """Return the presets that a recipe of one GPU can express: model, batch, autocast over fp32 weights.

    The presets that split a model over ranks are left out until recipes of several GPUs can be predicted.
    """
    return {
        name: recipe_from({
            "model": {"config": model},
            "batch": {"micro": ultrascale.PRESETS[name].b, "seq": ultrascale.PRESETS[name].s},
            "precision": "amp-bf16",
            "hardware": {"gpu": "h200"},
        })
        for name, (model, ranks) in PRESET_MODELS.items()
        if ranks == 1
    }  # fmt: skip


def presets_section(peaks: dict[str, int]) -> str:
    """Return the widget's presets and the models of these names."""
    lines = [
        "### The widget's presets\n",
        "| preset | activations | total | virtual GPU, the real model | difference |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, spec in ultrascale.PRESETS.items():
        found, peak = ultrascale.memory(spec), peaks.get(name)
        ours = (
            f"{format_bytes(peak)} | {found.total / peak - 1:+.1%}" if peak else "several GPUs: not yet | n/a"
        )
        lines.append(f"| {name} | {format_bytes(found.activations)} | {format_bytes(found.total)} | {ours} |")
    return "\n".join(lines)


def put_between_marks(document: str, text: str) -> str:
    """``document`` with ``text`` between its two marks.

    Raises:
        InputError: the marks are not there.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError("the document has no marks", f"add {BEGIN} and {END}", field="--into")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
