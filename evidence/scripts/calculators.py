"""Compare published calculators with the virtual GPU.

    python -m evidence.scripts.calculators [RECIPE ...]

A calculator that cannot express a recipe has no figure; it is never bent to fit.

Without recipes: the shipped ones, and the Ultrascale widget's presets: the same shapes and the models that
they are named after, over as many ranks. ``--into docs/reference/calculators.md`` rewrites what stands
between that file's two marks; else the Markdown is printed.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from trainfit.catalog.load import model_config, recipes
from trainfit.flops.calculators import rules, ultrascale
from trainfit.flops.shape import Shape, shape_of
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.parsing.recipe_file import load_recipe, recipe_from
from trainfit.spec.printable import say
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from trainfit.spec.units import format_bytes, format_flops

MODEL_FLOPS = "model FLOPs of a step"
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"

Recomputed = Literal["none", "selective", "full"]
RECOMPUTED: tuple[Recomputed, ...] = ("none", "selective", "full")
PRESET_GPU = "h200"


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m evidence.scripts.calculators", description=__doc__)
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
    from trainfit.prediction.predict import (
        predict,
    )  # Brings torch: only once the recipes are known to be good.

    sections = [table({name: (recipe, compare(recipe, predict(recipe))) for name, recipe in named})]
    if not chosen:
        peaks = {
            name: [predict(recipe).peak_allocated_bytes for recipe in preset_recipes(name)]
            for name in ultrascale.PRESETS
        }
        sections.append(presets_section(peaks))
    return "\n\n".join(sections)


class Comparison(NamedTuple):
    """One calculator's number and ours; None: it cannot express the recipe, or nothing is to be compared."""

    calculator: str
    quantity: str
    theirs: float | None
    ours: float | None

    @property
    def difference(self) -> float | None:
        """Theirs over ours, minus 1: +0.25 is a quarter too much. None where one is missing or ours is 0."""
        return self.theirs / self.ours - 1 if self.theirs is not None and self.ours else None


def compare(recipe: Recipe, ours: Estimate) -> list[Comparison]:
    """Return the calculators that cover this recipe, each with our estimate of it.

    Raises:
        InputError: a model whose shape the closed forms do not know.
    """
    shape, params, held = shape_of(model_config(recipe.model.config)), ours.params, ours.breakdown
    spec = widget_spec(recipe, shape)
    # In the optimizer phase the activations are gone, so there is nothing to compare.
    activations = None if ours.peak_phase.endswith("optimizer") else held.activations
    four_times = rules.four_times(params, bytes_per_param=2 if recipe.precision in ("bf16", "fp8") else 4)
    sixteen_bytes = rules.sixteen_bytes(params) if recipe.precision.startswith("amp") else None
    widget, states = "Ultrascale Playbook widget", held.weights + held.gradients + held.optimizer
    rows = (
        Comparison(widget, "peak memory", spec and ultrascale.memory(spec).total, ours.peak_allocated_bytes),
        Comparison(widget, "activations", spec and ultrascale.activation_bytes(spec), activations),
        Comparison("Korthikanti et al., equation 2", "activations", korthikanti(recipe, shape), activations),
        Comparison("4x rule", "peak memory", four_times, ours.peak_allocated_bytes),
        Comparison("16 bytes a parameter (ZeRO)", "weights, gradients, optimizer", sixteen_bytes, states),
        Comparison("6N", MODEL_FLOPS, rules.six_n(params, recipe.batch.tokens), ours.model_flops),
    )
    return [row for row in rows if row.theirs is not None and row.ours is not None]


def recomputed(recipe: Recipe) -> Recomputed | None:
    """Return the recipe's recomputation where the calculators know it."""
    return next((kind for kind in RECOMPUTED if kind == recipe.recompute), None)


