"""Tables and the figure of llama-405b-mi300x.md: a published run, and what is predicted for it."""

import tomllib
from functools import cache
from itertools import pairwise
from statistics import fmean
from typing import Any

from evidence.scripts.tables.joined import RESULTS, recipe_of, records
from trainfit.catalog.load import gpu, link
from trainfit.catalog.load import model as find_model
from trainfit.report.plot import MEASURED, PREDICTED, Panel, Series, draw
from trainfit.report.table import NOTHING, markdown_grid
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate

CARD, CARDS = "mi300x", 8
LAYERS, HIDDEN = 126, 16384


@cache
def published() -> dict[str, Any]:
    """Return what was published of the run."""
    return tomllib.loads((RESULTS / "published-runs/llama-405b-mi300x.toml").read_text("utf-8"))


@cache
def predictions() -> tuple[tuple[Recipe, Estimate], ...]:
    """Return the predicted recipes, the published one first."""
    found = [(recipe_of(one), one.estimate) for one in records("llama-405b-mi300x/predicted.jsonl")]
    known = [(recipe, estimate) for recipe, estimate in found if estimate is not None]
    return tuple(sorted(known, key=lambda pair: pair[0].batch.tokens))


def step_s() -> float:
    """Return the seconds of a step by the log, without the first."""
    starts = published()["step_starts_s"][1:]
    return fmean(later - earlier for earlier, later in pairwise(starts))


def busy_s() -> list[float]:
    """Return the seconds of a step in which each card is busy."""
    return [share * step_s() for share in published()["busy_share"]]


def parts() -> dict[str, float]:
    """Return the seconds of a step: what each part of the prediction and of the log takes."""
    _, estimate = predictions()[0]
    assert estimate.time is not None
    assert estimate.step_s is not None
    communication = estimate.time.communication_s
    return {
        "computation, predicted": estimate.step_s - communication,
        "communication that computation waits for, predicted": communication,
        "a card is busy, log": fmean(busy_s()),
        "a card is idle, log": step_s() - fmean(busy_s()),
    }


def where() -> str:
    """Return where the seconds of a step go."""
    busy, found = busy_s(), parts()
    _, estimate = predictions()[0]
    lines = [
        ["step, published text", f"{published()['tokens_per_step'] / published()['tokens_per_s']:.1f}"],
        ["step, log", f"{step_s():.1f}"],
        ["cards busy, log: mean of eight", f"{fmean(busy):.1f}"],
        ["of these: card 0, which is issued to first", f"{busy[0]:.1f}"],
        ["of these: card 7, which is issued to last", f"{busy[-1]:.1f}"],
        ["cards idle, log: mean of eight", f"{found['a card is idle, log']:.1f}"],
        ["step, predicted", f"{estimate.step_s:.1f}"],
        ["of it computation", f"{found['computation, predicted']:.1f}"],
        ["of it communication that the computation waits for",
         f"{found['communication that computation waits for, predicted']:.1f}"],
    ]  # fmt: skip
    return markdown_grid(["seconds of a step", "s"], lines)


def plot() -> str:
    """Draw the step of the log and the predicted one."""
    found = list(parts().items())
    names = ("predicted", "the run's log")
    colors = (PREDICTED, "#8b6bb1", MEASURED, "#d5dae0")
    series = [
        Series(label, [seconds], x=[names[number // 2]], kind="bar", stack="step", color=color)
        for number, ((label, seconds), color) in enumerate(zip(found, colors, strict=True))
    ]
    panel = Panel(series, "A step of 1,024 tokens", "", "seconds", names=names, is_horizontal=True)
    return draw([panel], "llama-405b-mi300x", title="A step of 1,024 tokens", size=(9.0, 2.9))


def tensor_parallel_s(tokens: int) -> float:
    """Return the least seconds of a step with tensor parallel over all cards, in closed form.

    Frozen weights take 4 FLOPs a parameter and token, at the rate that products sustain. Each block
    all-reduces two outputs forward and two gradients backward, each over the link's full rate. Nothing
    overlaps.
    """
    row, params = gpu(CARD), find_model("llama-3.1-405b").published_params
    assert params is not None
    assert row.sustained is not None
    products_s = 4 * params * tokens / CARDS / (row.sustained.products * row.peak_flops_per_s["bf16"])
    sent_bytes = LAYERS * 4 * (2 * tokens * HIDDEN) * 2 * (CARDS - 1) / CARDS
    return products_s + sent_bytes / link(row.link).bytes_per_s


def faster() -> str:
    """Return what other batches and meshes would have reached."""
    base = published()["tokens_per_step"] / step_s()
    lines = [["as it ran: 16 x 64, JAX without jit", f"{published()['tokens_per_step']:,}", f"{step_s():.1f}",
              f"{base:.0f}", "1", NOTHING]]  # fmt: skip
    for recipe, estimate in predictions():
        assert estimate.step_s is not None
        tokens = recipe.batch.tokens * CARDS
        name = f"FSDP, {recipe.batch.micro} x {recipe.batch.seq:,} a card"
        name += ", recomputed" if recipe.recompute == "full" else ""
        rate = tokens / estimate.step_s
        lines.append([name, f"{tokens:,}", f"{estimate.step_s:.1f}", f"{rate:,.0f}", f"{rate / base:.0f}",
                      f"{estimate.peak_device_bytes / 2**30:.0f}"])  # fmt: skip
    for tokens in (1024, 16384):
        seconds = tensor_parallel_s(tokens)
        name = f"tensor parallel over 8, {tokens // 64:,} x 64, closed form"
        rate = tokens / seconds
        times = f"{rate / base:.0f}"
        lines.append([name, f"{tokens:,}", f"{seconds:.2f}", f"{rate:,.0f}", times, NOTHING])
    heads = ["run", "tokens a step", "step, s", "tokens/s", "times as fast", "GiB a card"]
    return markdown_grid(heads, lines)
