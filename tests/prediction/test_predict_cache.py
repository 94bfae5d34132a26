"""Kept ledgers: what they are found by, and that damage, other writers and a read-only home do no harm."""

import ast
import gzip
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiny_recipe import tiny_recipe
from trainfit.ledger import file as ledger_file
from trainfit.ledger.ledger import Ledger
from trainfit.prediction import cache
from trainfit.prediction.predict import ledger_of, predict
from trainfit.spec.recipe import Adapter, Batch, Hardware, ModelSpec, Optimizer, Parallel
from trial_start import processes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "ledgers"))
    return tmp_path / "ledgers"


def content(ledger: Ledger) -> Any:
    return replace(ledger).__dict__  # Without its expanded events.


OTHER: list[dict[str, Any]] = [
    {"batch": Batch(micro=3, seq=16)}, {"batch": Batch(micro=2, seq=17)}, {"batch": Batch(micro=2, seq=16,
    accumulate=2)},
    {"precision": "bf16"}, {"precision": "amp-bf16"}, {"attention": "math"}, {"recompute": "full"},
    {"compile": "block"},
    {"optimizer": Optimizer(implementation="foreach")}, {"optimizer": Optimizer(name="sgd")},
    {"optimizer": Optimizer(in_backward=True)}, {"adapter": Adapter(kind="lora")},
    {"adapter": Adapter(kind="lora", rank=8)}, {"hardware": Hardware(gpu="a100-sxm4-80gb")},
    {"hardware": Hardware(gpu="cpu")},
    {"hardware": Hardware(count=2), "parallel": Parallel(replicate=2)}, {"loss": "chunked"},
    {"model": ModelSpec(config="gpt2")}, {"model": ModelSpec(config="gpt2", implementation="native")},
]  # fmt: skip


def test_every_field_that_changes_a_step_changes_the_key() -> None:
    base = tiny_recipe()
    keys = [cache.key(base), *(cache.key(base.model_copy(update=fields)) for fields in OTHER)]
    assert len(set(keys)) == len(keys)


def test_names_seeds_and_prices_do_not() -> None:
    base = tiny_recipe()
    same = [
        base.model_copy(update={"seed": 7}),
        base.model_copy(update={"hardware": Hardware(price_per_hour=1.5)}),
        base.model_copy(update={"model": base.model.model_copy(update={"name": "mine"})}),
        tiny_recipe(),
    ]
    assert {cache.key(recipe) for recipe in same} == {cache.key(base)}
    assert len({recipe.id for recipe in same}) == 4


def test_code_and_versions_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    base = cache.key(tiny_recipe())
    with monkeypatch.context() as patch:
        patch.setattr(cache, "code_version", lambda: "other")
        assert cache.key(tiny_recipe()) != base
    for library in cache.LIBRARIES:
        with monkeypatch.context() as patch:
            patch.setattr(
                cache, "installed_version", lambda name, library=library: "0.0" if name == library else "1.0"
            )
            changed = cache.key(tiny_recipe())
            patch.setattr(cache, "installed_version", lambda name: "1.0")
            assert cache.key(tiny_recipe()) != changed
    assert cache.key(tiny_recipe()) == base


def test_a_kept_ledger_is_the_traced_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(layers=5, precision="bf16")
    traced = ledger_of(recipe)
    assert len(list(folder.glob("*.json.gz"))) == 1
    first = predict(recipe)

    def trace_again(*_: Any, **__: Any) -> Ledger:
        raise AssertionError("a kept ledger was traced again")

    monkeypatch.setattr("trainfit.prediction.trace.trace", trace_again)
    kept = ledger_of(recipe)
    assert content(kept) == content(traced)
    assert kept.repeat == 3
    assert predict(recipe.model_copy(update={"seed": 3})).model_copy(update={"recipe_id": recipe.id}) == first
    with pytest.raises(AssertionError, match="traced again"):
        ledger_of(recipe, use_cache=False)


