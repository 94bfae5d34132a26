"""The techniques' pages: what makes a pair, that no refusal is made up, and that the committed pages can be made again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_report import measured, predicted

from benchmarks import technique_suite
from benchmarks.technique_pages import INDEX, NOT_MEASURED, main, pages
from benchmarks.technique_pairs import Book, best_of, groups, read_results
from benchmarks.technique_prose import markdown, prose
from benchmarks.technique_refusals import SETTINGS, all_refusals, clash, refused
from benchmarks.technique_suite import (
    COMBINED,
    REFERENCE,
    alone,
    asks,
    control,
    in_a_recipe,
    suite,
    told,
    written,
)
from trainfit.spec.errors import InputError
from trainfit.spec.provenance import new_record
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import merge, read_recipes, recipe_from
from trainfit.spec.result import Record
from trainfit.techniques import registry

ROOT = Path(__file__).parents[2]
SECTIONS = (
    "## What it does", "## When it helps", "## Memory and speed", "### Alone", "### With its best partners",
    "## What it costs in quality", "## What it refuses",
)  # fmt: skip

pytest.importorskip("peft")
pytest.importorskip("torchao")


@pytest.fixture(autouse=True)
def _no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_COMMIT", "abc")  # no git process for each record


def reference(**fields: Any) -> Recipe:
    return recipe_from(merge(REFERENCE, fields))


def trained(one: Recipe, perplexity: float, steps: int = 50, status: str = "done") -> Record:
    told_of_it = {
        "status": status, "peak_memory_is": "cuda-allocated", "peak_memory_bytes": 2**30, "step_s": 0.5,
        "eval_perplexity": perplexity, "steps": steps,
        "run": {"device": "NVIDIA H200", "train_tokens": 1000, "eval_tokens": 100},
    }  # fmt: skip
    return new_record("train", one, train=told_of_it)


@pytest.fixture(scope="module")
def committed() -> dict[str, str]:
    return pages(Book(read_results(ROOT / "results")))


def test_the_pages_in_the_docs_are_made_from_the_records_in_results(committed: dict[str, str]) -> None:
    folder = ROOT / "docs/results/techniques"
    there = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("*.md")}
    assert sorted(there) == sorted(committed)
    changed = [name for name in there if there[name] != committed[name]]
    assert changed == [], "run the command that the page's top names"


@pytest.mark.parametrize("technique", sorted(registry.techniques()))
def test_every_technique_has_a_page_with_all_its_sections(technique: str, committed: dict[str, str]) -> None:
    text = committed[f"{technique}.md"]
    places = [text.index(f"\n{title}\n") for title in SECTIONS]
    assert places == sorted(places)
    for title, begin, end in zip(SECTIONS, places, [*places[1:], len(text)], strict=True):
        assert text[begin:end].strip().removeprefix(title).strip(), title
    assert f"[{technique}]({technique}.md)" in committed[INDEX]


def test_every_technique_can_be_asked_for_and_is_combined() -> None:
    for recipe in suite():
        registry.check(recipe)
    combined = [recipe_from(merge(REFERENCE, partners)) for partners in COMBINED]
    for technique in registry.techniques():
        assert all(asks(technique, recipe) for recipe in alone(technique))
        assert all(control(technique, recipe) is not None for recipe in alone(technique))
        assert any(asks(technique, recipe) for recipe in combined), technique


def test_the_suite_is_written_and_read_again(tmp_path: Path) -> None:
    assert technique_suite.main([str(tmp_path / "suite.jsonl")]) == 0
    assert [recipe.id for recipe in read_recipes(tmp_path / "suite.jsonl")] == [one.id for one in suite()]


def test_a_pair_differs_in_the_techniques_fields_alone() -> None:
    plain, full = reference(), reference(recompute="full")
    both = reference(recompute="full", loss="chunked")
    book = Book([measured(plain, 40.0), measured(full, 20.0), measured(both, 10.0)])
    (pair,) = book.measured_pairs("recompute_full")
    assert (pair.with_it.recipe.id, pair.without.recipe.id) == (full.id, plain.id)
    # Chunked is there beside full recomputation only.
    (pair,) = book.measured_pairs("chunked_loss")
    assert (pair.with_it.recipe.id, pair.without.recipe.id) == (both.id, full.id)
    assert book.measured_pairs("compile_block") == []


def test_a_pair_may_differ_in_what_changes_neither_memory_nor_speed() -> None:
    full = reference(
        recompute="full", seed=3, optimizer={"lr": 0.5}, hardware={"gpu": "h200", "price_per_hour": 9}
    )
    assert (
        len(Book([measured(reference(), 40.0), measured(full, 20.0)]).measured_pairs("recompute_full")) == 1
    )
    decayed = reference(recompute="full", optimizer={"weight_decay": 0.5})
    assert Book([measured(reference(), 40.0), measured(decayed, 20.0)]).measured_pairs("recompute_full") == []


def test_a_measurement_on_another_gpu_is_no_part_of_a_pair() -> None:
    full = reference(recompute="full")
    book = Book([measured(reference(), 40.0), measured(full, 20.0, "NVIDIA A100-SXM4-80GB")])
    assert book.measured_pairs("recompute_full") == []


def test_the_newest_counts_and_out_of_memory_is_a_result() -> None:
    older = measured(reference(), 50.0).model_copy(update={"created_at": "2020-01-01T00:00:00+00:00"})
    out = measured(reference(recompute="full"), 1.0, status="out-of-memory")
    for records in ([older, measured(reference(), 40.0), out], [measured(reference(), 40.0), older, out]):
        (pair,) = Book(records).measured_pairs("recompute_full")
        assert pair.without.peak_bytes == 40 * 2**30
        assert pair.with_it.peak_bytes is None
    crashed = measured(reference(recompute="full"), 1.0, status="crashed")
    assert Book([measured(reference(), 40.0), crashed]).measured_pairs("recompute_full") == []


def test_accumulation_is_held_against_one_micro_batch_of_all_tokens() -> None:
    (recipe,) = alone("accumulation")
    assert (recipe.batch.micro, recipe.batch.accumulate) == (1, 4)
    assert control("accumulation", recipe) == reference()


def test_what_the_rest_needs_has_no_control() -> None:
    assert control("lora", reference(adapter={"kind": "lora"}, quantize="nf4")) is None
    assert control("adamw", reference()) is None


def test_perplexities_are_of_equally_many_steps() -> None:
    full = reference(recompute="full")
    (pair,) = Book([trained(reference(), 20.0), trained(full, 21.0)]).trained_pairs("recompute_full")
    assert (pair.without.perplexity, pair.with_it.perplexity) == (20.0, 21.0)
    assert Book([trained(reference(), 20.0), trained(full, 21.0, 60)]).trained_pairs("recompute_full") == []
    faster = reference(recompute="full", optimizer={"lr": 0.5})
    assert Book([trained(reference(), 20.0), trained(faster, 21.0)]).trained_pairs("recompute_full") == []
    muon = reference(optimizer={"name": "muon", "lr": 0.5})
    assert len(Book([trained(reference(), 20.0), trained(muon, 21.0)]).trained_pairs("muon")) == 1
    assert Book([trained(full, 21.0, status="diverged")]).all("train") == []


def test_the_best_are_the_smallest_and_the_fastest_of_one_model_and_batch() -> None:
    fast = reference(compile="block", recompute="full")
    small = reference(recompute="full", loss="chunked")
    other = reference(recompute="full", batch={"micro": 8})
    book = Book([
        measured(reference(), 5.0, step_s=0.1), measured(fast, 30.0, step_s=0.2),
        measured(small, 10.0, step_s=0.4), measured(other, 1.0, step_s=0.05),
    ])  # fmt: skip
    found = groups(book.all("measure"))
    assert sorted(len(results) for results in found.values()) == [1, 3]
    best = best_of("recompute_full", max(found.values(), key=len))
    assert best is not None
    assert (best.smallest.recipe.id, best.fastest.recipe.id, best.num_recipes) == (small.id, fast.id, 2)
    assert best_of("muon", book.all("measure")) is None


def test_measured_pairs_fill_the_page_without_a_change_of_code() -> None:
    records = [predicted(recipe, 30.0) for recipe in suite()]
    empty = pages(Book(records))["recompute_full.md"]
    assert NOT_MEASURED in empty
    for number, recipe in enumerate(suite()):  # The later, the smaller and the slower.
        records.append(measured(recipe, 30.0 - number / 4, step_s=1.0 + number / 10))
    records += [trained(reference(), 20.0), trained(reference(recompute="full"), 22.0)]
    made = pages(Book(records))
    assert all(NOT_MEASURED not in text.split("## What it costs in quality")[0] for text in made.values())
    text = made["recompute_full.md"]
    assert "20.000 → 22.000 (+10.0%)" in text
    assert "least memory, measured" in text
    # The same records in another order give the same bytes.
    assert pages(Book(records[::-1])) == made


def test_a_recipe_without_a_prediction_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some.jsonl").write_text(predicted(reference(), 30.0).model_dump_json() + "\n")
    assert main([str(tmp_path), "--into", str(tmp_path / "docs")]) == 65
    assert "benchmarks.accuracy.suite" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


def test_files_of_other_things_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "explained.jsonl").write_text(json.dumps({"kind": "explanation"}) + "\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "ladder").mkdir()
    (tmp_path / "ladder" / "records.jsonl").write_text(predicted(reference(), 30.0).model_dump_json() + "\n")
    assert len(read_results(tmp_path)) == 1


@pytest.mark.parametrize(
    ("technique", "beside", "words"),
    [
        ("gradient_clipping", ("offload_weights", "optimizer_in_backward"), "frees each gradient"),
        ("optimizer_in_backward", ("gradient_clipping",), "frees each gradient"),
        ("offload_activations", ("compile_model",), "shows no blocks"),
        ("adamw", (), "always keeps a first moment"),
        ("loader", (), "no worker"),
        ("fp8", (), "no fp8 tensor cores"),
        ("fp8", ("lora", "prefix_tuning", "quantize", "soft_prompts"), "frozen beside an adapter"),
        ("quantize", (), "nothing would train"),
    ],
)
def test_a_refusal_is_told_by_those_who_cause_it(technique: str, beside: tuple[str, ...], words: str) -> None:
    assert [one.beside for one in refused(technique) if words in one.line] == [beside]


def test_nobody_is_blamed_for_what_others_are_refused_without_him() -> None:
    assert refused("empty_cache") == []
    assert {len(refusal.causes) for refusal in all_refusals()} == {1, 2}
    # Momentum is refused beside AdamW, the reference's optimizer, whatever else is asked for.
    assert {"optimizer": {"momentum": 0.9}} in SETTINGS
    assert not any("first moment" in one.line for one in refused("chunked_loss"))


def test_two_values_of_one_field_are_a_choice_and_no_combination() -> None:
    assert clash({"recompute": "full"}, {"recompute": {"every": 2}})
    assert clash({"optimizer": {"name": "sgd"}}, {"optimizer": {"name": "muon", "momentum": 0.9}})
    assert not clash({"optimizer": {"name": "sgd"}}, {"optimizer": {"in_backward": True}})


def test_fields_are_told_as_they_are_written() -> None:
    recipe = reference(optimizer={"name": "adafactor", "implementation": "fused"}, recompute={"every": 2})
    assert written(told(recipe)) == (
        "recompute: {every: 2}, optimizer.name: adafactor, optimizer.implementation: fused"
    )
    assert written(told(reference(optimizer={"name": "muon"}))) == "optimizer.name: muon"
    assert told(reference()) == {}
    assert "`adapter.kind: p-tuning`" in in_a_recipe("soft_prompts")


def test_a_docstring_is_taken_apart() -> None:
    text = "It is.\n\nMore of it,\nin ``code``.\n\nHelps here.\n\nCosts little.\n\nRefuses that."
    declared = registry.techniques()["lora"]
    found = prose(replace(declared, doc=text))
    assert (found.summary, found.does, found.helps) == ("It is.", "More of it, in `code`.", "Helps here.")
    with pytest.raises(ValueError, match="0 paragraphs.*'Costs'"):
        prose(replace(declared, doc=text.replace("Costs", "Takes")))
    assert markdown("a list:\n- one\n  more\n- two") == "a list:\n- one more\n- two"
    assert "(https://arxiv.org/abs/1804.04235)" in markdown("(arXiv:1804.04235)")


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    whole = predicted(reference(), 30.0).model_dump_json()
    (tmp_path / "some.jsonl").write_text(f"{whole}\n{whole[:50]}\n")
    with pytest.raises(InputError, match="some.jsonl:2"):
        read_results(tmp_path)
