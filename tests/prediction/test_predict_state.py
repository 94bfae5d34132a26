"""A prediction leaves the process as it found it, and threads may predict at once."""

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainfit
from process_globals import changes, snapshot
from tiny_recipe import tiny_recipe, wide_recipe
from trainfit.prediction.predict import predict
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Hardware, ModelSpec, Offload, Optimizer, Recipe
from trainfit.virtual.trace.exclusive import exclusive, is_tracing_thread
from user_training import mlp, steps
from virtual_runs import plain

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64,
}  # fmt: skip
"""With dropout."""
OPT: dict[str, Any] = {
    "model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64, "word_embed_proj_dim": 32, "layerdrop": 0.5,
}  # fmt: skip
"""Draws a random number on the host for each layer of each step."""


def recipe_of(config: dict[str, Any], **fields: Any) -> Recipe:
    model = ModelSpec(config=config, implementation="hf")
    return Recipe(model=model, **{"batch": Batch(micro=2, seq=16), "precision": "fp32", **fields})


EAGER = {
    "hf": tiny_recipe(precision="bf16"),
    "native": tiny_recipe("native", precision="bf16"),
    "amp": tiny_recipe(precision="amp-fp16"),
    "dropout": recipe_of(GPT2, recompute="selective"),
    "checkpointing": recipe_of(GPT2, recompute="full"),
    "layerdrop": recipe_of(OPT),
    "lora": tiny_recipe(adapter=Adapter(kind="lora", rank=2)),
    "qlora": tiny_recipe(adapter=Adapter(kind="lora", rank=2), quantize="nf4", precision="bf16"),
    "prefix": tiny_recipe(adapter=Adapter(kind="prefix", tokens=4)),
    "offload": wide_recipe(3, recompute="full", offload=Offload(activations=True)),
    "kernels": tiny_recipe("native", precision="bf16", attention="triton", loss="fused"),
    "cpu": tiny_recipe(hardware=Hardware(gpu="cpu")),
}
COMPILED = {
    "block": plain(1, compile="block", precision="amp-bf16"),
    "budget": plain(1, compile="model", precision="fp32", recompute={"budget": 0.5}),
}


@contextmanager
def unchanged() -> Iterator[None]:
    """Settings that differ from every default must be the same afterwards."""
    _import_what_traces_import()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1234)
    try:
        held = snapshot()
        yield
        assert sorted(changes(held, snapshot())) == []
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False


@cache
def _import_what_traces_import() -> None:
    """Import and register what happens once in a process, as docs/reference/api.md lists it."""
    import accelerate  # noqa: F401
    import peft  # noqa: F401

    for recipe in (EAGER["hf"], EAGER["kernels"]):
        predict(recipe)


@pytest.mark.parametrize("name", [one for one in EAGER if one not in ("hf", "native", "lora")])
def test_nothing_changes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    how = {"deterministic": name == "kernels"}
    with unchanged():
        assert predict(EAGER[name], **how) == predict(EAGER[name], **how)  # Traced, then from the cache.


def test_nothing_changes_when_it_compiles() -> None:
    predict(COMPILED["block"], use_cache=False)  # Dynamo and Inductor are imported, and patch nn.Module once.
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1500)
    try:
        held = snapshot()
        for recipe in COMPILED.values():
            predict(recipe, use_cache=False)
        assert sorted(changes(held, snapshot())) == []
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"optimizer": Optimizer(in_backward="block")},
        {"adapter": Adapter(kind="lora", rank=2)},
        {"hardware": Hardware(gpu="h200", count=2)},
    ],
)
def test_no_tensor_of_a_trace_stays(fields: dict[str, Any]) -> None:
    """The garbage collector does not see a parameter's hooks: a cycle through one would keep the model."""

    def num_held() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor | torch.nn.Module) for each in gc.get_objects())

    recipe = tiny_recipe(**fields)
    predict(recipe, use_cache=False)
    before = num_held()
    predict(recipe, use_cache=False)
    # Of several GPUs torch 2.11 keeps up to 128 meshes, each with its ranks as a tensor, in cached rules.
    num_meshes = int(recipe.hardware.count > 1 and torch.__version__ < "2.12")
    assert num_held() <= before + num_meshes


def test_nothing_changes_when_it_is_refused() -> None:
    with unchanged(), pytest.raises(InputError):
        predict(tiny_recipe(batch=Batch(micro=1, seq=16), attention="flash"), use_cache=False)
    with unchanged(), pytest.raises(InputError, match="positions"):
        predict(recipe_of(OPT, batch=Batch(micro=1, seq=80)), use_cache=False)