def damages(whole: bytes) -> list[bytes]:
    """Cut, empty, flipped, foreign and hostile files."""
    chance = random.Random(0)
    data = json.loads(gzip.decompress(whole))
    flipped = []
    for _ in range(20):
        at = chance.randrange(len(whole))
        flipped.append(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
    remade = [
        {**data, "format": 1}, {key: value for key, value in data.items() if key != "ops"}, {**data,
        "ops": 3},
        {**data, "extra": 1}, {**data, "names": []}, {**data, "events": [[1]]}, [], "text", 3, None,
    ]  # fmt: skip
    packed = [gzip.compress(json.dumps(other).encode()) for other in remade]
    return [
        b"", whole[:100], whole[:-1], whole[: len(whole) // 2], b"not gzip", gzip.compress(b"{"), *packed,
        *flipped,
    ]  # fmt: skip


def test_damaged_files_are_traced_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe()
    ledger = ledger_of(recipe)
    path = next(folder.glob("*.json.gz"))
    whole = path.read_bytes()
    for damaged in damages(whole):
        path.write_bytes(damaged)
        found = cache.load(recipe)
        # A flipped bit in gzip's header (a time, a name) may change nothing that counts.
        assert found is None or content(found) == content(ledger)
        assert found is not None or not path.exists()
    path.write_bytes(whole[:50])
    assert content(ledger_of(recipe)) == content(ledger)
    assert content(ledger_file.load(path)) == content(ledger)


def test_a_cache_that_cannot_be_used_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe()
    file = tmp_path / "a-file"
    file.write_text("")
    for place in (file, file / "below", Path("/proc/nowhere")):
        monkeypatch.setenv("TRAINFIT_CACHE", str(place))
        assert cache.load(recipe) is None
        assert predict(recipe).peak_allocated_bytes > 0
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "c"))
    blocked = tmp_path / "c" / f"{cache.key(recipe)}.json.gz"
    blocked.mkdir(parents=True)  # a folder where the ledger should be
    assert predict(recipe).peak_allocated_bytes > 0
    assert list((tmp_path / "c").iterdir()) == [blocked]  # and no draft left next to it


def save_and_load(times: int, folder: str) -> int:
    os.environ["TRAINFIT_CACHE"] = folder
    recipe = tiny_recipe()
    whole = 0
    ledger = cache.load(recipe)
    assert ledger is not None
    for _ in range(times):
        cache.save(recipe, ledger)
        found = cache.load(recipe)
        whole += found is not None and content(found) == content(ledger)
    return whole


def test_many_writers_at_once(folder: Path) -> None:
    ledger_of(tiny_recipe())
    with processes().Pool(3) as pool:
        whole = pool.starmap(save_and_load, [(5, str(folder))] * 3)
    assert whole == [5] * 3
    assert [path.suffix for path in folder.iterdir()] == [".gz"]


def test_the_oldest_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_LEDGERS", 3)
    ledger = Ledger()
    for age, seq in enumerate(range(20, 26)):
        recipe = tiny_recipe(batch=Batch(micro=1, seq=seq))
        cache.save(recipe, ledger)
        path = folder / f"{cache.key(recipe)}.json.gz"
        os.utime(path, (age + 1e9, age + 1e9))
    kept = [seq for seq in range(20, 26) if cache.load(tiny_recipe(batch=Batch(micro=1, seq=seq)))]
    assert kept == [23, 24, 25]
    assert len(list(folder.glob("*.json.gz"))) == 3


def imports_of(path: Path) -> set[str]:
    """Return our source files that a source file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    ours = [name.partition(".")[2].replace(".", "/") for name in names if name.startswith("trainfit.")]
    return {f"{name}{end}" for name in ours for end in (".py", "/__init__.py")}


@pytest.mark.parametrize("excluded", [cache.NOT_OF_AN_ESTIMATE, cache.NOT_OF_A_LEDGER])
def test_sources_that_are_part_of_a_key_import_none_that_are_not(excluded: tuple[str, ...]) -> None:
    """A new source is part of every key; those left out exist."""
    every, kept = cache.sources(()), cache.sources(excluded)
    assert all(any(name.startswith(one) for name in every) for one in excluded)
    left_out = every.keys() - kept.keys()
    used = {name: imports_of(path) & left_out for name, path in kept.items() if path.suffix == ".py"}
    assert {name: files for name, files in used.items() if files} == {}


def test_a_kept_ledger_needs_no_torch() -> None:
    recipe = tiny_recipe()
    cache.code_version.cache_clear()  # the source may have been edited since this process read it
    predict(recipe)
    program = (
        "import sys; from tiny_recipe import tiny_recipe; from trainfit.prediction.predict import predict;"
        "found = predict(tiny_recipe()); assert 'torch' not in sys.modules; print(found.peak_allocated_bytes)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[1] / "helpers",
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == predict(recipe).peak_allocated_bytes
