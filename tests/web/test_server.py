"""The page's server: answers, the door, bounds of work, and the end of a trace that nobody waits for."""

import http.client
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainfit
from served import TINY, Server, served

pytestmark = pytest.mark.processes
SECRET = "canary-3f9c2a"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "secret.json").write_text(json.dumps({"model_type": SECRET, "hidden_size": 8}))
    (folder / "config.json").write_text(json.dumps({"model_type": SECRET, "hidden_size": 8}))
    (folder / "recipe.yaml").write_text(f"model: {SECRET}\n")
    with served(folder) as running:
        yield running


def test_the_first_answer_is_traced_and_the_second_is_kept(server: Server) -> None:
    first = server.ask("predict", {"recipe": TINY})
    assert first.status == 200
    assert first.headers["content-type"].startswith("text/event-stream")
    assert set(first.events[-1]) == {"answer"}
    assert first.answer["estimate"] == trainfit.predict(TINY).model_dump(mode="json")
    taken = []
    for _ in range(5):
        began = time.monotonic()
        again = server.ask("predict", {"recipe": TINY})
        taken.append(time.monotonic() - began)
        assert again.headers["content-type"] == "application/json"
        assert again.answer == first.answer
    assert min(taken) < 0.1, taken


def test_a_kept_ledger_is_answered_without_a_trace(server: Server) -> None:
    """The price is no part of a ledger, and so the answer to it is not kept, but its ledger is."""
    server.ask("predict", {"recipe": TINY})
    taken = []
    for price in (1.25, 1.5, 1.75, 2.0):
        recipe = {**TINY, "hardware": {"gpu": "h100-sxm", "price_per_hour": price}}
        began = time.monotonic()
        reply = server.ask("predict", {"recipe": recipe})
        taken.append(time.monotonic() - began)
        assert reply.headers["content-type"] == "application/json"
        assert reply.answer["estimate"]["cost"]["price_per_gpu_hour"] == price
    assert min(taken) < 0.1, taken
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_the_course_has_the_peak_of_the_answer(server: Server) -> None:
    answer = server.ask("predict", {"recipe": TINY}).answer
    course = server.ask("course", {"recipe": TINY}).answer
    alive = sum(sizes[course["peak"]] for sizes in course["alive"].values())
    assert alive + course["unsplit_bytes"] == answer["estimate"]["peak_allocated_bytes"]
    assert len(course["at"]) == len(course["phase"]) == len(course["largest"]) <= 160


def test_a_recipe_that_does_not_fit_has_advice(server: Server) -> None:
    recipe = {
        "model": {"config": "smollm-135m"},
        "batch": {"micro": 64, "seq": 2048},
        "hardware": {"gpu": "t4"},
    }
    assert not server.ask("predict", {"recipe": recipe}).answer["estimate"]["fits"]
    advice = server.ask("advice", {"recipe": recipe}).answer
    assert all(one["fits"] for one in advice["changes"])
    assert advice["changes"]
    assert trainfit.load_recipe(advice["changes"][0]["recipe"]).id != trainfit.load_recipe(recipe).id


def test_a_plan_has_the_fastest_recipe(server: Server) -> None:
    content = {
        "recipe": {**TINY, "batch": {"seq": 64}},
        "keep_quality": True,
        "memory_gib": 2.0,
        "fixed": ["precision", "compile", "loss", "attention", "block_kernels", "optimizer"],
    }
    reply = server.ask("plan", content)
    plan = reply.answer
    speeds = [one["tokens_per_s"] for one in plan["found"]]
    assert speeds == sorted(speeds, reverse=True)
    assert all(not one["numerics"] for one in plan["found"])
    assert plan["limit_bytes"] == 2 * 2**30
    assert any("progress" in event for event in reply.events)
    assert server.ask("plan", content).headers["content-type"] == "application/json"


def test_the_copied_recipe_and_command_are_the_recipe(server: Server) -> None:
    import shlex

    from trainfit.api.recipes import read
    from trainfit.spec.parsing.plain_data import parse_yaml

    recipe = {**TINY, "optimizer": {"name": "muon", "lr": 0.001}, "adapter": None, "recompute": {"every": 2},
              "parallel": {"bucket_mb": None}, "data": {"pack": False}}  # fmt: skip
    answer = server.ask("predict", {"recipe": recipe}).answer
    assert trainfit.load_recipe(parse_yaml(answer["yaml"])).id == answer["recipe_id"]
    program, verb, model, *options = shlex.split(answer["command"])
    assert (program, verb) == ("trainfit", "predict")
    named = {
        "--gpu": "hardware.gpu",
        "--count": "hardware.count",
        "--batch": "batch.micro",
        "--seq": "batch.seq",
    }
    settings = [value if name == "--set" else f"{named[name]}={value}"
                for name, value in zip(options[::2], options[1::2], strict=True)]  # fmt: skip
    assert read(model, settings)[0].id == answer["recipe_id"]


