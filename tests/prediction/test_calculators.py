"""The published calculators give the numbers that their sources print.

Compare sets them next to an Estimate.
"""

import json

import pytest

from evidence.scripts.calculators import (
    Comparison,
    compare,
    main,
    preset_recipes,
    presets_section,
    put_between_marks,
    table,
)
from trainfit.catalog import load
from trainfit.cli.main import main as trainfit_main
from trainfit.flops.calculators import rules, ultrascale
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import load_recipe, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, MemoryBreakdown, PhasePeaks, Phases
from trainfit.spec.units import GIB, TIB

WIDGET = ultrascale.WidgetSpec(
    a=32, b=100, h=4096, h_ff=16384, layers=32, s=1024, v=32000, k=2, mixed=False, ff_activation="swiglu"
)
SHOWN = (2.09, 2.15)
"""The published example, L 32, h 4096, b 100, s 1024: activations and total in the page's TB, 2**40 bytes."""


def shown(spec: ultrascale.WidgetSpec) -> tuple[float, float]:
    found = ultrascale.memory(spec)
    return round(found.activations / TIB, 2), round(found.total / TIB, 2)


def test_the_widgets_worked_example() -> None:
    """fp32, SwiGLU, k = 2."""
    found = ultrascale.memory(WIDGET)
    assert found.activations == 2_298_583_449_600
    assert round(found.total / TIB, 4) == 2.1504
    assert shown(WIDGET) == SHOWN


def test_the_worked_example_had_k_2() -> None:
    """Of the sliders that the example does not name, only k = 2 gives both of its figures."""
    choices = {
        (mixed, ff_activation, h_ff, v, k)
        for mixed in (True, False) for ff_activation in ("relu", "gelu", "swiglu")
        for h_ff in (8192, 11008, 14336, 16384, 32768, 65536) for v in (30522, 32000) for k in range(17)
        if shown(ultrascale.WidgetSpec(
            a=32, b=100, h=4096, h_ff=h_ff, layers=32, s=1024, v=v, k=k, mixed=mixed,
            ff_activation=ff_activation,
        )) == SHOWN
    }  # fmt: skip
    assert (False, "swiglu", 16384, 32000, 2) in choices
    assert {k for *_, k in choices} == {2}
    assert {mixed for mixed, *_ in choices} == {False}
    # Another k needs another vocabulary.
    for k, least, most in ((1, 33_466, 43_946), (2, 18_850, 43_252), (3, 17_104, 28_679)):
        fits = [shown(WIDGET.model_copy(update={"v": v, "k": k})) == SHOWN
                for v in (least - 1, least, most, most + 1)]  # fmt: skip
        assert fits == [False, True, True, False]


