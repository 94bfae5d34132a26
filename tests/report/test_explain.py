"""Who holds memory at the peak: equal to the prediction to the byte, and to what can be counted by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tiny_recipe import tiny_recipe
from trainfit.cli.main import main
from trainfit.explanation import peak
from trainfit.explanation.peak import difference, explain, merged_path
from trainfit.ledger.file import save
from trainfit.prediction.predict import predict
from trainfit.prediction.trace import trace
from trainfit.report.console import broken
from trainfit.spec.explanation import Explanation
from trainfit.spec.recipe import Batch, Optimizer, Recipe
from trainfit.spec.result import CATEGORIES

LAYERS = 5
ROUNDING = 512


def adafactor(implementation: Any = "native", *, in_backward: Any = False, **fields: Any) -> Recipe:
    """Activations of 4 x 32 tokens are the largest part of the peak, as in the experiment."""
    optimizer = Optimizer(name="adafactor", in_backward=in_backward)
    return tiny_recipe(
        implementation, LAYERS, **{"optimizer": optimizer, "batch": Batch(micro=4, seq=32), **fields}
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path_factory.getbasetemp() / "explained"))


@pytest.mark.parametrize(("implementation", "recompute"), [("native", "none"), ("hf", "full")])
def test_the_peak_is_the_predictions_and_its_holders_add_up_to_it(
    implementation: str, recompute: Any
) -> None:
    recipe = adafactor(implementation, recompute=recompute)
    found, predicted = explain(recipe), predict(recipe)
    assert found.peak_allocated_bytes == predicted.peak_allocated_bytes
    assert found.breakdown == predicted.breakdown
    assert f"{found.moment.step}.{found.moment.phase}" == predicted.peak_phase
    by_category = dict.fromkeys(CATEGORIES, 0)
    for holder in found.holders:
        by_category[holder.category] += holder.num_bytes
    by_category["temporary"] += found.unsplit_bytes
    assert by_category == found.breakdown.model_dump()
    assert list(found.holders) == sorted(found.holders, key=lambda one: -one.num_bytes)


def test_equal_layers_are_told_together_with_their_number() -> None:
    found = explain(adafactor())
    weights = {one.path: one for one in found.holders if one.category == "weights"}
    # TINY_LLAMA: hidden 32, intermediate 64, fp32; gate and up are one weight.
    assert (weights["layers.*.mlp.up.weight"].count, weights["layers.*.mlp.up.weight"].num_bytes) == (
        LAYERS,
        LAYERS * 2 * 64 * 32 * 4,
    )
    assert weights["lm_head.weight"].count == 1
    kept = {one.path for one in found.holders if one.category == "activations"}
    assert {"layers.*.attention", "layers.*.mlp"} <= kept


def test_told_by_three_layers_or_by_all_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = adafactor()
    short = explain(recipe)
    monkeypatch.setattr(
        peak, "ledger_of", lambda recipe, machine, **_: trace(recipe, machine.row, whole=True)
    )
    whole = explain(recipe)
    assert short.holders == whole.holders
    assert (short.breakdown, short.ends, short.most) == (whole.breakdown, whole.ends, whole.most)
    assert (short.moment.op, short.moment.phase) == (whole.moment.op, whole.moment.phase)


@pytest.mark.parametrize("path", ["layers.L0.mlp.up", "layers.17.mlp.up", "layers.lead1.mlp.up",
                                  "layers.R2.tail0.mlp.up", "layers.3..mlp.up"])  # fmt: skip
def test_a_layers_number_is_a_star(path: str) -> None:
    assert merged_path(path) == "layers.*.mlp.up"
    assert merged_path("fc1.L2norm.x") == "fc1.L2norm.x"


def test_why_fusing_alone_saves_nothing_and_with_recomputation_all_gradients() -> None:
    """The answer of evidence/pages/peak-memory.md, on a model small enough to count."""
    plain, fused = explain(adafactor()), explain(adafactor(in_backward=True))
    trained = sum(
        one.num_bytes for one in plain.holders if one.category == "weights" and one.path != "frequencies"
    )
    # Without fusing every gradient is alive when the backward ends; with it none is, and few are at once.
    assert plain.ends["backward"].gradients == plain.most.gradients == pytest.approx(trained, rel=0.01)
    assert fused.ends["backward"].gradients == 0
    assert 0 < fused.most.gradients < plain.most.gradients / 2
    # Alone it saves nothing: the peak stands where the backward begins, before there are gradients.
    assert plain.moment == fused.moment
    assert plain.moment.phase == "backward"
    assert plain.breakdown.gradients == fused.breakdown.gradients == 0
    assert plain.peak_allocated_bytes == fused.peak_allocated_bytes
    # With recomputation the peak is where the gradients are, and fusing takes them away.
    full, both = explain(adafactor(recompute="full")), explain(adafactor(recompute="full", in_backward=True))
    assert full.peak_allocated_bytes - both.peak_allocated_bytes > 0.5 * full.breakdown.gradients > 0


def test_the_curve_reaches_the_peak_and_the_ends_lie_on_it() -> None:
    found = explain(adafactor(recompute="full"))
    highest = max(point.alive.total for point in found.curve)
    assert highest == found.peak_allocated_bytes - found.unsplit_bytes
    assert [point.phase for point in found.curve] == sorted(
        (point.phase for point in found.curve), key=["data", "forward", "backward", "optimizer"].index
    )
    assert found.ends["optimizer"].activations == 0
    assert found.ends["forward"].total <= highest


def test_the_difference_adds_up() -> None:
    first, second = explain(adafactor()), explain(adafactor(recompute="full"))
    changes = difference(first, second)
    held = [found.peak_allocated_bytes - found.unsplit_bytes for found in (first, second)]
    assert sum(change.num_bytes for change in changes) == held[1] - held[0]
    assert abs(changes[0].num_bytes) == max(abs(change.num_bytes) for change in changes)
    assert difference(first, first) == []


def written(path: Path, recompute: str) -> str:
    recipe = adafactor(recompute=recompute).content()
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return str(path)


def test_the_command_prints_one_json_object_or_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (written(tmp_path / f"{word}.json", word) for word in ("none", "full"))
    assert main(["explain", first, "--json"]) == 0
    found = Explanation.model_validate_json(capsys.readouterr().out)
    assert found == explain(adafactor(recompute="none"))
    assert main(["explain", first, second, "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["explanations"]
    assert [one["recipe"]["recompute"] for one in both] == ["none", "full"]
    assert main(["explain", first, second, "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert f"steady step, backward, at {found.moment.op}" in text
    assert "|forward" in text
    assert f"{len(found.holders) - 3} more" in text
    assert "The second's peak minus the first's" in text
    assert main(["explain", str(tmp_path / "missing.yaml")]) == 74


def test_an_explanation_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (50, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["explain", "tiny-cpu", "tiny-cpu", "--set", "batch.micro=2"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        assert "backward" in " ".join(lines)


def test_long_names_break_at_dots_and_spaces() -> None:
    assert broken("model.layers.*.mlp.down_proj.weight", 20) == "model.layers.*.mlp\n.down_proj.weight"
    assert broken("layers.*.mlp mul", 12) == "layers.*.mlp\nmul"
    assert broken("short.name mm", 20) == "short.name mm"


def test_two_ledgers_are_compared_by_their_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, recomputed = adafactor("hf"), adafactor("hf", recompute="full")
    paths = [tmp_path / f"{name}.json.gz" for name in ("plain", "recomputed")]
    for recipe, path in zip((plain, recomputed), paths, strict=True):
        save(trace(recipe), path)
    first, second = map(str, paths)
    assert main(["explain", first, second, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    totals = {one["name"]: (one["first"], one["second"]) for one in found["totals"]}
    for place, recipe in enumerate((plain, recomputed)):
        estimate = predict(recipe)
        assert totals["peak allocated"][place] == estimate.peak_allocated_bytes
        assert totals["model FLOPs"][place] == estimate.model_flops
        assert totals["hardware FLOPs"][place] == estimate.hardware_flops
    again = [
        one for one in found["ops"] if one["phase"] == "steady.backward" and one["name"] == "aten.mm.default"
    ]
    assert again
    assert all(one["second"] > one["first"] for one in again)
    assert all("*" in one["module"] for one in again)
    assert main(["explain", first, first]) == 0
    assert "Equal in every operation and allocation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["a.json.gz"], "a ledger is compared with another ledger"),
        (["a.json.gz", "gpt2"], "a ledger is compared with another ledger"),
        (["a.json.gz", "b.json.gz"], "there is no such file"),
        (["a.json.gz", "b.json.gz", "--set", "seed=1"], "a ledger has no fields to set"),
    ],
)
def test_what_is_no_pair_of_ledgers_is_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 65
    assert problem in capsys.readouterr().err


def test_a_damaged_ledger_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.json.gz"
    path.write_bytes(b"no gzip")
    assert main(["explain", str(path), str(path)]) == 65
    assert "damaged.json.gz: not a whole ledger" in capsys.readouterr().err
