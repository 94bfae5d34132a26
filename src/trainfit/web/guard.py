"""The door of the server: who may ask, how much may be sent, and what a browser may do with the page.

A page of another site can make a browser send requests here. So the host must be this machine by name (which
a rebound DNS name is not), the origin this page's own, and what is sent JSON, which no other origin may
send.
"""

import asyncio
import contextlib
import json
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainfit.web.limits import MAX_BODY_BYTES

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}

DISCARD_S = 2.0


class TooLargeError(Exception):
    """A request's body is over MAX_BODY_BYTES."""


class Guard:
    """ASGI middleware that refuses requests of other sites and too large ones."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = refused(scope["method"], Headers(scope=scope))
        if refusal is not None:
            await _discarded(receive)
            await _respond(send, *refusal)
            return
        began = False

        async def guarded(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                message = {**message, "headers": [*message.get("headers", []), *_headers()]}
            await send(message)

        try:
            await self.app(scope, _counted(receive), guarded)
        except TooLargeError:
            if not began:
                await _respond(send, 413, f"the request is over {MAX_BODY_BYTES // 1024} KiB")


def refused(method: str, headers: Headers) -> tuple[int, str] | None:
    """Return the status and text with which a request is refused; None: it is not."""
    hosts = headers.getlist("host")
    host = hosts[0] if len(hosts) == 1 else ""
    if _without_port(host) not in LOOPBACK:
        return 403, "the host is not this machine: open the address that trainfit serve prints"
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return 403, "the request comes from another site"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return 403, "the request comes from another site"
    if method not in ("GET", "HEAD", "POST"):
        return 405, "only GET and POST are taken"
    if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return 415, "send JSON, with Content-Type: application/json"
    size = headers.get("content-length", "0")
    if not size.isdecimal() or int(size[:12]) > MAX_BODY_BYTES or len(size) > 12:
        return 413, f"the request is over {MAX_BODY_BYTES // 1024} KiB"
    return None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and (port.isascii() and port.isdecimal()) else host.lower()


def _counted(receive: Receive) -> Receive:
    """Return ``receive`` that stops a body at its largest size, also one of unknown length."""
    count = 0

    async def counting() -> Message:
        nonlocal count
        message = await receive()
        count += len(message.get("body", b""))
        if count > MAX_BODY_BYTES:
            raise TooLargeError
        return message

    return counting


async def _discarded(receive: Receive) -> None:
    """Read the body of a refused request, at most its largest size and for DISCARD_S.

    A connection that closes with unread bytes is reset, and the client may never read the answer.
    """
    counted = _counted(receive)
    with contextlib.suppress(TooLargeError, TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while (await counted()).get("more_body"):
                pass


def _headers() -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in HEADERS.items()]


async def _respond(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": {"text": text}}).encode()
    headers: list[Any] = [(b"content-type", b"application/json"), (b"connection", b"close"), *_headers()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
