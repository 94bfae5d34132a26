"""The page that answers why the optimizer in the backward, alone, saves nothing.

``python -m trainfit.report.optimizer_in_backward results/peak-memory/explained.jsonl [--recipes recipes/peak-memory]
[--into docs/results/optimizer-in-backward.md]``

Enters: Explanations, one a line (``trainfit explain RECIPE --json``), and the experiment's folder. Leaves: the Markdown page,
with a plot beside it. Every sentence of the answer is checked against the explanations first: a page that says what they
do not show is not written.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainfit.report.page_file import Page, on_white, write_page
from trainfit.report.peak_curves import curves
from trainfit.report.published import Published, read_published, recipe_ids
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.explanation import Explanation
from trainfit.spec.printable import say
from trainfit.spec.result import MemoryBreakdown
from trainfit.spec.units import GIB, MIB
from trainfit.spec.value import parse

EAGER = ("control", "fused", "checkpoint", "fused_checkpoint")
WHOLE = ("compile", "fused_compile", "memory_budget_05", "fused_memory_budget_05")
BLOCKS = ("compile_block", "fused_compile_block", "block_budget_05", "fused_block_budget_05")
NEEDED = (*EAGER, *WHOLE, *BLOCKS)
PLOT = "optimizer-in-backward.svg"
NOTHING_SAVED = 0.005
"""Share of the peak: less than this is "nothing"."""

LONGEST_OP = 48
"""Letters of an operation's name in the table."""

Rows = dict[str, Explanation]


@dataclass(frozen=True)
class Claim:
    """A sentence of the page and whether the explanations show it."""

    text: str
    holds: bool