def test_the_command_has_every_slider(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--a 32 --b 100 --h 4096 --h_ff 16384 --L 32 --s 1024 --v 32000 --k 2 --t 1 --d 1 --no-mixed".split()
    )
    assert trainfit_main(["ultrascale", *words, "--ff-activation", "swiglu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["activations"] == 2_298_583_449_600
    assert round(found["total"] / TIB, 4) == 2.1504
    assert {name: found[name] for name in WIDGET.model_dump()} == WIDGET.model_dump()
    changed = ["--t", "4", "--d", "8", "--zero", "2", "--sequence-parallel", "--recomputation", "selective"]
    assert trainfit_main(["ultrascale", "--preset", "Llama 3 8B", *changed, "--json"]) == 0
    update = {"t": 4, "d": 8, "zero": 2, "sequence_parallel": True, "recomputation": "selective"}
    spec = ultrascale.PRESETS["Llama 3 8B"].model_copy(update=update)
    assert json.loads(capsys.readouterr().out)["total"] == ultrascale.memory(spec).total
    assert trainfit_main(["ultrascale", *words, "--ff-activation", "swiglu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "activations 2.09 TiB" in text
    assert "total 2.15 TiB" in text
    assert trainfit_main(["ultrascale", "--preset", "Llama 4"]) == 65
    assert "'Llama 3 Tiny'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "activations_gib", "total_gib"),
    [("Llama 3 8B", 61.09, 158.99), ("Llama 3 70B", 82.49, 413.83), ("Llama 3 405B", 257.49, 2339.21)],
)
def test_the_widgets_presets(preset: str, activations_gib: float, total_gib: float) -> None:
    found = ultrascale.memory(ultrascale.PRESETS[preset])
    assert round(found.activations / GIB, 2) == activations_gib
    assert round(found.total / GIB, 2) == total_gib


def test_recomputation_keeps_less() -> None:
    kept = [
        ultrascale.activation_bytes(WIDGET.model_copy(update={"recomputation": kind}))
        for kind in ("none", "selective", "full")
    ]
    scores = 32 * (2 * 4 + 1) * 32 * 1024**2 * 100
    assert kept[0] - kept[1] == scores
    once = 1024 * 100 * (4096 * (1 + 2 * 4) + 32000 * 4)
    assert kept[2] == 32 * 1024 * 100 * 4096 * 4 + once


@pytest.mark.parametrize(("zero", "shares"), [(0, (1, 1, 1)), (1, (1, 1, 8)), (2, (1, 8, 8)), (3, (8, 8, 8))])
def test_zero_stages_divide_the_states(zero: int, shares: tuple[int, int, int]) -> None:
    """ZeRO: the optimizer first, then gradients, then parameters (https://arxiv.org/abs/1910.02054, figure
    1).
    """
    spec = WIDGET.model_copy(update={"mixed": True, "k": 8, "d": 8, "zero": zero})
    count = ultrascale.parameters(spec)
    expected = tuple(size * count / share for size, share in zip((2, 2, 12), shares, strict=True))
    assert ultrascale.state_bytes(spec) == expected


@pytest.mark.parametrize("t", [1, 4])
def test_the_widgets_layer_is_korthikantis(t: int) -> None:
    """Bytes of a layer are s b h (10 + 24/t + 5 a s/(h t)) for h_ff = 4 h, GELU, 16-bit and t ranks; with
    sequence parallelism s b h 34/t and the scores (https://arxiv.org/abs/2205.05198, equation 1, table 2).
    """
    a, b, h, s = 16, 2, 1024, 256
    base = {"a": a, "b": b, "h": h, "h_ff": 4 * h, "s": s, "v": 1000, "t": t, "ff_activation": "gelu"}

    def layer(sequence_parallel: bool) -> float:
        one, two = (
            ultrascale.WidgetSpec(**base, layers=layers, sequence_parallel=sequence_parallel)
            for layers in (1, 2)
        )
        return ultrascale.activation_bytes(two) - ultrascale.activation_bytes(one)

    assert layer(False) == s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert layer(False) == rules.korthikanti_activations(a=a, b=b, s=s, h=h, layers=1, t=t)
    assert layer(True) == s * b * h * (34 / t + 5 * a * s / h)  # The page leaves the scores whole here.


def test_rules_of_thumb() -> None:
    assert rules.four_times(7 * 10**9, bytes_per_param=4) == 112e9
    assert rules.sixteen_bytes(7_500_000_000) == 120e9  # ZeRO, figure 1: 120 GB.
    # GPT-3: 174.6e9 parameters, 300e9 tokens, 3.14e23 FLOPs (https://arxiv.org/abs/2005.14165, table D.1).
    assert rules.six_n(174_600_000_000, 300 * 10**9) == pytest.approx(3.14e23, rel=0.01)
    # A layer of GPT-3, 96 heads, 12288, 2048 tokens (https://arxiv.org/abs/2205.05198, 4.1): the scores are
    # 80 of 114.
    for recomputation, bytes_a_value in (("none", 34 + 80), ("selective", 34), ("full", 2)):
        kept = rules.korthikanti_activations(
            a=96, b=1, s=2048, h=12288, layers=1, recomputation=recomputation
        )
        assert kept / (2048 * 12288) == bytes_a_value


def recipe(**changes: object) -> Recipe:
    plain = {"model": {"config": "llama-3.1-8b"}, "batch": {"micro": 1, "seq": 4096}, "precision": "bf16"}
    return recipe_from(plain | changes)


def estimate(of: Recipe, *, phase: str = "steady.backward", params: int = 8_030_261_248) -> Estimate:
    """An Estimate with round numbers; what is tested is the arithmetic on it."""
    peaks = PhasePeaks(forward=80 * GIB, backward=90 * GIB, optimizer=70 * GIB)
    return Estimate(
        recipe_id=of.id, phases=Phases(after_init=15 * GIB, first=peaks, steady=peaks), peak_phase=phase,
        breakdown=MemoryBreakdown(weights=15 * GIB, gradients=15 * GIB, optimizer=30 * GIB,
                                  activations=28 * GIB, temporary=2 * GIB),
        peak_allocated_bytes=90 * GIB, peak_reserved_bytes=91 * GIB, peak_device_bytes=92 * GIB,
        device_bytes=140 * GIB, fits=True, params=params, trainable_params=params, model_flops=2.152e14,
        hardware_flops=2.152e14, flops_convention="test", step_s=None, time=None, tokens_per_s=None, mfu=None,
        hfu=None, cost=None,
    )  # fmt: skip


def rows_of(of: Recipe, **changes: str) -> dict[tuple[str, str], Comparison]:
    return {(row.calculator, row.quantity): row for row in compare(of, estimate(of, **changes))}


def test_each_calculator_stands_beside_ours() -> None:
    rows = rows_of(recipe())
    assert set(rows) == {
        ("Ultrascale Playbook widget", "peak memory"),
        ("Ultrascale Playbook widget", "activations"),
        ("Korthikanti et al., equation 2", "activations"),
        ("4x rule", "peak memory"),
        ("6N", "model FLOPs of a step"),
    }
    four = rows["4x rule", "peak memory"]
    assert four.theirs == 4 * 2 * 8_030_261_248
    assert four.difference == pytest.approx(4 * 2 * 8_030_261_248 / (90 * GIB) - 1)
    assert rows["6N", "model FLOPs of a step"].theirs == 6 * 8_030_261_248 * 4096
    spec = ultrascale.WidgetSpec(
        a=32, b=1, h=4096, h_ff=14336, layers=32, s=4096, v=128256, ff_activation="swiglu"
    )
    assert rows["Ultrascale Playbook widget", "peak memory"].theirs == ultrascale.memory(spec).total


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({"adapter": {"kind": "lora"}}, "Ultrascale Playbook widget"),
        ({"recompute": {"every": 2}}, "Korthikanti et al., equation 2"),
        ({"precision": "fp32"}, "Korthikanti et al., equation 2"),
        ({"precision": "bf16"}, "16 bytes a parameter (ZeRO)"),
    ],
)
def test_a_calculator_that_cannot_say_a_recipe_has_no_row(changes: dict, gone: str) -> None:
    assert gone not in {name for name, _ in rows_of(recipe(**changes))}
    assert ("16 bytes a parameter (ZeRO)", "weights, gradients, optimizer") in rows_of(
        recipe(precision="amp-bf16")
    )


def test_nothing_is_compared_with_nothing() -> None:
    assert not [key for key in rows_of(recipe(), phase="steady.optimizer") if key[1] == "activations"]
    assert rows_of(recipe())["4x rule", "peak memory"]._replace(ours=0.0).difference is None


def test_the_tables_print_the_virtual_gpus_figures_and_the_differences() -> None:
    of = recipe()
    heads, _, row = (
        line.split(" | ") for line in table({"demo": (of, compare(of, estimate(of)))}).splitlines()
    )
    assert row[1] == "90.00 GiB"
    assert row[heads.index("4x: peak, %")] == "-33.5"
    shown = presets_section({"Llama 3 8B": [100 * GIB, 200 * GIB], "Llama 3 Tiny": [GIB]})
    assert "| Llama 3 8B | 1 x 1 | 158.99 GiB | 100.00 GiB | +59.0% | 200.00 GiB | -20.5% |" in shown
    assert "| Llama 3 Tiny | 1 x 1 | 672.51 MiB | 1.00 GiB | -34.3% | – | – |" in shown


def test_presets_over_ranks_are_traced_on_their_mesh() -> None:
    shape, real = preset_recipes("Llama 3 70B")
    for one in (shape, real):
        assert (one.hardware.count, one.parallel.tensor, one.batch.micro, one.batch.seq) == (64, 8, 32, 256)
    spec = ultrascale.PRESETS["Llama 3 70B"]
    assert shape.model.config["vocab_size"] == 30528 == -(-spec.v // 8) * 8
    assert shape.model.config["num_hidden_layers"] == spec.layers
    assert real.model.config == "llama-3-70b"
    assert [one.model.display_name for one in preset_recipes("Llama 3 Tiny")] == ["same shape"]


def test_numbers_go_between_the_marks_and_nowhere_else() -> None:
    document = "a\n<!-- numbers: begin -->\nold\n<!-- numbers: end -->\nz\n"
    assert (
        put_between_marks(document, "new")
        == "a\n<!-- numbers: begin -->\n\nnew\n\n<!-- numbers: end -->\nz\n"
    )
    with pytest.raises(InputError, match="no marks"):
        put_between_marks("a", "new")


def test_a_bad_recipe_is_one_line_and_exit_65(tmp_path, capsys) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: {config: gpt2}\nbatch: {micro: -1}\n")
    assert main([str(path)]) == 65
    assert "batch.micro" in capsys.readouterr().err


def test_every_shipped_recipe_can_be_compared() -> None:
    for path in load.recipes().values():
        of = load_recipe(path)
        assert compare(of, estimate(of))
