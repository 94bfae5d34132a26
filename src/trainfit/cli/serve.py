"""``trainfit serve`` and ``trainfit export-page``: the page, on this machine or as static files."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Option

from trainfit.cli import options
from trainfit.spec.optional import require
from trainfit.spec.printable import say

PORT_HELP = "Of this machine's loopback address; 0: a free one."
LIMIT_HELP = "End the trace of a question after so many seconds."
MEMORY_HELP = "End it when it needs more of this machine's memory, in GiB."
OPEN_HELP = "Open the page in the browser."
FOLDER_HELP = "A new folder, which any web server can serve."
TRAIN_HELP = "Of full, lora, qlora."
RECOMPUTE_HELP = "Of none, selective, full."
RECOMPUTED = ("none", "selective", "full")


def run(
    port: Annotated[int, Option(min=0, max=65535, metavar="N", help=PORT_HELP)] = 8765,
    limit: Annotated[float, Option(metavar="SECONDS", parser=options.seconds, help=LIMIT_HELP)] = 300.0,
    memory_gib: Annotated[float, Option(min=0.5, metavar="GIB", help=MEMORY_HELP)] = 8.0,
    open: Annotated[bool, Option("--open", help=OPEN_HELP)] = False,
) -> None:
    """Serve the page: predictions, plans and comparisons in a browser, for this machine alone.

    Works offline. Ctrl-C ends it.
    """
    require("fastapi", "web")
    require("uvicorn", "web")
    from trainfit.spec.units import GIB
    from trainfit.web.limits import Bounds
    from trainfit.web.serve import serve

    def ready(address: str) -> None:
        say(f"trainfit: the page is at {address} (for this machine alone; Ctrl-C ends it)", err=True)
        if open:
            import webbrowser

            webbrowser.open(address)

    serve(port, Bounds(seconds=limit, memory_bytes=int(memory_gib * GIB)), ready)


def _listed(text: Any) -> list[str]:
    parts = [part.strip() for part in str(text).split(",")]
    return list(dict.fromkeys(part for part in parts if part))


def _numbers(text: Any) -> list[int]:
    return list(dict.fromkeys(options.length(part) for part in _listed(text)))


def _choice(name: str, metavar: str, help: str, *, numbers: bool = False) -> Any:
    """Return an option that takes several values, with commas between them."""
    return Option(name, metavar=metavar, parser=_numbers if numbers else _listed, help=help)


def export_page(
    folder: Annotated[Path, Argument(metavar="DIR", help=FOLDER_HELP)],
    models: Annotated[Any, _choice("--models", "NAMES", "Models of the catalog.")] = "llama-3.1-8b,qwen3-8b",
    gpus: Annotated[Any, _choice("--gpus", "NAMES", "GPUs of the catalog.")] = "h100-sxm,h200,rtx-4090",
    counts: Annotated[Any, _choice("--counts", "N", "Numbers of GPUs.", numbers=True)] = "1",
    batches: Annotated[Any, _choice("--batches", "B", "Micro-batches.", numbers=True)] = "1",
    seqs: Annotated[Any, _choice("--seqs", "S", "Tokens of a sequence.", numbers=True)] = "2k,8k",
    train: Annotated[Any, _choice("--train", "KINDS", TRAIN_HELP)] = "full,lora,qlora",
    recompute: Annotated[Any, _choice("--recompute", "KINDS", RECOMPUTE_HELP)] = "none,full",
) -> None:
    """Write the page as static files, with the answers to every combination of a few choices.

    Several values have commas between them. The page answers only these; everything else needs serve.
    """
    require("fastapi", "web")
    from trainfit.report.console import progress
    from trainfit.web.export import LABELS, Choices, export_page

    for name, given, known in (("--train", train, LABELS), ("--recompute", recompute, RECOMPUTED)):
        if unknown := [one for one in given if one not in known]:
            raise BadParameter(f"{name}: no such kind: {', '.join(unknown)}; known: {', '.join(known)}")
    choices = Choices(models, gpus, counts, seqs, batches, train, recompute)
    with progress("predicting what the page answers") as report:
        count = export_page(folder, choices, report)
    say(f"{count} answers in {folder}; serve it with any web server: python -m http.server -d {folder}")
