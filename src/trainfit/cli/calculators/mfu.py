"""``trainfit mfu``: MFU and HFU of a step, the time of a run from an MFU, and the cost of GPU-hours."""

import math
import sys
from typing import Annotated, Any, Literal

import typer
from typer import Option

from trainfit.cli import completion, options
from trainfit.cli.options import Json, PeakFlops, at_most, count, finite, share
from trainfit.spec import DEFAULT_GPU

MODEL_HELP = "A catalog model, a config.json, or its folder."
MFU_HELP = "Instead of --step-s: the MFU, such as 40% or 0.4."
TOKENS_HELP = "Also print how long a run over N tokens takes, such as 15T or 1.5e12."
RECOMPUTE_HELP = "full: each block runs again, in HFU only."
CLOSED_HELP = (
    "Closed form printed next to the count. products: weights of matrix products and sliding windows; 6n: "
    "6 FLOPs a parameter, the embedding included, no windows, as in published figures."
)
HOURS_HELP = "What this many GPU-hours cost, such as 1.46M; with --tokens, the MFU of such a run."
TOGETHER = (
    "give a model, --seq and one of --step-s and --mfu (with --batch), --tokens-per-s, or --tokens and "
    "--gpu-hours; or --gpu-hours alone"
)
TOKENS_PER_S_HELP = "Instead of --step-s: tokens a second of all GPUs, such as 9.1k; needs no --batch."
PRICE_HELP = "Price of one GPU-hour; default: the catalog's."
Precision = Literal["fp32", "bf16", "amp-bf16", "amp-fp16"]


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help=MODEL_HELP, show_default=False, autocompletion=completion.models
        ),
    ] = None,
    model_option: Annotated[
        str | None,
        Option("--model", metavar="NAME", help="Same as MODEL.", autocompletion=completion.models),
    ] = None,
    batch: Annotated[
        int | None, Option(min=1, callback=at_most, metavar="B", help="Sequences a step, over all GPUs.")
    ] = None,
    seq: Annotated[
        int | None, Option(metavar="S", parser=options.length, help="Tokens a sequence, such as 8k.")
    ] = None,
    step_s: Annotated[
        float | None,
        Option(metavar="T", parser=options.seconds, help="Time of a step, such as 448ms or 0.448."),
    ] = None,
    tokens_per_s: Annotated[float | None, Option(metavar="N", parser=count, help=TOKENS_PER_S_HELP)] = None,
    mfu: Annotated[float | None, Option(metavar="SHARE", parser=share, help=MFU_HELP)] = None,
    gpu: Annotated[
        str, Option(metavar="NAME", help="An accelerator of the catalog.", autocompletion=completion.gpus)
    ] = DEFAULT_GPU,
    num_gpus: Annotated[
        int, Option("--count", "--gpus", min=1, callback=at_most, metavar="N", help="Number of GPUs.")
    ] = 1,
    adapter: Annotated[Literal["lora"] | None, Option(help="Frozen weights: no weight gradients.")] = None,
    rank: Annotated[int, Option(min=1, callback=at_most, metavar="R", help="The adapter's rank.")] = 16,
    recompute: Annotated[Literal["none", "full"], Option(help=RECOMPUTE_HELP)] = "none",
    precision: Annotated[Precision, Option(help="Selects the dense peak.")] = "bf16",
    attention: Annotated[
        Literal["causal", "full"], Option(help="Count masked attention scores or not.")
    ] = "causal",
    closed_form: Annotated[Literal["products", "6n"], Option(help=CLOSED_HELP)] = "products",
    peak_flops: PeakFlops = None,
    tokens: Annotated[float | None, Option(metavar="N", parser=count, help=TOKENS_HELP)] = None,
    gpu_hours: Annotated[float | None, Option(metavar="HOURS", parser=count, help=HOURS_HELP)] = None,
    price: Annotated[float | None, Option(metavar="USD", min=0, callback=finite, help=PRICE_HELP)] = None,
    json: Json = False,
) -> None:
    """MFU and HFU of a step; the time and cost of a run.

    Give --step-s or --tokens-per-s for the MFU, --mfu for the time, or --gpu-hours and --tokens for the MFU
    of a run.
    """
    from trainfit.api.mfu import Speed, recipe_of_one, step_usage
    from trainfit.api.run import money, run_usage, step_of_run
    from trainfit.catalog.load import gpu as find_gpu
    from trainfit.catalog.names import gpu_note
    from trainfit.report.console import progress
    from trainfit.spec.errors import InputError

    if model is not None and model_option is not None and model != model_option:
        raise typer.BadParameter(f"two models, {model} and {model_option}: name one")
    model = model if model is not None else model_option
    found: dict[str, Any] = {}
    row = find_gpu(gpu)
    options.print_notes(f"note: {note}" for note in (gpu_note(gpu),) if note is not None)
    price = row.price_per_hour if price is None else price
    of_run = gpu_hours is not None and tokens is not None
    if _num_given(model, batch, seq, step_s, tokens_per_s, mfu, tokens) or gpu_hours is None:
        batch = 1 if (of_run or tokens_per_s is not None) and batch is None else batch
        speeds = _num_given(step_s, tokens_per_s, mfu, of_run or None)
        if model is None or batch is None or seq is None or speeds != 1:
            raise typer.BadParameter(TOGETHER)
        _check_positive({"--step-s": step_s, "--mfu": mfu, "--tokens": tokens, "--gpu-hours": gpu_hours,
                         "--tokens-per-s": tokens_per_s})  # fmt: skip
        if tokens_per_s is not None:
            step_s = batch * seq / tokens_per_s
        if gpu_hours is not None and tokens is not None:
            step_s = step_of_run(gpu_hours, tokens, batch * seq, num_gpus)
        recipe = recipe_of_one(model, seq, precision, adapter, rank, recompute)
        speed = Speed(step_s, mfu, row, num_gpus, peak_flops)
        with options.only_json(json), progress(f"counting the FLOPs of {recipe.model.display_name}"):
            found |= step_usage(recipe, batch, attention, speed, closed_form)
        if tokens is not None:
            found |= run_usage(tokens, batch * seq, found["step_s"], num_gpus, price)
    if gpu_hours is not None and not of_run:
        if price is None:
            raise InputError("no price known", "give --price", field="--gpu", value=gpu)
        found |= money(gpu_hours, price)
    _check_finite(found)
    _show(found, json=json)


def _num_given(*values: object) -> int:
    return sum(value is not None for value in values)


def _show(found: dict[str, Any], *, json: bool) -> None:
    if json:
        options.print_json(found)
        return
    from trainfit.report.results import show_usage

    show_usage(found)


def _check_positive(given: dict[str, float | None]) -> None:
    for option, value in given.items():
        if value is not None and value <= 0:
            raise typer.BadParameter(f"{option} must be above 0")


def _check_finite(found: dict[str, Any]) -> None:
    """Check results: finite options can overflow together."""
    for name, value in found.items():
        if isinstance(value, float) and not math.isfinite(value):
            largest = f"{sys.float_info.max:.0e}"
            raise typer.BadParameter(f"{name} would be past {largest}: correct the numbers")