def widget_spec(recipe: Recipe, shape: Shape) -> ultrascale.WidgetSpec | None:
    """Return the recipe as the Ultrascale widget's inputs; None for adapters and quantised bases."""
    if recipe.adapter or (recomputation := recomputed(recipe)) is None:
        return None
    return ultrascale.WidgetSpec(
        a=shape.heads, b=recipe.batch.micro, h=shape.hidden, h_ff=shape.feed_forward, layers=shape.layers,
        s=recipe.batch.seq, v=shape.vocab, t=recipe.parallel.tensor,
        d=recipe.parallel.replicate * recipe.parallel.shard, zero=3 if recipe.parallel.shard > 1 else 0,
        mixed=recipe.precision != "fp32", recomputation=recomputation, ff_activation=shape.kind,
    )  # fmt: skip


def korthikanti(recipe: Recipe, shape: Shape) -> float | None:
    """Return the activations by equation 2; None for fp32 and other recomputation than the paper's."""
    if recipe.precision == "fp32" or (recomputation := recomputed(recipe)) is None:
        return None
    return rules.korthikanti_activations(
        a=shape.heads, b=recipe.batch.micro, s=recipe.batch.seq, h=shape.hidden, layers=shape.layers,
        t=recipe.parallel.tensor, recomputation=recomputation,
    )  # fmt: skip


COLUMNS = {
    ("Ultrascale Playbook widget", "peak memory"): "widget: peak",
    ("Ultrascale Playbook widget", "activations"): "widget: activations",
    ("Korthikanti et al., equation 2", "activations"): "Korthikanti: activations",
    ("4x rule", "peak memory"): "4x: peak",
    ("16 bytes a parameter (ZeRO)", "weights, gradients, optimizer"): "16 bytes: states",
    ("6N", MODEL_FLOPS): "6N: FLOPs",
}
"""The heads of the columns, by calculator and quantity."""


def table(compared: Mapping[str, tuple[Recipe, Iterable[Comparison]]]) -> str:
    """Return a line a recipe: the virtual GPU's peak and FLOPs, and the calculators' differences from it."""
    heads = ["recipe", "peak", "model FLOPs", *(f"{head}, %" for head in COLUMNS.values())]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for name, (recipe, comparisons) in compared.items():
        rows = {(row.calculator, row.quantity): row for row in comparisons}
        peak, flops = rows["4x rule", "peak memory"].ours, rows["6N", MODEL_FLOPS].ours
        batch = f"{recipe.batch.micro} x {recipe.batch.seq}"
        lines.append([
            f"`{name}`: {batch}, {recipe.precision}", format_bytes(peak or 0), format_flops(flops or 0),
            *(_difference(rows.get(key)) for key in COLUMNS),
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _difference(row: Comparison | None) -> str:
    return "–" if row is None or row.difference is None else f"{100 * row.difference:+z.1f}"


def preset_recipes(name: str) -> list[Recipe]:
    """Return what the page traces beside a preset, on its mesh: its shape, and the model of that name."""
    from trainfit.web.calculators import widget

    reply = widget({"preset": name, "gpu": PRESET_GPU})
    return [recipe_from(one["recipe"]) for one in reply["recipes"]]


def presets_section(peaks: Mapping[str, Sequence[int]]) -> str:
    """Return the widget's presets, the same shapes traced, and the real models of these names.

    Args:
        peaks: of one GPU, by preset: of the same shape, and of the real model if there is one.
    """
    lines = [
        "### The widget's presets\n",
        "| preset | ranks | its total | virtual GPU, same shape | difference | virtual GPU, the real model "
        "| difference |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, found in peaks.items():
        spec = ultrascale.PRESETS[name]
        total = ultrascale.memory(spec).total
        cells = [name, f"{spec.t} x {spec.d}", format_bytes(total)]
        for peak in found:
            cells += [format_bytes(peak), f"{total / peak - 1:+.1%}"]
        cells += ["–"] * (7 - len(cells))
        lines.append(f"| {' | '.join(cells)} |")
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
