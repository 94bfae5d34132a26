"""Every figure in a sentence of evidence/pages/techniques.md is that of the records."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evidence.scripts import technique_suite
from evidence.scripts.tables import batch_size, joined, techniques
from evidence.scripts.technique_suite import COMBINED, REFERENCE, alone, control, suite
from page_claims import ROOT, check, figures
from trainfit.spec.parsing.recipe_file import merge, recipe_from, recipe_lines
from trainfit.spec.units import GIB
from trainfit.techniques import registry

pytest.importorskip("peft")
pytest.importorskip("torchao")

PAGE = "evidence/pages/techniques.md"
REFERENCE_PAGE = ROOT / "docs/reference/techniques.md"
ALLOCATED, DEVICE, STEP = "peak_allocated_bytes", "peak_device_bytes", "step_s"
Figures = tuple[float, ...]


def effect(name: str, variant: int = 0) -> techniques.Effect:
    return [one for one in techniques.effects() if one.technique == name][variant]


def reference_perplexity() -> float:
    return techniques.perplexities()[techniques._key(recipe_from(REFERENCE))]


def combination(**fields: object) -> list[float]:
    (found,) = [data for data in COMBINED if all(data.get(key) == value for key, value in fields.items())]
    held: Any = techniques._measurements()[recipe_from(merge(REFERENCE, found)).id]
    return [held.peak_allocated_bytes / GIB, held.peak_device_bytes / GIB, held.step_s * 1e3]


def smallest() -> Figures:
    held = combination(offload={"activations": True, "weights": True})
    assert held[0] == min(combination(**data)[0] for data in COMBINED)
    return ((held[2] / (techniques.reference().step_s or 0.0) / 1e3 - 1) * 100,)


def fastest() -> Figures:
    others = [data for data in COMBINED if "adapter" not in data and data.get("precision") != "fp8"]
    held = min((combination(**data) for data in others), key=lambda one: one[2])
    return ((1 - held[0] * GIB / (techniques.reference().peak_allocated_bytes or 0)) * 100,)


def times() -> Figures:
    runs = [
        one.train for one in joined.records("technique-quality/records.jsonl")
        if one.train is not None and "variant:reference" in one.tags
    ]  # fmt: skip
    return runs[0]["step_s"] * 1e3, (techniques.reference().step_s or 0.0) * 1e3


CLAIMS: list[tuple[str, Callable[[], Figures]]] = [
    (r"the reference took # ms instead of # ms", times),
    (r"a chunked loss it takes \[# GiB\]",
     lambda: (combination(adapter={"kind": "lora", "dtype": "base"})[0],)),
    (r"and a chunked loss takes # GiB",
     lambda: (combination(quantize="nf4", loss="chunked")[0],)),
    (r"Of # combinations", lambda: (len(COMBINED),)),
    (r"The smallest takes # % more time", smallest),
    (r"without adapters or fp8 takes # % less memory", fastest),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "values"), CLAIMS, ids=[pattern for pattern, _ in CLAIMS])
def test_a_figure_of_the_page_is_that_of_the_records(pattern: str, values: Callable[[], Figures]) -> None:
    check(PAGE, pattern, values())


def test_ranges_and_unchanged_figures_of_the_page() -> None:
    plan, selective = effect("recompute_layers"), effect("recompute_selective")
    assert plan.change(ALLOCATED) == pytest.approx(selective.change(ALLOCATED), abs=1e-3)
    assert 0.4 < plan.change(STEP) / selective.change(STEP) < 0.6
    assert abs(effect("optimizer_in_backward").change(ALLOCATED)) < 1e-6
    for name in ("offload_activations", "muon", "adamw_low_bit", "offload_weights"):
        assert effect(name).change(DEVICE) > effect(name).change(ALLOCATED)
    exact = ("recompute_every", "recompute_selective", "recompute_layers", "chunked_loss", "fused_loss",
             "accumulation", "loader", "empty_cache", "block_kernels")  # fmt: skip
    runs = [effect(name) for name in exact] + [effect("attention", index) for index in range(3)]
    assert all(abs((one.perplexity or 0) - reference_perplexity()) < 0.02 for one in runs)
    assert round(reference_perplexity(), 2) == 4.16


def test_every_technique_has_its_heading_and_a_row_in_both_tables() -> None:
    assert set(techniques.TITLES) == set(registry.techniques())
    headings = re.findall(r"^### (.*)$", REFERENCE_PAGE.read_text(), re.M)
    assert headings == list(techniques.TITLES.values())
    found = techniques.effects()
    measured = {one.name for one in registry.in_order() if one.examples} - set(technique_suite.NOT_MEASURED)
    assert {one.technique for one in found} == measured
    assert len(techniques.measured().splitlines()) == 3 + len(found) + len(batch_size.technique_rows())


def test_every_recipe_of_the_suite_is_valid_and_has_a_control() -> None:
    for recipe in suite():
        registry.check(recipe)
    for technique in registry.techniques():
        assert all(control(technique, recipe) is not None for recipe in alone(technique))


def test_the_suite_is_written_and_read_again(tmp_path: Path) -> None:
    assert technique_suite.main([str(tmp_path / "suite.jsonl")]) == 0
    written = [recipe_from(data) for _, data in recipe_lines(tmp_path / "suite.jsonl")]
    assert [recipe.id for recipe in written] == [one.id for one in suite()]


def test_accumulation_is_compared_with_one_micro_batch_of_all_tokens() -> None:
    (recipe,) = alone("accumulation")
    assert (recipe.batch.micro, recipe.batch.accumulate) == (1, 4)
    assert control("accumulation", recipe) == recipe_from(REFERENCE)


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [("fp8", "lora", "never"), ("stochastic_rounding", "adamw", "partly"), ("lora", "quantize", ""),
     ("compile_model", "offload_activations", "never"), ("adamw", "sgd", "")],
)  # fmt: skip
def test_pairs_of_techniques_are_refused_always_in_part_or_not(first: str, second: str, kind: str) -> None:
    never, partly = techniques.refusals()
    for one, other in ((first, second), (second, first)):
        assert ("never" if other in never[one] else "partly" if other in partly[one] else "") == kind


def test_values_of_one_field_are_a_choice_and_no_combination() -> None:
    assert techniques.clash({"recompute": "full"}, {"recompute": {"every": 2}})
    assert techniques.clash({"optimizer": {"name": "sgd"}}, {"optimizer": {"name": "muon", "momentum": 0.9}})
    assert not techniques.clash({"optimizer": {"name": "sgd"}}, {"optimizer": {"in_backward": True}})


def test_the_figures_of_the_traced_scripts_are_those_of_their_records() -> None:
    lines = (joined.RESULTS / "examples/h200.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    found = {
        name: [row["predicted"][name] / row["measured"][name] - 1 for row in rows]
        for name in ("peak_allocated_bytes", "peak_reserved_bytes")
    }
    exact = [sum(error == 0 for error in errors) for errors in found.values()]
    worst = [f"{max(map(abs, errors)) * 100:.3f}" for errors in found.values()]
    pattern = r"Of # runs of seven .*? # allocated and # reserved peaks .*? worst errors are # % and # %"
    assert figures("docs/guide/trace.md", pattern) == (str(len(rows)), *map(str, exact), *worst)