def test_a_pasted_config_and_a_pasted_recipe(server: Server) -> None:
    config = trainfit.load_recipe("tiny-llama-demo").model.config
    row = json.loads((Path(trainfit.__file__).parent / "catalog/models/tiny-llama-demo.json").read_text())
    assert config == "tiny-llama-demo"
    found = server.ask("paste", {"text": json.dumps(row)}).data["recipe"]
    assert found == {"model": {"config": row}}
    found = server.ask(
        "paste", {"text": "model: Qwen/Qwen3-8B\nbatch: {seq: 8k}\nhardware: 2xH100 SXM\n"}
    ).data["recipe"]
    assert found["model"] == {"config": "qwen3-8b"}
    assert found["hardware"] == {"gpu": "h100-sxm", "count": 2}
    refused = server.ask("paste", {"text": "model: llama-3.1-8b\nbatch: {sequence: 4}\n"})
    assert refused.status == 422
    assert refused.data["error"]["field"] == "batch.sequence"
    own = {**TINY, "model": {"config": row}}
    assert server.ask("predict", {"recipe": own}).answer["command"] == "trainfit predict recipe.yaml"


def test_the_ultrascale_numbers_are_the_calculators(server: Server) -> None:
    from trainfit.flops.calculators import ultrascale

    reply = server.ask("widget", {"preset": "Llama 3 8B", "inputs": {"s": 4096, "b": 1}}).data
    spec = ultrascale.PRESETS["Llama 3 8B"].model_copy(update={"s": 4096, "b": 1})
    numbers = {one["name"]: one["bytes"] for one in reply["numbers"]}
    memory = ultrascale.memory(spec)
    assert numbers == {**memory.model_dump(), "total": memory.total}
    labels = [one["label"] for one in reply["recipes"]]
    assert labels == ["the same shape", "llama-3-8b"]
    assert trainfit.load_recipe(reply["recipes"][0]["recipe"]).batch.seq == 4096
    assert any("attention scores" in text for text in reply["reasons"])


def test_an_out_of_memory_error_is_explained(server: Server) -> None:
    text = server.request("GET", "/api/page").data["oom_example"]
    found = server.ask("oom", {"text": f"Traceback\n{text}\n"}).data
    assert found["message"]["requested"] == 2 * 2**30
    assert found["advice"]
    assert server.ask("oom", {"text": "no error at all"}).status == 422


def test_every_field_of_a_recipe_has_a_schema_with_words(server: Server) -> None:
    from trainfit.spec.recipe import Recipe

    schema = server.request("GET", "/api/page").data["schema"]
    assert list(schema["properties"]) == list(Recipe.model_fields)
    optimizer = schema["$defs"]["Optimizer"]["properties"]
    assert "first moment" in optimizer["momentum"]["description"]
    assert schema["$defs"]["Offload"]["properties"]["weights"]["description"].startswith("Blocks' weights")
    assert schema["$defs"]["Loader"]["properties"]["workers"]["description"] == "Processes"


def test_the_page_and_its_files_alone_are_served(server: Server) -> None:
    page = server.request("GET", "/")
    assert page.status == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    named = re.findall(r'(?:href|src)="(static/[^"]+)"', page.body.decode())
    assert len(named) >= 3
    assert all(server.request("GET", f"/{name}").status == 200 for name in named)
    for path in (
        "/static/../app.py",
        "/static/%2e%2e%2fapp.py",
        "/static/..%5capp.py",
        "/static//etc/passwd",
        "/etc/passwd",
        "/docs",
        "/openapi.json",
        "/static/",
    ):
        assert server.request("GET", path).status == 404, path


