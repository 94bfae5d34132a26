"""``trainfit trace``: predict a training script of the user's own, without a GPU and without a recipe."""

from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from trainfit.cli import completion
from trainfit.cli.options import (
    EXIT_DOES_NOT_FIT,
    CalibrationFile,
    Check,
    Json,
    at_most,
    only_json,
    print_json,
)  # fmt: skip
from trainfit.cli.trace.launch import Launch, launch_of
from trainfit.cli.trace.scripts import callable_of
from trainfit.spec import DEFAULT_GPU
from trainfit.spec.errors import InputError
from trainfit.spec.printable import say

SCRIPT_HELP = (
    "A Python file that trains a torch module on cuda, run as __main__; also -m MODULE, or a command line of "
    "torchrun, accelerate launch or python."
)
NODES_HELP = "Hosts that share the ranks equally; default: with the catalog's GPUs each."
RANKS_HELP = "Trace rank 0 of N, one a GPU, as under torchrun; default: one process."
SEPARATOR = "--"
SEPARATED = "trainfit.separated"
"""In the context: ``--`` stands before the script, so that every word behind it is the script's."""


class TraceCommand(TyperCommand):
    """A command whose own options end at the script, at ``-m MODULE`` and at ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name: param for param in self.params for name in param.opts}
        position = 0
        while (
            position < len(args)
            and args[position].startswith("-")
            and args[position] not in ("-m", SEPARATOR)
        ):
            option: Any = options.get(args[position])
            position += 2 if option is not None and not option.is_flag else 1
        ctx.meta[SEPARATED] = args[position : position + 1] == [SEPARATOR]
        if args[position : position + 1] == ["-m"]:
            args = [*args[:position], SEPARATOR, *args[position:]]
        return super().parse_args(ctx, args)


OPTIONS = {"cls": TraceCommand, "context_settings": {"allow_interspersed_args": False}}


def run(
    ctx: typer.Context,
    script: Annotated[str, Argument(metavar="SCRIPT", help=SCRIPT_HELP)],
    arguments: Annotated[
        list[str] | None, Argument(metavar="[ARGUMENT]...", help="The script's own arguments.")
    ] = None,
    gpu: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=f"A measured or modelled GPU of trainfit gpus ({DEFAULT_GPU}).",
            autocompletion=completion.gpus,
        ),
    ] = None,
    steps: Annotated[
        int, Option(min=1, callback=at_most, metavar="N", help="Optimizer steps that are traced.")
    ] = 3,
    world_size: Annotated[int | None, Option(min=1, callback=at_most, metavar="N", help=RANKS_HELP)] = None,
    nodes: Annotated[int | None, Option(min=1, callback=at_most, metavar="N", help=NODES_HELP)] = None,
    calibration: CalibrationFile = None,
    json: Json = False,
    check: Check = False,
) -> int:
    """Predict a training script's memory, FLOPs and time. Needs no GPU; options stand before SCRIPT."""
    from trainfit.api.calls import trace
    from trainfit.catalog.load import gpu as find_gpu
    from trainfit.report.console import progress
    from trainfit.report.prediction_text import show

    assumed = "" if gpu else f"GPU {DEFAULT_GPU}: not given; --gpu, before the script"
    gpu = gpu or DEFAULT_GPU
    launch = launch_of([script, *(arguments or [])], find_gpu(gpu).gpus_per_host)
    if not ctx.meta[SEPARATED]:
        _check_order(ctx, launch)
    if launch.ranks is not None:
        world_size = _same(world_size, launch.ranks, "world-size")
        nodes = _same(nodes, launch.nodes, "nodes")

    train = callable_of(launch)
    watched = progress(f"tracing {train.__qualname__} on {gpu}, {steps} optimizer steps", live=False)
    with only_json(json), watched:
        estimate = trace(
            train, gpu=gpu, steps=steps, world_size=world_size, nodes=nodes, calibration=calibration
        )
    if json:
        print_json(estimate)
    else:
        show(None, estimate, assumed=assumed)
    return EXIT_DOES_NOT_FIT if check and not estimate.fits else 0


def _check_order(ctx: typer.Context, launch: Launch) -> None:
    """Refuse an option of trainfit's that follows the script, unless the script's text has it too."""
    own = {name for param in ctx.command.params for name in param.opts if name.startswith("--")}
    text = launch.file.read_text(errors="replace") if launch.file is not None else ""
    for word in launch.arguments:
        name = word.partition("=")[0]
        if name not in own:
            continue
        order = f"trainfit's own options stand before it: trainfit trace {name} ... {launch.target}"
        if name in text or name.replace("-", "_").replace("__", "--", 1) in text:
            say(f"trainfit: note: {name} after {launch.target} is the script's; {order}", err=True)
        else:
            raise typer.BadParameter(
                f"{name} stands after {launch.target}: {order}; if it is the script's, write {SEPARATOR} "
                "before the script"
            )


def _same(given: int | None, launched: int | None, option: str) -> int | None:
    if given is not None and given != launched:
        problem = f"the launcher's options say {launched}"
        raise InputError(problem, f"leave --{option} out", field=f"--{option}", value=given)
    return launched
