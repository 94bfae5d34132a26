"""A page for each technique: what it does, when it helps, memory and speed alone and with partners, quality, refusals.

``python -m benchmarks.technique_pages results [--into docs/results/techniques]``

Enters: a folder of Records. Leaves: NAME.md for each technique and README.md, the table of all. What a technique does is its
docstring's words; what it refuses is asked of the recipes' check; figures are the records', of which those predicted for the
reference have to be there (``technique_suite`` writes its recipes). The same records give the same bytes.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.technique_pairs import Book, Pair, Result, best_of, groups, others, read_results
from benchmarks.technique_prose import Prose, prose
from benchmarks.technique_refusals import refused, refused_on_cpu
from benchmarks.technique_suite import (
    MODEL_AND_BATCH,
    alone,
    beside,
    in_a_recipe,
    suite,
    told,
    written,
)
from trainfit.report.table import NOTHING, markdown_cell, markdown_grid
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.printable import say
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import GIB
from trainfit.techniques import registry

MADE_BY = "python -m trainfit.report.technique_pages results --into docs/results/techniques"
NOT_MEASURED = "not measured yet"
MOST_PAIRS = 12
"""Measured pairs of other recipes that a page shows; it says how many there are."""
FEWEST_PARTNERS = 2
"""Recipes of one model and batch below which none is the best."""
MOST_GROUPS = 4
"""Other models and batches whose best are shown: those of most recipes."""
INDEX = "README.md"


def main(arguments: list[str] | None = None) -> int:
    """Write the pages; exit code 0, or 65 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.technique_pages", description="Write a page for each technique."
    )
    parser.add_argument("results", type=Path, help="folder of records (JSON Lines)")
    parser.add_argument("--into", type=Path, default=Path("docs/results/techniques"), help="folder to write")
    options = parser.parse_args(arguments)
    try:
        made = pages(Book(read_results(options.results)))
    except InputError as error:
        say(f"trainfit: {error}", err=True)
        return EXIT_BAD_INPUT
    options.into.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (options.into / name).write_text(text, encoding="utf-8")
    say(f"{len(made)} files in {options.into}")
    return 0


def pages(book: Book) -> dict[str, str]:
    """File name -> text, of every page and the index.

    Raises:
        InputError: a recipe of the reference is not predicted.
    """
    missing = [recipe for recipe in suite() if book.find(recipe, "predict") is None]
    if missing:
        raise InputError(
            f"{len(missing)} recipes of the pages are not predicted, such as {written(told(missing[0]))!r}",
            "run python -m benchmarks.technique_suite FILE, then python -m benchmarks.accuracy.suite FILE "
            "results/techniques/predicted.jsonl",
        )
    told_of = {name: prose(technique) for name, technique in sorted(registry.techniques().items())}
    made = {f"{name}.md": page(name, words, book) for name, words in told_of.items()}
    return {INDEX: index(told_of, book), **made}


def index(told_of: dict[str, Prose], book: Book) -> str:
    """The table of all techniques."""
    heads = ["technique", "in a recipe", "beside", "what it is", "peak, step: measured", "predicted"]
    rows = []
    for name, words in told_of.items():
        pairs = [book.pair(name, alone(name)[0], kind) for kind in ("measure", "predict")]
        cells = [_changes(pair) if pair else NOT_MEASURED for pair in pairs]
        rows.append([f"[{name}]({name}.md)", in_a_recipe(name), beside(name), words.summary, *cells])
    return _parts(
        "# The techniques, one by one",
        f"Made by `{MADE_BY}`; do not edit. How they go together in a step: [techniques](../../reference/techniques.md).",
        f"Peak memory and time of a step change so with the first way to ask for it on {MODEL_AND_BATCH}, against the same recipe "
        "without it. Where it needs others, or pays only with them, both sides have them: column *beside*.",
        markdown_grid(heads, rows, num_text=4),
    )  # fmt: skip


