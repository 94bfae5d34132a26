"""Fuzzed requests to the page's server: none fails in the server, none opens a file, memory is bounded."""

import copy
import ctypes
import http.client
import json
import os
import random
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from served import TINY, Server, served

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
NUM_REQUESTS = 5000
SECRET = "canary-3f9c2a"
PATHS = (
    "secret.json",
    "./secret.json",
    "../x/secret.json",
    "secret",
    "secret/",
    "./",
    "/etc/passwd",
    "~/.bashrc",
    "recipe.yaml",
    "file:///etc/passwd",
    "config.json",
    "secret.json\0",
    "hub:owner/name",
    "owner/name",
    "secret.py:Env",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63),
    10**400,
    0.5,
    1e308,
    "",
    "x",
    "x" * 5000,
    [],
    {},
    [[]],
    {"": ""},
    {"__proto__": {}},
    [None],
    "\u202e",
    "\ud800",
    "{{7*7}}",
    "'; DROP TABLE",
    "%s%n",
    "../" * 40,
    *PATHS,
)


def test_fuzzed_requests(tmp_path: Path) -> None:
    for name in ("secret.json", "config.json", "recipe.yaml", "secret.py"):
        (tmp_path / name).write_text(json.dumps({"model_type": SECRET, "hidden_size": 64}))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text(json.dumps({"model_type": SECRET}))
    seeded = random.Random(20261127)
    with served(tmp_path) as server:
        server.ask("predict", {"recipe": TINY})
        opened = _watched(tmp_path, tmp_path / "secret")
        before, statuses = _resident(server.process.pid), Counter[int]()
        make = [_recipe, _recipe, _body, _text, _widget, _headers, _path]
        for _ in range(NUM_REQUESTS):
            status, body = _sent(server, *seeded.choice(make)(seeded))
            statuses[status] += 1
            assert status < 500, body
            assert SECRET.encode() not in body
        grown = _resident(server.process.pid) - before
        assert opened() == []
        assert grown < 100 * 2**20, grown
        assert server.process.poll() is None
        assert server.ask("predict", {"recipe": TINY}).answer["estimate"]["fits"]
    assert statuses[422] > NUM_REQUESTS / 3, statuses
    assert statuses[200] > 50, statuses
    assert set(statuses) <= {200, 400, 403, 404, 405, 413, 414, 415, 422, 429}, statuses


Request = tuple[str, str, bytes, dict[str, str]]
JSON = {"Content-Type": "application/json"}


