"""A server of the page in a process of its own, and a small HTTP client for it."""

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

TINY = {
    "model": {"config": "tiny-llama-demo"},
    "batch": {"micro": 2, "seq": 64},
    "hardware": {"gpu": "h100-sxm"},
}
"""A recipe that is traced in a moment."""


class Reply(NamedTuple):
    """A response, read to its end; ``events`` of a stream."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[dict[str, Any]]:
        parts = self.body.decode().split("\n\n")
        return [json.loads(part.removeprefix("data: ")) for part in parts if part]

    @property
    def answer(self) -> dict[str, Any]:
        """The answer, from a stream or at once."""
        if self.headers["content-type"].startswith("application/json"):
            return self.data["answer"]
        return next(event["answer"] for event in self.events if "answer" in event)


class Server(NamedTuple):
    """A running server."""

    port: int
    process: subprocess.Popen[str]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        """Send a request; ``headers`` with underscores for dashes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        finally:
            connection.close()

    def ask(self, name: str, content: Any, **headers: str) -> Reply:
        """Send JSON to ``/api/NAME``."""
        return self.request("POST", f"/api/{name}", json.dumps(content).encode(),
                            **{"Content_Type": "application/json", **headers})  # fmt: skip

    def tracers(self) -> list[int]:
        """Return the processes of the server, and of these the ones that trace now."""
        return [child for parent in _children(self.process.pid) for child in _children(parent)]


def _children(process: int) -> list[int]:
    """Return the running children of a process, zombies left out."""
    found: list[int] = []
    with suppress(OSError):
        for text in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            with suppress(OSError):
                if " Z " not in Path(f"/proc/{text}/stat").read_text().rpartition(")")[2][:4]:
                    found.append(int(text))
    return found


@contextmanager
def served(cache: Path, *options: str) -> Iterator[Server]:
    """Run ``trainfit serve`` on a free port, with a cache of its own."""
    environment = {**os.environ, "TRAINFIT_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "trainfit", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=cache)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "http://127.0.0.1:" in line, line
        yield Server(int(line.split("http://127.0.0.1:")[1].split("/")[0]), process)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.communicate()
