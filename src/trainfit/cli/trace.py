"""``trainfit trace``: predict a training script of the user's own, without a GPU and without a recipe."""

import runpy
import sys
import traceback
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainfit.cli.options import EXIT_DOES_NOT_FIT, Check, Json, only_json, print_json
from trainfit.spec import DEFAULT_GPU
from trainfit.spec.errors import InputError
from trainfit.spec.printable import say

SCRIPT_HELP = "A Python file that trains a torch module on cuda, run as __main__."
NODES_HELP = "Hosts that share the ranks equally; default: with the catalog's GPUs each."
RANKS_HELP = "Trace rank 0 of N, one a GPU, as under torchrun; default: one process."

OPTIONS = {"context_settings": {"allow_interspersed_args": False, "ignore_unknown_options": True}}


def run(
    script: Annotated[str, Argument(metavar="SCRIPT", help=SCRIPT_HELP)],
    arguments: Annotated[
        list[str] | None, Argument(metavar="[ARGUMENT]...", help="The script's own arguments.")
    ] = None,
    gpu: Annotated[
        str, Option(metavar="NAME", help="A measured or modelled GPU of trainfit gpus.")
    ] = DEFAULT_GPU,
    steps: Annotated[int, Option(min=1, metavar="N", help="Optimizer steps that are traced.")] = 3,
    world_size: Annotated[int | None, Option(min=1, metavar="N", help=RANKS_HELP)] = None,
    nodes: Annotated[int | None, Option(min=1, metavar="N", help=NODES_HELP)] = None,
    json: Json = False,
    check: Check = False,
) -> int:
    """Predict a training script's memory, FLOPs and time. Needs no GPU; options stand before SCRIPT."""
    path = Path(script)
    if not path.is_file():
        raise InputError("no such file", "name a Python file that trains", field="SCRIPT", value=script)
    from trainfit.api.calls import trace
    from trainfit.report.prediction_text import show

    def train() -> None:
        _run_script(path, arguments or [])

    train.__qualname__ = path.name
    with only_json(json):
        estimate = trace(train, gpu=gpu, steps=steps, world_size=world_size, nodes=nodes)
    if json:
        print_json(estimate)
    else:
        show(None, estimate)
    return EXIT_DOES_NOT_FIT if check and not estimate.fits else 0


def _run_script(path: Path, arguments: list[str]) -> None:
    """Run the file as Python does, with its folder first on the path and its own ``sys.argv``.

    Raises:
        InputError: the script raised an exception, whose traceback is printed on standard error.
    """
    kept = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(path), *arguments], [str(path.resolve().parent)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            problem = f"the script ended with exit code {error.code}"
            raise InputError(problem, "correct it, or its arguments", file=str(path)) from None
    except InputError:
        raise
    except Exception as error:
        say("".join(traceback.format_exception(error)), err=True, end="")
        raise InputError(f"{type(error).__name__}: {error}", "correct the script", file=str(path)) from None
    finally:
        sys.argv, sys.path[:] = kept
