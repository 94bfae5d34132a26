"""A recipe's id: of the fields that differ from their defaults; ids of older records."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from evidence.scripts.accuracy.held_out import is_held_out, previous_ids
from older_records import older_line
from test_records import record
from trainfit import records
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.provenance import DIGEST, digest_of, from_line, to_line
from trainfit.spec.quantize import Quantized
from trainfit.spec.recipe import Adapter, Optimizer, Parallel, Recipe
from trainfit.spec.recompute import LayerRun
from trainfit.spec.result import Measurement
from trainfit.spec.value import Value, short_hash

RESULTS = Path(__file__).parents[2] / "evidence" / "records"
PLAIN: dict[str, Any] = {"model": {"config": {"model_type": "llama", "hidden_size": 64}}}
LORA = {"adapter": {"kind": "lora"}}
DEFAULTS = {
    "batch": {"micro": 1, "seq": 1024, "accumulate": 1},
    "precision": "bf16", "attention": "sdpa", "block_kernels": "standard", "loss": "standard",
    "loss_terms": {"label_smoothing": 0.0, "z_loss": 0.0}, "recompute": "none", "compile": False,
    "optimizer": {
        "name": "adamw", "implementation": "fused", "lr": 1e-4, "weight_decay": 0.01, "momentum": 0.0,
        "in_backward": False, "stochastic_rounding": False, "clip_norm": None,
    },
    "adapter": None, "quantize": None,
    "offload": {"activations": False, "weights": False, "optimizer": False},
    "loader": {"workers": 0, "prefetch": 2, "pin_memory": True}, "empty_cache_every": None,
    "parallel": {
        "replicate": 1, "shard": 1, "tensor": 1, "context": 1, "expert": 1, "pipeline": 1,
        "strategy": "auto", "reshard_after_forward": True, "bucket_mb": 25.0, "sync_each_batch": None,
        "prefetch": None, "copy_engines": False, "schedule": "1f1b", "virtual_stages": None,
    },
    "hardware": {"gpu": "h200", "count": 1, "nodes": None, "price_per_hour": None}, "seed": 0,
}  # fmt: skip
"""Defaults of the fields of 2026-11-26. Ids leave them out: add new fields, and change none of these."""
OTHERS: dict[str, list[Any]] = {
    "model.config": [{"model_type": "llama", "hidden_size": 128}, {"model_type": "gpt2"}, "gpt2"],
    "model.implementation": ["native"], "model.name": ["a", "b"], "model.weights": ["owner/name", "/folder"],
    "batch.micro": [2, 3], "batch.seq": [2, 3], "batch.accumulate": [2, 3],
    "precision": ["fp32", "fp8", "bf16-master", "fp16-master"],
    "attention": ["flash", "best"], "block_kernels": ["triton", "swiglu", "swiglu-rope"],
    "accumulation": ["fused"], "fp8_weights": ["scales", "codes", "both-layouts"],
    "fp8_scaling": ["delayed"],
    "loss": ["chunked", "fused"], "loss_terms.label_smoothing": [0.1], "loss_terms.z_loss": [0.1],
    "recompute": [
        "full", "fit", "selective", {"every": 1}, {"every": 2}, {"budget": 1.0}, {"budget_gib": 1.0},
        {"selective": {"save": ["mm"]}},
        {"selective": {"save": ["mm"], "every": 2}}, {"layers": ["none"]}, {"layers": ["none", "full"]},
        {"layers": ["full", "none"]}, {"layers": [{"count": 2}]}, {"layers": [{"offload": 0.5}]},
        {"layers": [{"offload": 0.5, "every": 2, "count": 4}]}, {"layers": [{"offload": 0.5, "count": 4}]},
    ],
    "objective": ["grpo", "ppo", {"name": "grpo", "kl": 0.0}, {"name": "grpo", "rollout": {"batch": 2}}],
    "compile": ["block", "model"],
    "optimizer.name": ["sgd", "adafactor", "muon", "bnb-adamw8bit", "torchao-adamw4bit"],
    "optimizer.implementation": ["foreach", "forloop", "triton"],
    "optimizer.lr": [1e-3], "optimizer.weight_decay": [0.0], "optimizer.momentum": [0.5],
    "optimizer.in_backward": [True, "block"], "optimizer.stochastic_rounding": [True],
    "optimizer.scale_parameter": [False],
    "optimizer.clip_norm": [1.0], "optimizer.no_decay": [("norms",), ("norms", "biases")],
    "data.pack": ["documents", False], "data.format": ["chat"], "data.answers_only": [False],
    "data.eval_share": [0.1], "data.max_documents": [9], "data.split": ["test"],
    **{
        f"data.{name}": ["a"]
        for name in (
            "train", "eval", "column", "tokenizer", "chat_template", "separator", "eval_split", "subset",
        )
    },
    "adapter": [{"kind": kind} for kind in ("lora", "prompt", "prefix", "p-tuning")],
    "adapter.rank": [8], "adapter.alpha": [8, 16], "adapter.targets": ["q_proj", ["q_proj"]],
    "adapter.dtype": ["base"], "adapter.dropout": [0.1], "adapter.tokens": [8], "adapter.kind": [],
    "adapter.reparametrization": ["mlp"], "adapter.encoder_hidden_size": [64],
    "adapter.dora": [True], "adapter.rslora": [True], "adapter.modules_to_save": [["lm_head"], ["norm"]],
    "quantize": [
        "nf4", "int8", {"kind": "nf4", "double": False}, {"kind": "nf4", "block": 128},
        {"kind": "nf4", "compute": "fp32"}, {"kind": "int8", "compute": "fp32"}, "bnb-nf4", "bnb-nf4-dq",
        "torchao-nf4", {"kind": "nf4", "skip_modules": ["q_proj"]},
    ],
    "offload.activations": [True], "offload.weights": [True], "offload.optimizer": [True],
    "loader.workers": [1], "loader.prefetch": [3], "loader.pin_memory": [False], "empty_cache_every": [1, 2],
    **{f"parallel.{name}": [2] for name in ("replicate", "shard", "tensor", "context", "expert", "pipeline")},
    "parallel.strategy": ["fsdp", "ddp"], "parallel.reshard_after_forward": [False],
    "parallel.bucket_mb": [None, 50.0], "parallel.sync_each_batch": [False, True],
    "parallel.prefetch": [1, 2], "parallel.copy_engines": [True], "parallel.schedule": ["gpipe"],
    "parallel.virtual_stages": [1, 2],
    "hardware.gpu": ["h100-sxm"], "hardware.count": [2], "hardware.nodes": [1, 2],
    "hardware.price_per_hour": [0.0, 2.0], "seed": [1, 2],
}  # fmt: skip
"""Field -> other values than its default."""


class WiderOptimizer(Optimizer):
    beta3: float | None = None


class WiderRecipe(Recipe):
    """A later version: a new field, a new value of several fields, and a new field in an old value."""

    packing: bool = False
    ranks: Parallel = Parallel()
    optimizer: WiderOptimizer = WiderOptimizer()


def unchecked(fields: dict[str, Any]) -> Recipe:
    """Return a recipe with these dotted fields, whether or not a step could be made of it."""
    whole = parse(Recipe, PLAIN)
    for field, value in fields.items():
        whole = changed(whole, field.split("."), value)
    return whole


def changed(value: Any, path: list[str], new: Any) -> Any:
    name, *rest = path
    inner = changed(getattr(value, name), rest, new) if rest else new
    return value.model_copy(update={name: inner})


def parsed(field: str, value: Any) -> Any:
    """Return plain data as the value that the recipe's field holds."""
    if field in ("recompute", "quantize", "adapter", "objective"):
        extra = LORA if field == "quantize" else {}
        return getattr(parse(Recipe, {**PLAIN, **extra, field: value}), field)
    return tuple(value) if isinstance(value, list) else value