def _sent(server: Server, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """Send a request and return its status and the beginning of its body, which also ends a trace."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            connection.putheader(name, value.encode("latin-1", "replace"))
        connection.endheaders(body)
        response = connection.getresponse()
        is_stream = (response.getheader("content-type") or "").startswith("text/event-stream")
        return response.status, response.readline() if is_stream else response.read()
    except (BrokenPipeError, ConnectionResetError):
        return 413, b""  # Closed before all was sent.
    finally:
        connection.close()


def _recipe(seeded: random.Random) -> Request:
    """A recipe with one to three fields of any value, in any place."""
    recipe = json.loads(json.dumps(TINY))
    fields = [
        "model.config",
        "model.weights",
        "model",
        "model.name",
        "batch.micro",
        "batch.seq",
        "batch",
        "precision",
        "data",
        "data.train",
        "data.eval",
        "data.tokenizer",
        "data.chat_template",
        "objective",
        "objective.environment",
        "objective.arguments",
        "recompute",
        "recompute.layers",
        "optimizer.name",
        "adapter",
        "adapter.targets",
        "quantize",
        "hardware.gpu",
        "hardware.count",
        "hardware",
        "parallel.tensor",
        "compile",
        "seed",
        "extends",
        "x",
        "model.config.num_hidden_layers",
        "model.config.model_type",
        "model.config.auto_map",
        "model.config._name_or_path",
    ]
    for _ in range(seeded.randint(1, 3)):
        _put(recipe, seeded.choice(fields).split("."), seeded.choice(VALUES))
    kind = seeded.choice(["predict", "course", "advice", "plan", "nothing"])
    content: Any = {"recipe": recipe}
    if seeded.random() < 0.1:
        content[seeded.choice(["fixed", "tune", "memory_gib", "x"])] = seeded.choice(VALUES)
    return "POST", f"/api/{kind}", _json(content), JSON


def _put(data: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(data.get(name), dict):
            data[name] = {"model_type": "llama"} if name == "config" else {}
        data = data[name]
    data[path[-1]] = copy.deepcopy(value)


def _json(content: Any) -> bytes:
    return json.dumps(content).encode()


def _body(seeded: random.Random) -> Request:
    """Bytes that are hardly JSON."""
    whole = bytearray(_json({"recipe": TINY}))
    for _ in range(seeded.randint(1, 8)):
        whole[seeded.randrange(len(whole))] = seeded.randrange(256)
    choices: list[Callable[[], bytes]] = [
        lambda: bytes(whole),
        lambda: bytes(whole[: seeded.randrange(len(whole))]),
        lambda: b"[" * seeded.randint(1, 5000),
        lambda: b'{"recipe":' * 2000,
        lambda: seeded.randbytes(seeded.randint(0, 3000)),
        lambda: b"NaN",
        lambda: b'{"a":1,"a":2}',
        lambda: b"9" * 6000,
        lambda: b" " * 300_000,
        lambda: _json(seeded.choice([one for one in VALUES if one != 10**400])),
    ]
    kind = seeded.choice(["predict", "plan", "paste", "oom", "widget"])
    return "POST", f"/api/{kind}", seeded.choice(choices)(), JSON


def _text(seeded: random.Random) -> Request:
    """Pasted text, and texts of errors."""
    texts = [
        "CUDA out of memory. Tried to allocate 2.00 GiB. ",
        "GPU 0 has a total capacity of 9 GiB of which ",
        "model: ",
        "{a: &x [*x]}",
        "- " * 500,
        "batch: {seq: 8k}\n",
        "!!python/object:os.system x",
        "model: secret.json\n",
        "extends: recipe.yaml\n",
        "\n",
        '{"model_type": "llama"}',
        "1e999",
        ": : :",
        "? " * 300,
        "\t",
        "%YAML 9.9\n---\n",
        "weights: ./secret\n",
        "9" * 400,
    ]
    text = "".join(seeded.choice(texts) for _ in range(seeded.randint(1, 40)))
    return "POST", f"/api/{seeded.choice(['paste', 'oom'])}", _json({"text": text}), JSON


def _widget(seeded: random.Random) -> Request:
    names = [
        "a",
        "b",
        "h",
        "h_ff",
        "layers",
        "s",
        "v",
        "k",
        "t",
        "d",
        "zero",
        "mixed",
        "recomputation",
        "ff_activation",
        "x",
    ]
    inputs = {
        seeded.choice(names): seeded.choice([*VALUES, 1, 8, 64, 2**24]) for _ in range(seeded.randint(0, 5))
    }
    content: dict[str, Any] = {"inputs": inputs, "gpu": seeded.choice(["h100-sxm", *VALUES])}
    if seeded.random() < 0.5:
        content["preset"] = seeded.choice(["Llama 3 8B", "Llama 3 405B", *VALUES[:20]])
    return "POST", "/api/widget", _json(content), JSON


def _headers(seeded: random.Random) -> Request:
    """A good question of a doubtful sender."""
    names = [
        "Host",
        "Origin",
        "Content-Type",
        "Content-Length",
        "Sec-Fetch-Site",
        "Cookie",
        "Range",
        "If-None-Match",
        "X-Forwarded-For",
        "Accept",
        "Expect",
        "Upgrade",
    ]
    values = [
        "",
        "example.com",
        "http://example.com",
        "localhost",
        "127.0.0.1:x",
        "null",
        "application/json; charset=utf-7",
        "*",
        "0",
        "-1",
        "999999999999",
        "é" * 50,
        "a" * 4000,
        "websocket",
        "cross-site",
    ]
    headers = {**JSON, **{seeded.choice(names): seeded.choice(values) for _ in range(seeded.randint(1, 3))}}
    # A length that is not the body's leaves the connection waiting, which is the sender's own time.
    headers.pop("Content-Length", None)
    headers.pop("Expect", None)
    return "POST", "/api/oom", _json({"text": "CUDA out of memory. Tried to allocate 2.00 GiB"}), headers


def _path(seeded: random.Random) -> Request:
    parts = [
        "/",
        "static",
        "api",
        "..",
        "%2e%2e",
        "%00",
        "etc",
        "passwd",
        "secret.json",
        "app.js",
        "app.py",
        "page",
        "predict",
        "\\",
        "//",
        "?x=1",
        "%5c",
        "%ff",
        ";",
        "~root",
    ]
    path = "/" + "/".join(seeded.choice(parts) for _ in range(seeded.randint(0, 5)))
    return seeded.choice(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE"]), path, b"", JSON


def _resident(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _watched(*folders: Path) -> Callable[[], list[str]]:
    """Return a function that returns the files of the folders that were opened since (Linux's inotify)."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert watch >= 0
    opens = 0x20
    assert all(libc.inotify_add_watch(watch, os.fsencode(folder), opens) >= 0 for folder in folders)

    def names() -> list[str]:
        found: list[str] = []
        try:
            while data := os.read(watch, 65536):
                at = 0
                while at < len(data):
                    size = struct.unpack_from("iIII", data, at)[3]
                    found.append(data[at + 16 : at + 16 + size].rstrip(b"\0").decode())
                    at += 16 + size
        except BlockingIOError:
            pass
        return [name for name in found if name in ("secret.json", "config.json", "recipe.yaml", "secret.py")]

    return names