def test_no_other_address_than_the_servers_own_is_named() -> None:
    """The page works offline: its files name no host, but those of texts."""
    folder = Path(trainfit.__file__).parent / "web" / "static"
    found = {host for path in folder.iterdir() for host in re.findall(r"https?://([\w.]+)", path.read_text())}
    assert found == {"www.w3.org"}  # The names of XML, which nothing fetches.


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "example.com"}, 403),
        ({"Host": "127.0.0.1.example.com:80"}, 403),
        ({"Host": "localhost:abc"}, 403),
        ({"Origin": "http://example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_the_door(server: Server, headers: dict[str, str], status: int) -> None:
    reply = server.ask("predict", {"recipe": TINY}, **headers)
    assert reply.status == status
    assert "error" in reply.data


def test_the_page_may_ask_itself_under_each_name(server: Server) -> None:
    for name in ("127.0.0.1", "localhost"):
        host = f"{name}:{server.port}"
        assert (
            server.ask(
                "paste",
                {"text": "model: gpt2"},
                Host=host,
                Origin=f"http://{host}",
                Sec_Fetch_Site="same-origin",
            ).status
            == 200
        )
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((_own_address(), server.port), 1).close()


def _own_address() -> str:
    """Return an address of this machine that is not its loopback's usual one."""
    found = socket.gethostbyname_ex(socket.gethostname())[2]
    return next((one for one in found if not one.startswith("127.0.0.1")), "127.0.0.2")


def test_a_body_that_is_too_large_is_refused(server: Server) -> None:
    body = json.dumps({"text": "x" * 300_000}).encode()
    assert server.request("POST", "/api/oom", body, Content_Type="application/json").status == 413
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    chunks = (b" " * 65536 for _ in range(64))
    try:
        connection.request(
            "POST", "/api/oom", chunks, {"Content-Type": "application/json"}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # The server closed the connection before all was sent.
    finally:
        connection.close()


PATHS: list[tuple[str, Any]] = [
    ("model.config", {"model": {"config": "secret.json"}}),
    ("model.config", {"model": {"config": "./"}}),
    ("model.config", {"model": "secret.json"}),
    ("model.config", {"model": "../server/config.json"}),
    ("model.weights", {"model": {"config": "gpt2", "weights": "."}}),
    ("model.weights", {"model": {"weights": "./"}}),
    ("model.weights", {"model": {"config": "gpt2", "weights": "owner/name"}}),
    ("data.train", {**TINY, "data": "secret.json"}),
    ("data.train", {**TINY, "data": {"train": "/etc/passwd"}}),
    ("data.eval", {**TINY, "data": {"eval": "hub:owner/name"}}),
    ("data.tokenizer", {**TINY, "data": {"tokenizer": "secret.json"}}),
    ("data.chat_template", {**TINY, "data": {"chat_template": "secret.json"}}),
    ("objective.environment", {**TINY, "objective": {"name": "grpo", "environment": "secret.json:Env"}}),
    ("objective.arguments", {**TINY, "objective": {"name": "grpo", "arguments": {"path": "secret.json"}}}),
    ("extends", {"extends": "recipe.yaml", **TINY}),
    ("model.config", {"model": {"config": {"model_type": "llama", "num_hidden_layers": 10_000}}}),
    ("hardware.count", {**TINY, "hardware": {"gpu": "h100-sxm", "count": 8192}}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "recipe"), PATHS)
def test_what_names_a_file_or_code_is_refused(server: Server, field: str, recipe: Any) -> None:
    for name in ("predict", "course", "advice", "plan"):
        reply = server.ask(name, {"recipe": recipe})
        assert reply.status == 422, reply.body[:300]
        assert reply.data["error"]["field"].startswith(field)
        assert SECRET.encode() not in reply.body


def test_a_trace_ends_when_the_browser_leaves(server: Server) -> None:
    body = json.dumps(
        {"recipe": {"model": {"config": "llama-3.1-70b"}, "hardware": {"gpu": "h100-sxm", "count": 8}}}
    )
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/api/plan", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert b"progress" in response.readline()
    assert _within(10, lambda: len(server.tracers()) == 1)
    response.close()
    connection.close()
    assert _within(5, lambda: not server.tracers())
    # The process itself is still there, and answers the next question without importing torch anew.
    began = time.monotonic()
    other = {**TINY, "batch": {"micro": 1, "seq": 48}}
    assert server.ask("predict", {"recipe": other}).answer["estimate"]["fits"]
    assert time.monotonic() - began < 10


def _within(seconds: float, holds: Any) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.05)
    return False


def test_time_and_memory_of_a_trace_are_bounded(tmp_path: Path) -> None:
    large = {"recipe": {"model": {"config": "llama-3.1-70b"}, "hardware": {"gpu": "h100-sxm", "count": 8}}}
    with served(tmp_path, "--limit", "2") as server:
        last = server.ask("plan", large).events[-1]
        assert "not answered within 2 s" in last["error"]["text"]
        assert not server.tracers()
    with served(tmp_path, "--memory-gib", "0.5") as server:
        last = server.ask("plan", large).events[-1]
        assert "512.00 MiB" in last["error"]["text"] or last["error"]["text"].startswith("needs more")


def test_a_port_that_is_taken_is_named(server: Server, tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "trainfit", "serve", "--port", str(server.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ})
    assert ended.returncode == 65
    assert re.search(r"--port.*cannot be listened on", ended.stderr)
