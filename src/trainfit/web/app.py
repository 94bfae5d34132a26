"""The page's server: its files, what the page is made of, and the answers to its questions.

``GET /``, ``/static/NAME``, ``/api/page``; ``POST /api/predict``, ``course``, ``advice``, ``plan`` with a
recipe; ``/api/paste`` with text; ``/api/oom`` with an error's text; ``/api/widget`` with the Ultrascale
calculator's inputs. An answer that is kept, or whose ledger is, comes as JSON; any other as server-sent
events: progress, then the answer. Closing the connection ends the trace.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import parse_json
from trainfit.web import answers, calculators, form
from trainfit.web.guard import Guard
from trainfit.web.jobs import BusyError, Event, Tracing
from trainfit.web.limits import Bounds, pasted
from trainfit.web.questions import Question, prepare, question_of, quick_answer
from trainfit.web.tracer import refusal

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml",
         ".js": "text/javascript; charset=utf-8"}  # fmt: skip
MOST_AT_ONCE = 2
"""Requests that the server itself works on at once, without the process that traces."""
BODY_S = 10.0
"""Time in which a request's body must be there."""


def app(bounds: Bounds | None = None) -> FastAPI:
    """Return the server's application; ``.state.tracing`` is its process that traces."""
    tracing = Tracing(bounds or Bounds())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tracing.warm_up()
        preparing = asyncio.create_task(run_in_threadpool(prepare, form.DEFAULT))
        yield
        await preparing
        await tracing.close()

    made = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None,
                   redirect_slashes=False)  # fmt: skip
    made.state.tracing = tracing
    turns = asyncio.Semaphore(MOST_AT_ONCE)
    made.add_middleware(Guard)
    made.add_exception_handler(InputError, _refuse)
    made.add_exception_handler(ClientDisconnect, _nobody)

    @made.get("/")
    @made.head("/")
    async def page() -> Response:
        return _file("index.html")

    @made.get("/static/{name}")
    async def static(name: str) -> Response:
        return _file(name)

    @made.get("/api/page")
    async def contents() -> Response:
        return Response(await run_in_threadpool(_contents), media_type="application/json")

    @made.post("/api/{name}")
    async def ask(name: str, request: Request) -> Response:
        body = await _body(request)
        async with turns:
            content = await run_in_threadpool(parse_json, body, tag_constants=True)
            if name in CALCULATIONS:
                return JSONResponse(await run_in_threadpool(CALCULATIONS[name], content))
            question = await run_in_threadpool(question_of, name, content)
            found = await run_in_threadpool(quick_answer, question)
        if found is None:
            return _Events(tracing, question)
        # Kept once the answer is sent: writing a file safely takes longer than most answers.
        later = None if found.is_kept else BackgroundTask(answers.keep, question.key, found.content)
        return JSONResponse({"answer": found.content}, background=later)

    return made


@cache
def files() -> dict[str, bytes]:
    """Return the page's files by name; no other file is ever served."""
    return {path.name: path.read_bytes() for path in sorted(STATIC.iterdir()) if path.suffix in TYPES}


def _file(name: str) -> Response:
    content = files().get(name)
    if content is None:
        return JSONResponse({"error": {"text": "there is no such file"}}, 404)
    return Response(content, media_type=TYPES[Path(name).suffix])


@cache
def _contents() -> bytes:
    return json.dumps(form.contents()).encode()


def _paste(content: Any) -> dict[str, Any]:
    return {"recipe": pasted(_text(content))}


def _oom(content: Any) -> dict[str, Any]:
    return calculators.out_of_memory(_text(content))


def _text(content: Any) -> str:
    if not isinstance(content, dict) or not isinstance(content.get("text"), str):
        raise InputError("no text", 'send {"text": ...}', field="text")
    return content["text"]


CALCULATIONS = {"paste": _paste, "oom": _oom, "widget": calculators.widget}
"""Questions that need no ledger."""


async def _body(request: Request) -> bytes:
    try:
        return await asyncio.wait_for(request.body(), BODY_S)
    except TimeoutError:
        raise InputError("the request did not arrive in time", "send it again") from None


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, InputError)
    return JSONResponse({"error": refusal(error)}, 422)


async def _nobody(request: Request, error: Exception) -> Response:
    """Answer a client that has gone before its request was whole."""
    return Response(status_code=400)


class _Events(Response):
    """Server-sent events of a question that is traced; ends the trace when the client has gone."""

    def __init__(self, tracing: Tracing, question: Question):
        super().__init__(media_type="text/event-stream")
        self.tracing, self.question = tracing, question
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self.tracing.events(self.question)
        gone = asyncio.create_task(_disconnected(receive))
        is_begun = False
        try:
            while True:
                event = await _unless(gone, events)
                if event is None:
                    break
                if not is_begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    is_begun = True
                await send(_message(event))
            if not gone.done():
                await send({"type": "http.response.body", "body": b""})
        except BusyError:
            await JSONResponse({"error": {"text": "too many questions wait: try again later"}}, 429)(
                scope, receive, send
            )
        except OSError:  # The client has gone.
            pass
        finally:
            gone.cancel()
            await events.aclose()


async def _unless(gone: "asyncio.Task[None]", events: AsyncIterator[Event]) -> Event | None:
    """Return the next event; None at the end, and as soon as the client has gone."""
    task = asyncio.create_task(_next(events))
    await asyncio.wait([gone, task], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    return None


async def _next(events: AsyncIterator[Event]) -> Event | None:
    try:
        return await anext(events)
    except StopAsyncIteration:
        return None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _message(event: Event) -> dict[str, Any]:
    body = f"data: {json.dumps(event)}\n\n".encode()
    return {"type": "http.response.body", "body": body, "more_body": True}