@pytest.mark.parametrize("at", ["build", "forward", "backward", "optimizer"])
def test_nothing_changes_when_it_fails_halfway(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that nobody foresaw, inside transformers' own constructor, and in each phase of a step."""
    with unchanged(), monkeypatch.context() as patched:
        if at == "build":
            from transformers.models.llama.modeling_llama import LlamaModel

            patched.setattr(LlamaModel, "__init__", _fail)
        else:
            from trainfit.virtual.gpu import VirtualGpu

            begin = VirtualGpu.begin
            patched.setattr(
                VirtualGpu,
                "begin",
                lambda self, step, phase: _fail() if phase == at else begin(self, step, phase),
            )
        # transformers fails alone as well where it builds a model.
        with pytest.raises(InputError if at == "build" else MemoryError, match="halfway"):
            predict(EAGER["hf"], use_cache=False)


def _fail(*_: Any, **__: Any) -> Any:
    raise MemoryError("halfway")


@contextmanager
def locked_by_another_thread() -> Iterator[None]:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive():
            entered.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(60)
    try:
        yield
    finally:
        leave.set()
        holder.join()


def test_cached_ledgers_need_no_lock() -> None:
    """A prediction from the cache does not wait for another thread's trace."""
    predict(EAGER["hf"])
    with locked_by_another_thread(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(predict, EAGER["hf"]).result(timeout=60).fits


def train_on_a_virtual_gpu() -> None:
    torch.manual_seed(3)
    model = mlp().cuda()
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)


def test_threads_predict_and_trace_what_one_does() -> None:
    recipes = [EAGER[name] for name in ("native", "amp", "lora")]
    alone, traced = [predict(recipe) for recipe in recipes], trainfit.trace(train_on_a_virtual_gpu)
    with ThreadPoolExecutor(4) as pool:
        traces = [pool.submit(trainfit.trace, train_on_a_virtual_gpu) for _ in range(2)]
        found = list(pool.map(lambda recipe: predict(recipe, use_cache=False), recipes))
    assert found == alone
    assert [each.result() for each in traces] == [traced] * 2
    assert torch.get_default_dtype() == torch.float32


def train_small(num_steps: int, keep_on: Any = lambda: False) -> list[float]:
    """Losses of a small model with what a virtual GPU replaces.

    Attention, dropout, softmax, norms, autocast, checkpointing.
    """
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(7)
    torch.use_deterministic_algorithms(False)
    kind: dict[str, Any] = {"dtype": torch.float32}
    inner = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.25, batch_first=True, **kind)
    norm, head = torch.nn.RMSNorm(16, **kind), torch.nn.Linear(16, 8, **kind)
    optimizer = torch.optim.AdamW([*inner.parameters(), *norm.parameters(), *head.parameters()], lr=1e-2)
    losses: list[float] = []
    while len(losses) < num_steps or keep_on():
        x = torch.randn(4, 6, 16, **kind)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=len(losses) % 2 == 0):
            hidden: Any = checkpoint(inner, x, use_reentrant=False)
            logits = head(norm(hidden)).log_softmax(-1)
            loss = torch.nn.functional.cross_entropy(
                torch.cat([logits, logits]).flatten(0, 1), torch.randint(8, (48,))
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_training_thread_is_not_disturbed() -> None:
    """A thread that trains while another one predicts and traces has the losses, to the bit, that it has
    alone.
    """
    recipes = [EAGER[name] for name in ("amp", "dropout", "layerdrop")]
    with ThreadPoolExecutor(1) as pool:
        running = threading.Event()
        running.set()
        training = pool.submit(train_small, 20, running.is_set)
        try:
            for recipe in recipes:
                predict(recipe, use_cache=False)
            trainfit.trace(train_on_a_virtual_gpu)
        finally:
            running.clear()
        losses = training.result()
    assert len(losses) >= 20
    assert losses == train_small(len(losses))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_has_a_free_lock() -> None:
    """The thread that held the lock does not exist in the child."""
    with locked_by_another_thread():
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # ends the child if it waits
            with exclusive():
                os._exit(0 if is_tracing_thread() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not is_tracing_thread()


def test_a_thread_that_traces_keeps_the_lock_in_its_nested_traces() -> None:
    with exclusive():
        assert predict(EAGER["hf"], use_cache=False).fits
        assert is_tracing_thread()
    assert not is_tracing_thread()