def leaves(kind: type[Value], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in kind.model_fields.items():
        inner: Any = Adapter if (prefix, name) == ("", "adapter") else field.annotation
        nested = isinstance(inner, type) and issubclass(inner, Value)
        found |= leaves(inner, f"{prefix}{name}.") if nested else {f"{prefix}{name}"}
    return found


def test_new_fields_with_defaults_change_no_id() -> None:
    given = [
        PLAIN,
        PLAIN | LORA,
        PLAIN | {"seed": 3},
        PLAIN | {"optimizer": {"name": "adafactor", "lr": 1e-5}},
    ]
    for data in given:
        now, wider = parse(Recipe, data), parse(WiderRecipe, data)
        assert wider.id == now.id
        assert now.content() != wider.content()
        assert wider.model_copy(update={"packing": True}).id != now.id
        assert changed(wider, ["optimizer", "beta3"], 0.0).id != now.id
        assert changed(wider, ["ranks", "shard"], 2).id != now.id


def test_recipes_that_differ_in_a_field_differ_in_id() -> None:
    assert leaves(Recipe) <= OTHERS.keys(), "give other values of each new field"
    ids = {parse(Recipe, PLAIN).id: "plain"}
    for field, values in OTHERS.items():
        lora = {"adapter": parsed("adapter", LORA["adapter"])} if field.startswith("adapter.") else {}
        for value in values:
            recipe = unchecked({**lora, field: parsed(field, value)})
            assert recipe.id not in ids, (field, value, ids[recipe.id])
            ids[recipe.id] = f"{field} = {value}"
    both = unchecked({"parallel.shard": 2, "batch.micro": 2})
    assert both.id not in ids


def test_a_default_that_follows_from_another_field_does_not_hide_a_difference() -> None:
    given = [{"name": "adafactor"}, {"name": "adafactor", "implementation": "fused"}, {"name": "muon"},
             {"name": "muon", "momentum": 0.0}, {"name": "adamw"}]  # fmt: skip
    assert len({parse(Recipe, PLAIN | {"optimizer": one}).id for one in given}) == len(given)
    written = {"name": "adafactor", "implementation": "forloop"}
    assert (
        parse(Recipe, PLAIN | {"optimizer": written}).id == parse(Recipe, PLAIN | {"optimizer": given[0]}).id
    )


def test_an_id_does_not_depend_on_order_or_on_defaults_that_are_written() -> None:
    def reversed_keys(data: Any) -> Any:
        if isinstance(data, dict):
            return {name: reversed_keys(value) for name, value in reversed(data.items())}
        return data

    for fields in ({}, LORA | {"quantize": "nf4"}, {"recompute": {"layers": ["full", "none"]}}, {"seed": 2}):
        recipe = recipe_from(PLAIN | fields)
        whole = recipe.content()
        assert recipe.id == recipe_from(whole).id == recipe_from(reversed_keys(whole)).id
        assert parse(Recipe, json.loads(json.dumps(reversed_keys(PLAIN | fields)))).id == recipe.id
    assert parse(Recipe, {"model": {"config": "gpt2"}}).id == short_hash({"model": {"config": "gpt2"}})


def test_defaults_are_what_they_were() -> None:
    def check(known: dict[str, Any], now: dict[str, Any]) -> None:
        for name, value in known.items():
            if isinstance(value, dict):
                check(value, now[name])
            else:
                assert (type(now[name]), now[name]) == (type(value), value), name

    check(DEFAULTS, parse(Recipe, PLAIN).content())
    lora = {"rank": 16, "alpha": None, "targets": "all-linear", "dtype": "fp32", "dropout": 0.0, "tokens": 20}
    lora |= {"dora": False, "rslora": False, "modules_to_save": []}
    check(lora, Adapter(kind="lora").model_dump(mode="json"))
    check({"recompute": "none", "offload": 0.0, "every": 1, "count": 1}, LayerRun().model_dump(mode="json"))
    nf4 = {"double": True, "block": 64, "compute": None, "library": "trainfit", "skip_modules": []}
    check(nf4, Quantized(kind="nf4").model_dump(mode="json"))


def test_an_older_record_is_read_under_todays_id(tmp_path: Path) -> None:
    written = record(3)
    line = older_line(written)
    before = json.loads(line)["recipe_id"]
    found = from_line(line, "here")
    assert (found.recipe_id, found.previous_id) == (written.recipe_id, before) != (before, before)
    assert from_line(to_line(found), "here") == found, "once"
    assert found.recipe == json.loads(line)["recipe"], "as it was written"
    assert from_line(to_line(written), "here") == written
    assert written.previous_id is None


def test_a_record_whose_recipe_cannot_be_read_keeps_its_id() -> None:
    data = json.loads(older_line(record(3)))
    data["recipe"]["optimizer"]["name"] = "of-a-package-that-is-not-here"
    data["recipe_id"] = short_hash(data["recipe"])
    data[DIGEST] = digest_of(data)
    found = from_line(json.dumps(data), "here")
    assert (found.recipe_id, found.previous_id) == (data["recipe_id"], None)


def test_an_older_record_file_is_read_searched_and_exported(tmp_path: Path) -> None:
    path, lines, again = tmp_path / "r.sqlite", tmp_path / "r.jsonl", tmp_path / "again.sqlite"
    old, new = record(1), record(2)
    records.append_all(path, [old, new])
    line = older_line(old)
    before = json.loads(line)["recipe_id"]
    with sqlite3.connect(path) as database:
        database.execute("UPDATE records SET payload = ?, recipe_id = ? WHERE number = 1", (line, before))
    records.append(path, record(3))
    assert [one.recipe_id for one in records.read(path)] == [
        old.recipe_id,
        new.recipe_id,
        record(3).recipe_id,
    ]
    assert records.export(path, lines) == 3
    assert records.import_jsonl(again, lines) == 3
    with sqlite3.connect(again) as database:
        ids = [found for (found,) in database.execute("SELECT recipe_id FROM records ORDER BY number")]
    assert ids == [one.recipe_id for one in records.read(path)]
    lines.write_text(f"{line}\n")
    assert records.import_jsonl(path, lines) == records.import_jsonl(again, lines) == 0
    with sqlite3.connect(path) as database:
        database.execute("UPDATE records SET recipe_id = 'another' WHERE number = 1")
    with pytest.raises(InputError, match="the columns do not agree"):
        records.read(path)


def test_stored_records_keep_their_previous_ids_and_the_table_has_them() -> None:
    table, count = previous_ids(), 0
    assert len(set(table.values())) == len(table)
    for file in RESULTS.rglob("*.jsonl"):
        for line in file.read_text("utf-8").splitlines():
            data = json.loads(line)
            if before := data.get("previous_id"):
                assert before == short_hash(data["recipe"])
                assert table[before] == data["recipe_id"] == from_line(line, str(file)).recipe_id
                count += 1
    assert count > 3000


def test_the_held_out_half_is_what_it_was() -> None:
    table = previous_ids()
    # First bytes of sha256("held-out 1b35129e6cd28e75"): 25; of d07def421706fe4c: c7. Odd ones are held out.
    assert is_held_out(table["1b35129e6cd28e75"]) is is_held_out(table["d07def421706fe4c"]) is True
    assert sum(map(is_held_out, table.values())) == 767, "of 1517, as before ids were made anew"


def test_an_older_measurement_within_a_record_is_of_the_same_recipe() -> None:
    from trainfit.measurement.environment import host_environment

    one = record(4, "measure")
    measured = Measurement(recipe_id=one.recipe_id, status="done", environment=host_environment("cpu"))
    found = from_line(older_line(one.model_copy(update={"measurement": measured})), "here")
    assert found.measurement == measured