def main(arguments: list[str] | None = None) -> int:
    """Write the page; exit code 0, 65 for bad input or a claim that does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m trainfit.report.optimizer_in_backward",
        description="Why fusing alone saves nothing, from the ledgers.",
    )
    parser.add_argument("explained", type=Path, help="JSON Lines of `trainfit explain RECIPE --json`")
    parser.add_argument("--recipes", type=Path, default=Path("recipes/peak-memory"))
    parser.add_argument("--into", type=Path, help="Markdown page to write, with plots/ beside it")
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.explained, options.recipes)
        text = page(rows, read_published(options.recipes / "published.toml"))
    except (InputError, FileNotFoundError) as error:
        say(f"trainfit: {error}", err=True)
        return EXIT_BAD_INPUT
    if options.into is None:
        say(text)
        return 0
    plot = on_white(curves([(name, rows[name]) for name in NEEDED]))
    write_page(Page(text, {PLOT: plot}), options.into)
    return 0


def read_rows(explained: Path, recipes: Path) -> Rows:
    """The explanations by the row's name, those the page needs first; of several of one recipe the last counts.

    Raises:
        InputError: a line that is no explanation, or a row without one.
    """
    by_id: dict[str, Explanation] = {}
    for number, line in enumerate(explained.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found = parse(Explanation, json.loads(line), file=f"{explained}:{number}")
        except json.JSONDecodeError as error:
            raise InputError(
                f"not JSON: {error.msg}", "write one object a line", file=f"{explained}:{number}"
            ) from None
        by_id[found.recipe_id] = found
    ids = recipe_ids(recipes)
    missing = [name for name in NEEDED if ids.get(name) not in by_id]
    if missing:
        lines = " && ".join(f"trainfit explain {recipes}/{name}.yaml --json" for name in missing[:2])
        raise InputError(
            f"no explanation of {', '.join(missing)}",
            f"append what this prints: {lines}",
            file=str(explained),
        )
    others = sorted(name for name in ids if name not in NEEDED and ids[name] in by_id)
    return {name: by_id[ids[name]] for name in (*NEEDED, *others)}


def page(rows: Rows, published: Published) -> str:
    """The Markdown page.

    Raises:
        InputError: the explanations contradict one of its sentences.
    """
    for claim in claims(rows):
        if not claim.holds:
            raise InputError(
                f"not what the ledgers show: {claim.text}",
                "correct the page's text in report/",
                field="claim",
            )
    eager, whole, blocks = ([claim.text for claim in part(rows)] for part in (_eager, _whole, _blocks))
    parts = [
        "# Why the optimizer in the backward, alone, saves nothing",
        "Made by `python -m trainfit.report.optimizer_in_backward results/peak-memory/explained.jsonl --into "
        "docs/results/optimizer-in-backward.md` from `trainfit explain` of the recipes in `recipes/peak-memory`; do not edit. All "
        "figures are of the virtual GPU's ledgers, which needed no GPU; what was measured stands beside the same peaks in "
        "[peak-memory.md](peak-memory.md); the published column is "
        f"[the experiment's]({published.source}).",
        "The published experiment found that updating each weight in the backward, and freeing its gradient, saves nothing alone "
        "and nothing under `torch.compile`, but 5 GiB with checkpointing, and asked whether that hints at a bug in PyTorch. "
        "It does not. **Gradients cost memory only where they are alive at the peak, and the optimizer can only free those it "
        "has been handed.**",
        _table(rows, published, NEEDED),
        f"![Memory through the step that has the peak, of twelve rows](plots/{PLOT})",
        "## Eager: the peak stands where there are no gradients yet",
        " ".join(eager),
        "## Compiled whole: all gradients come at once",
        " ".join(whole),
        "## Compiled by block: gradients come block by block",
        " ".join(blocks),
        *_others(rows, published),
        "## See it yourself",
        "```\ntrainfit explain recipes/peak-memory/control.yaml recipes/peak-memory/fused.yaml\n"
        "trainfit explain recipes/peak-memory/checkpoint.yaml recipes/peak-memory/fused_checkpoint.yaml\n```",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _others(rows: Rows, published: Published) -> list[str]:
    others = [name for name in rows if name not in NEEDED]
    return ["## Where the peak of every other row stands", _table(rows, published, others)] if others else []


def claims(rows: Rows) -> list[Claim]:
    """All the page says, in its order."""
    return [*_eager(rows), *_whole(rows), *_blocks(rows)]


def _eager(rows: Rows) -> list[Claim]:
    control, fused = rows["control"], rows["fused"]
    full, both = rows["checkpoint"], rows["fused_checkpoint"]
    layers = _layers(control)
    kept, gradient = control.ends["forward"].activations / layers, control.most.gradients / layers
    recomputed = full.ends["forward"].activations / layers
    return [
        Claim(
            f"The control's peak stands in the {control.moment.phase} at `{control.moment.op}`, the loss's own backward: "
            f"{_gib(control.breakdown.activations)} GiB of activations are alive and "
            f"{_gib(control.breakdown.gradients)} GiB of gradients.",
            control.moment.phase == "backward"
            and "softmax_backward" in control.moment.op
            and control.breakdown.gradients == 0,
        ),
        Claim(
            f"From there on memory falls: every layer's backward frees {_mib(kept)} MiB of activations and makes "
            f"{_mib(gradient)} MiB of gradients. The {_gib(control.most.gradients)} GiB that all gradients need are there when the "
            f"backward ends, {_gib(control.peak_allocated_bytes - control.ends['backward'].total)} GiB below the peak.",
            kept > gradient and control.ends["backward"].total < control.peak_allocated_bytes,
        ),
        Claim(
            f"Fusing frees each gradient at once, at most {_mib(fused.most.gradients)} MiB of them are alive, and the peak stays "
            "where it was, to the byte.",
            fused.moment == control.moment
            and fused.peak_allocated_bytes == control.peak_allocated_bytes
            and fused.most.gradients < control.most.gradients / 10,
        ),
        Claim(
            f"With checkpointing a layer keeps {_mib(recomputed)} MiB, less than its gradients, so memory rises through the "
            f"backward and the peak stands near its end, with {_gib(full.breakdown.gradients)} GiB of gradients alive. Now fusing "
            f"saves {_gib(full.peak_allocated_bytes - both.peak_allocated_bytes)} GiB.",
            recomputed < gradient
            and full.breakdown.gradients > 0.9 * full.most.gradients
            and both.peak_allocated_bytes < full.peak_allocated_bytes - 0.8 * full.breakdown.gradients,
        ),
    ]


def _whole(rows: Rows) -> list[Claim]:
    plain, fused, budget, both = (
        rows[name] for name in ("compile", "fused_compile", "memory_budget_05", "fused_memory_budget_05")
    )
    weights = rows["control"].most.gradients
    return [
        Claim(
            "A compiled model is one node of autograd's graph. Its backward is one function that returns the gradients of all "
            f"weights together, and only then does autograd hand them out and call the hooks: {_gib(fused.most.gradients)} GiB of "
            "gradients are alive then although every one of them is freed as soon as its hook has run.",
            fused.most.gradients > 0.95 * weights,
        ),
        Claim(
            f"Without a budget the peak stands where that backward begins, over {_gib(plain.breakdown.activations)} GiB of "
            f"activations and {_gib(plain.breakdown.gradients)} GiB of gradients, and fusing changes {_change(plain, fused)}.",
            plain.moment.phase == "backward"
            and plain.breakdown.gradients < 0.05 * weights
            and _same(plain, fused),
        ),
        Claim(
            "Within a budget of 0.05 the forward is recomputed in the same one graph, and not layer by layer: at the peak "
            f"{_gib(budget.breakdown.temporary)} GiB of it, of all layers, are there again when no more than a layer's or two's "
            f"gradients are done ({_gib(budget.breakdown.gradients)} GiB). Fusing changes {_change(budget, both)}.",
            _same(budget, both)
            and budget.moment.phase == "backward"
            and budget.breakdown.gradients < 2 * weights / _layers(budget)
            and budget.breakdown.temporary > weights,
        ),
    ]


def _blocks(rows: Rows) -> list[Claim]:
    plain, fused = rows["compile_block"], rows["fused_compile_block"]
    budget, both = rows["block_budget_05"], rows["fused_block_budget_05"]
    return [
        Claim(
            "Compiled by block each block is a node of its own. Its gradients are handed out when its own backward returns: at most "
            f"{_mib(fused.most.gradients)} MiB are alive.",
            fused.most.gradients < plain.most.gradients / 8,
        ),
        Claim(
            f"Alone that changes no more than {_change(plain, fused)}, for the eager reason. Within a budget of 0.05 the peak is where the "
            f"gradients are, and fusing saves {_gib(budget.peak_allocated_bytes - both.peak_allocated_bytes)} of "
            f"{_gib(budget.peak_allocated_bytes)} GiB.",
            _same(plain, fused)
            and both.peak_allocated_bytes < budget.peak_allocated_bytes - 0.5 * budget.breakdown.gradients,
        ),
    ]


def _same(first: Explanation, second: Explanation) -> bool:
    return (
        abs(second.peak_allocated_bytes - first.peak_allocated_bytes)
        < NOTHING_SAVED * first.peak_allocated_bytes
    )


def _change(first: Explanation, second: Explanation) -> str:
    change = second.peak_allocated_bytes - first.peak_allocated_bytes
    return "nothing" if change == 0 else f"{change / MIB:+.1f} MiB of {_gib(first.peak_allocated_bytes)} GiB"


def _layers(told: Explanation) -> int:
    config = told.recipe["model"]["config"]
    return int(config["num_hidden_layers"])


def _table(rows: Rows, published: Published, names: Sequence[str]) -> str:
    heads = ["row", "published GiB", "peak GiB", "it stands at", "weights", "gradients", "activations", "other",
             "most gradients ever"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "| --- | ---: | ---: | --- |" + " ---: |" * (len(heads) - 4)]
    for name in names:
        told = rows[name]
        figure = published.rows.get(name)
        cells = [
            f"`{name}`", f"{figure.peak_gib:.3f}" if figure else "–", f"{told.peak_allocated_bytes / GIB:.3f}", _where(told),
            *(_gib(part) for part in _parts(told.breakdown)), _gib(told.most.gradients),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(
        [
            *lines,
            "",
            "GiB at the peak, which is a steady step's if nothing else is said; *other*: temporary, optimizer state, cuBLAS's "
            "workspaces; *most gradients ever*: at any moment of that step.",
        ]
    )


def _where(told: Explanation) -> str:
    module = f" of `{told.moment.module}`" if told.moment.module else ""
    step = "first step's " if told.moment.step == "first" else ""
    op = told.moment.op
    if len(op) > LONGEST_OP:  # A fused kernel is named after all it does.
        op = f"{op[: LONGEST_OP - 12]}…{op[-11:]}"
    return f"{step}{told.moment.phase}, `{op}`{module}"


def _parts(held: MemoryBreakdown) -> tuple[int, int, int, int]:
    named = (held.weights, held.gradients, held.activations)
    return (*named, held.total - sum(named))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