def page(technique: str, words: Prose, book: Book) -> str:
    """One technique's page."""
    fields = ", ".join(f"`{field}`" for field in registry.techniques()[technique].fields)
    return _parts(
        f"# {technique}",
        f"Made by `{MADE_BY}` from `src/trainfit/techniques/{technique}.py`, the recipes' check and the records; do not edit. "
        "All techniques: [README.md](README.md).",
        "## What it does",
        words.summary,
        words.does,
        f"In a recipe: {in_a_recipe(technique)}.",
        "## When it helps",
        words.helps,
        "## Memory and speed",
        f"Peak allocated memory and the time of a step, without it → with it. *Without*: the same recipe with {fields} "
        + (
            "at the default."
            if technique != "accumulation"
            else "such that one micro-batch holds all tokens."
        ),
        f"### Alone\n\nOn {MODEL_AND_BATCH}.",
        _pair_table(technique, alone(technique), book),
        _elsewhere(technique, book),
        "### With its best partners",
        _partners(technique, book),
        "## What it costs in quality",
        words.costs,
        _quality(technique, book),
        "## What it refuses",
        _refusals(technique),
        f"Once the model is built: {words.refuses[0].lower()}{words.refuses[1:]}",
    )


def _pair_table(technique: str, recipes: Iterable[Recipe], book: Book, *, named: bool = False) -> str:
    """One line a recipe: with and without, measured beside predicted."""
    fields = registry.techniques()[technique].fields
    heads = [*(["model, batch"] if named else []), "with", "beside",
             "peak GiB, measured", "predicted", "step ms, measured", "predicted"]  # fmt: skip
    rows = []
    for recipe in recipes:
        measured = book.pair(technique, recipe, "measure") or book.pair(technique, recipe, "train")
        predicted = book.pair(technique, recipe, "predict")
        cells = [
            _pair_cell(measured, "peak_bytes", GIB, 2), _pair_cell(predicted, "peak_bytes", GIB, 2),
            _pair_cell(measured, "step_s", 1e-3, 1), _pair_cell(predicted, "step_s", 1e-3, 1),
        ]  # fmt: skip
        own, beside = _code(told(recipe, fields)), _code(others(recipe, fields))
        rows.append([*([_model_and_batch(recipe)] if named else []), own, beside, *cells])
    return markdown_grid(heads, rows, num_text=len(heads) - 4)


def _elsewhere(technique: str, book: Book) -> str:
    shown = {recipe.id for recipe in alone(technique)}
    pairs = [pair for pair in book.measured_pairs(technique) if pair.with_it.recipe.id not in shown]
    if not pairs:
        return ""
    title = f"### On other recipes\n\n{len(pairs)} measured" + (
        f", the first {MOST_PAIRS} shown." if len(pairs) > MOST_PAIRS else "."
    )
    recipes = [pair.with_it.recipe for pair in pairs[:MOST_PAIRS]]
    return _parts(title, _pair_table(technique, recipes, book, named=True)).rstrip()


def _partners(technique: str, book: Book) -> str:
    """Of each model and batch the recipe with the technique that needs least memory, and the fastest."""
    heads = ["model, batch", "best", "recipe", "peak GiB, measured", "predicted", "step ms, measured",
             "predicted"]  # fmt: skip
    predicted = [found for recipe in suite() if (found := book.find(recipe, "predict"))]
    here = groups(predicted)
    measured = groups(book.all("train")) | groups(book.all("measure"))
    rows = []
    bests = {name: best_of(technique, results) for name, results in measured.items()}
    bests = {name: best for name, best in bests.items() if best and best.num_recipes >= FEWEST_PARTNERS}
    elsewhere = sorted(bests.keys() - here.keys(), key=lambda name: (-bests[name].num_recipes, name))
    for name in (*here, *elsewhere[:MOST_GROUPS]):
        best = bests.get(name) or best_of(technique, here.get(name, []))
        if best is None:
            continue
        ends = [("least memory", best.smallest), ("fastest", best.fastest)]
        if best.smallest is best.fastest:
            ends = [("least memory and fastest", best.smallest)]
        for what, result in ends:
            by = "measured" if result.kind != "predict" else "predicted"
            rows.append([_model_and_batch(result.recipe), f"{what}, {by}", *_best_cells(result, book)])
    return markdown_grid(heads, rows, num_text=3)


