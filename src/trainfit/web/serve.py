"""Run the page's server on this machine's loopback address until Ctrl-C."""

import socket
from collections.abc import Callable

import uvicorn

from trainfit.spec.errors import InputError
from trainfit.web.app import app
from trainfit.web.limits import Bounds

ADDRESS = "127.0.0.1"
MOST_CONNECTIONS = 256


def serve(port: int, bounds: Bounds, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        port: 0 takes a free one.
        say: called with the page's address once connections are accepted.

    Raises:
        InputError: the port is taken.
    """
    with _bound(port) as listening:
        say(f"http://{ADDRESS}:{listening.getsockname()[1]}/")
        config = uvicorn.Config(
            app(bounds), log_level="warning", access_log=False, server_header=False, lifespan="on",
            timeout_keep_alive=30, timeout_graceful_shutdown=2, h11_max_incomplete_event_size=64 * 1024,
            backlog=MOST_CONNECTIONS, http="h11", ws="none", proxy_headers=False, loop="asyncio",
        )  # fmt: skip
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:  # Raised again by uvicorn once it has ended: the usual end.
            return


def _bound(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((ADDRESS, port))
    except OSError as error:
        made.close()
        remedy = "name another one, or 0 for a free one"
        raise InputError(
            f"cannot be listened on ({error.strerror})", remedy, field="--port", value=port
        ) from None
    made.listen(MOST_CONNECTIONS)
    return made
