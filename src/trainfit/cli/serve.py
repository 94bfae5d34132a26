"""``trainfit serve`` and ``trainfit export-page``: the page, on this machine or as static files."""

from typing import Annotated

from typer import Option

from trainfit.cli import options
from trainfit.spec.optional import require
from trainfit.spec.printable import say

PORT_HELP = "Of this machine's loopback address; 0: a free one."
LIMIT_HELP = "End the trace of a question after so many seconds."
MEMORY_HELP = "End it when it needs more of this machine's memory, in GiB."
OPEN_HELP = "Open the page in the browser."


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