def _best_cells(best: Result, book: Book) -> list[str]:
    measured = book.find(best.recipe, "measure") or book.find(best.recipe, "train")
    predicted = book.find(best.recipe, "predict")
    return [
        _code(told(best.recipe)), _cell(measured, "peak_bytes", GIB, 2), _cell(predicted, "peak_bytes", GIB, 2),
        _cell(measured, "step_s", 1e-3, 1), _cell(predicted, "step_s", 1e-3, 1),
    ]  # fmt: skip


def _quality(technique: str, book: Book) -> str:
    pairs = book.trained_pairs(technique)
    if not pairs:
        return f"Perplexity of held-out text after training with and without it: {NOT_MEASURED}."
    heads = ["model, batch", "with", "beside", "steps", "perplexity, without → with"]
    fields = registry.techniques()[technique].fields
    rows = [
        [
            _model_and_batch(pair.with_it.recipe), _code(told(pair.with_it.recipe, fields)),
            _code(others(pair.with_it.recipe, fields)), str(pair.with_it.training.steps if pair.with_it.training else NOTHING), _pair_cell(pair, "perplexity", 1.0, 3),
        ]
        for pair in pairs[:MOST_PAIRS]
    ]  # fmt: skip
    return _parts(
        "Perplexity of held-out text after training:", markdown_grid(heads, rows, num_text=3)
    ).rstrip()


def _refusals(technique: str) -> str:
    found = refused(technique)
    lines = [
        f"- {_beside(one.beside)}`{one.line}`" for one in found
    ] + [f"- on a CPU: `{line}`" for line in refused_on_cpu(technique)]  # fmt: skip
    if not lines:
        return "Asked beside every other technique, a recipe with it is never refused."
    return "Asked by itself and beside every other technique, the check of a recipe answers:\n\n" + "\n".join(
        lines
    )


def _beside(techniques: Sequence[str]) -> str:
    return f"with {', '.join(f'[{name}]({name}.md)' for name in techniques)}: " if techniques else ""


def _model_and_batch(recipe: Recipe) -> str:
    native = " (native)" if recipe.model.implementation == "native" else ""
    trained = "" if recipe.adapter is None else ", adapter"
    tokens = f"{recipe.batch.micro * recipe.batch.accumulate} x {recipe.batch.seq}"
    return markdown_cell(f"{recipe.model.display_name}{native}, {tokens}{trained}")


def _code(said: dict[str, object]) -> str:
    text = written(said).replace("|", "\\|").replace("`", "'")  # Inside code nothing else is markup.
    return f"`{text}`" if text else NOTHING


def _pair_cell(pair: Pair | None, of: str, unit: float, digits: int) -> str:
    if pair is None:
        return NOT_MEASURED
    sides = [_cell(side, of, unit, digits) for side in (pair.without, pair.with_it)]
    change = _change(pair, of)
    return f"{sides[0]} → {sides[1]}" + (f" ({change})" if change else "")


def _cell(result: Result | None, of: str, unit: float, digits: int) -> str:
    if result is None:
        return NOT_MEASURED
    value = getattr(result, of)
    return f"{value / unit:.{digits}f}" if value is not None else "out of memory"


def _change(pair: Pair, of: str) -> str:
    without, with_it = getattr(pair.without, of), getattr(pair.with_it, of)
    if not without or not with_it:
        return ""
    text = f"{with_it / without - 1:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def _changes(pair: Pair) -> str:
    return ", ".join(_change(pair, of) or "out of memory" for of in ("peak_bytes", "step_s"))


def _parts(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    sys.exit(main())
