"""The report: what joins, the errors, and that no text of a recipe becomes markup."""

import io
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from trainfit.report import comparisons as plots
from trainfit.report import words
from trainfit.report.compare import Comparison, compare, summarise
from trainfit.report.comparisons import markdown_table, text_table
from trainfit.report.html import report_page as page
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.provenance import new_record
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import (
    Environment,
    Estimate,
    Measurement,
    MemoryBreakdown,
    PhasePeaks,
    Phases,
    Record,
    Spread,
)
from trainfit.spec.units import GIB
from trainfit.techniques.registry import describe

HOSTILE = "<script>alert('x')</script> $\\frac{1}{2}$ | [red]&amp; \"q\""


@pytest.fixture(autouse=True)
def _no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_COMMIT", "abc")  # no git process for each record


def recipe(name: str = "gpt2", **fields: Any) -> Recipe:
    return parse(Recipe, {"model": {"config": {"model_type": "llama"}, "name": name}} | fields)


def phases(peak: int) -> Phases:
    return Phases(
        after_init=peak // 4,
        first=PhasePeaks(forward=peak // 2, backward=peak // 2, optimizer=peak // 2),
        steady=PhasePeaks(forward=peak // 2, backward=peak, optimizer=peak // 2),
    )


def predicted(one: Recipe, peak_gib: float, *, fits: bool = True, step_s: float = 1.0) -> Record:
    peak = round(peak_gib * GIB)
    estimate = Estimate(
        recipe_id=one.id, phases=phases(peak), breakdown=MemoryBreakdown(weights=peak),
        peak_phase="steady.backward", peak_allocated_bytes=peak, peak_reserved_bytes=peak,
        peak_device_bytes=peak, device_bytes=80 * GIB, fits=fits, params=1, trainable_params=1,
        model_flops=1e12, hardware_flops=2e12, flops_convention="causal", step_s=step_s,
        time=None, tokens_per_s=None, mfu=0.6, hfu=0.8, cost=None,
    )  # fmt: skip
    return new_record("predict", one, estimate=estimate)


def measured(one: Recipe, peak_gib: float, device: str = "NVIDIA H200", **fields: Any) -> Record:
    peak = round(peak_gib * GIB)
    where = Environment(
        device=device, device_bytes=140 * GIB, torch="2.11", cuda="12.8", python="3.12", platform="Linux"
    )
    base = {
        "status": "done", "phases": phases(peak), "peak_allocated_bytes": peak, "step_s": 1.5,
        "step_times": Spread.of([1.4, 1.5, 1.6]), "tokens_per_s": 1000.0,
    }  # fmt: skip
    return new_record(
        "measure", one, measurement=Measurement(recipe_id=one.id, environment=where, **(base | fields))
    )


def printed(found: Sequence[Comparison]) -> str:
    """Return the table of a terminal of 80 columns."""
    out = io.StringIO()
    Console(file=out, width=80).print(text_table(found))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    return out.getvalue()


def test_error_is_predicted_minus_measured_over_measured():
    one = recipe()
    (found,) = compare([predicted(one, 41.2), measured(one, 40.0)])
    assert found.error("peak_allocated_bytes") == pytest.approx(0.03)
    assert found.error("peak_reserved_bytes") is None  # not measured
    assert found.phase_errors()["steady.backward"] == pytest.approx(0.03)
    assert len(found.phase_errors()) == 7


def test_newest_wins_and_devices_stay_apart():
    one, other = recipe(), recipe("other")
    found = compare([
        predicted(one, 10), predicted(one, 20), measured(one, 1), measured(one, 20),
        measured(one, 5, "NVIDIA A100"), predicted(other, 7),
    ])  # fmt: skip
    assert [(c.model, c.device, c.status) for c in found] == [
        ("gpt2", "NVIDIA H200", "done"), ("gpt2", "NVIDIA A100", "done"), ("other", "h200", "not measured"),
    ]  # fmt: skip
    assert [c.error("peak_allocated_bytes") for c in found] == [0.0, pytest.approx(3.0), None]
    assert [c.on_its_device for c in found] == [True, False, False]


def test_a_prediction_for_the_versions_of_the_measurement_is_preferred_and_another_is_marked():
    """A prediction holds for every build of a version; a measurement names its build: 2.11.0+cu128."""
    one = recipe()
    old, new = ({"torch": version, "transformers": "5.17.0"} for version in ("2.11.0", "2.13.0"))
    ran = measured(one, 40)
    assert ran.measurement is not None
    where = ran.measurement.environment.model_copy(update={"torch": "2.11.0+cu128", "transformers": "5.17.0"})
    ran = ran.model_copy(update={"measurement": ran.measurement.model_copy(update={"environment": where})})

    def estimated(peak_gib: float, versions: dict[str, str]) -> Record:
        record = predicted(one, peak_gib)
        assert record.estimate is not None
        return record.model_copy(
            update={"estimate": record.estimate.model_copy(update={"versions": versions})}
        )

    (found,) = compare([estimated(40, old), estimated(80, new), ran])
    assert (found.error("peak_allocated_bytes"), found.other_versions) == (0.0, "")
    (found,) = compare([estimated(80, new), ran])
    assert found.other_versions == "predicted for torch 2.13.0, measured with torch 2.11.0"
    assert "1 predicted for other versions than those measured." in summarise([found]).text()
    for text in (markdown_table([found]), page([found])):
        assert "predicted for torch 2.13.0, measured with torch 2.11.0" in text
    assert "measured with torch 2.11.0" in " ".join(printed([found]).split())


def test_measured_utilisation_follows_from_predicted_flops_and_measured_time():
    one = recipe()
    (found,) = compare([predicted(one, 1, step_s=1.0), measured(one, 1)])
    assert found.utilisation("mfu") == pytest.approx(0.6 / 1.5)
    (elsewhere,) = compare([predicted(one, 1), measured(one, 1, "NVIDIA A100")])
    assert elsewhere.utilisation("mfu") is None


def test_summary_counts_what_is_near_and_what_was_foreseen():
    pairs = [(recipe(seed=index), error) for index, error in enumerate((0.01, -0.02, 0.05))]
    records = [
        record for one, error in pairs for record in (predicted(one, 40 * (1 + error)), measured(one, 40))
    ]
    large = recipe(seed=9)
    records += [predicted(large, 200, fits=False), measured(large, 130, status="out-of-memory", phases=None)]
    summary = summarise(compare(records))
    assert (summary.num_compared, summary.num_within_goal) == (3, 2)
    assert summary.median_error == pytest.approx(0.02)
    assert (summary.num_out_of_memory, summary.num_foreseen) == (1, 1)
    assert "2 of 3 recipes within 3%" in summary.text()


def test_nothing_to_report_is_said():
    with pytest.raises(InputError, match="none of them a prediction"):
        compare([])
    with pytest.raises(InputError, match="1 records"):
        compare([new_record("train", recipe(), train={})])


def test_a_recipe_in_words_names_its_hosts():
    hardware = {"gpu": "h200", "count": 16}
    assert words.describe(recipe(hardware=hardware)).endswith(", on 16 x h200")
    assert words.describe(recipe(hardware=hardware | {"nodes": 4})).endswith(", on 16 x h200 in 4 hosts")
    run = "EPYC (2 threads)"
    assert words.describe(recipe(hardware={"gpu": "cpu"}), run).endswith(f", on {run}")
    assert words.describe(recipe(hardware={"gpu": "h200"}), run).endswith(
        f", on {run} (the recipe's: 1 x h200)"
    )


def test_technique_names_what_differs():
    assert describe(recipe()) == "bf16"
    chosen = recipe(
        precision="amp-bf16", recompute="full", compile="block", adapter={"kind": "lora", "rank": 8}
    )
    assert describe(chosen) == "amp-bf16, recompute full, compile block, lora 8"
    streamed = recipe(
        recompute="full", offload={"weights": True, "activations": True}, empty_cache_every=3,
        optimizer={"in_backward": "block", "stochastic_rounding": True}, loader={"workers": 2},
    )  # fmt: skip
    assert describe(streamed) == (
        "bf16, recompute full, activations on the host, weights on the host, stochastic rounding, "
        "optimizer in backward by block, 2 loader workers, cache emptied every 3 steps"
    )
    planned = recipe(
        recompute={"layers": ["full", "full", {"recompute": "elementwise", "offload": 0.5}, "none"]}
    )
    assert describe(planned) == "bf16, recompute 2 full + 1 elementwise (partly offloaded) + 1 none"
    soft = recipe(adapter={"kind": "prompt", "tokens": 9}, recompute={"selective": {"save": ["silu", "mm"]}})
    assert describe(soft) == "bf16, recompute selective mm+silu, prompt 9"


def hostile() -> list[Record]:
    one = recipe(HOSTILE)
    return [predicted(one, 41), measured(one, 40, message="<img src=x onerror=alert(1)>")]


def test_page_escapes_and_is_self_contained(tmp_path: Any):
    (tmp_path / "report.html").write_text(page(compare(hostile()), title="<b>title"))
    text = (tmp_path / "report.html").read_text()
    for raw in ("<script", "<img", "<b>title"):
        assert raw not in text
    assert "&lt;script&gt;" in text
    for outside in ("src=", "<link", "@import"):
        assert outside not in text.replace("src=x onerror", "")
    assert "+2.50 %" in text
    assert text.count("<svg") == 4


def test_plots_are_wellformed_svg_with_ids_of_their_own():
    comparisons = compare(hostile())
    ids: list[str] = []
    for draw in (plots.scatter, plots.error_bars, plots.breakdown_bars, plots.time_bars):
        elements = list(ET.fromstring(str(draw(comparisons))).iter())
        mine = [element.attrib["id"] for element in elements if "id" in element.attrib]
        links = {value for one in elements for key, value in one.attrib.items() if key.endswith("href")}
        assert {link.removeprefix("#") for link in links} <= set(mine)
        ids += mine
    assert len(ids) == len(set(ids))


def test_plots_without_data_are_left_out():
    only = compare([predicted(recipe(), 1)])
    assert plots.scatter(only) is None
    assert plots.time_bars(only) is None
    assert "No recipe has both" in page(only)


def test_text_table_fits_80_columns_and_reads_no_markup():
    text = printed(compare([*hostile(), measured(recipe("big"), 3, status="out-of-memory")]))
    assert "[red]" in text.replace("\n", "")
    assert "+2.50 %" in text
    assert "OOM" in text
    assert "40.0%" in text  # MFU, the last column


def test_markdown_table_has_equal_cells_in_every_row():
    lines = [line for line in markdown_table(compare(hostile())).splitlines() if line.startswith("|")]
    counts = {len(line.replace("\\|", "").split("|")) for line in lines}
    assert len(lines) == 3
    assert len(counts) == 1
    assert "\\<script\\>" in lines[2]


def test_a_measurement_without_memory_says_why():
    one = recipe(compile="block")
    why = "memory not measured: live tensors cannot be followed through compiled code on a CPU"
    unknown = measured(one, 1, phases=None, peak_allocated_bytes=None, message=why)
    found = compare([predicted(one, 1), unknown])
    assert why in " ".join(printed(found).split())
    assert f"done: {why}" in markdown_table(found)
    assert why in page(found)
    assert compare([predicted(one, 1), measured(one, 1)])[0].lacking == ""


def test_small_models_read_in_small_units():
    one = recipe()
    found = compare([predicted(one, 45.87 / 1024), measured(one, 46 / 1024)])
    assert "45.87 MiB  46.00 MiB" in printed(found)
    assert "| 45.87 MiB | 46.00 MiB |" in markdown_table(found)


def test_a_cpu_process_is_not_held_against_a_prediction():
    """Its resident memory has Python and the libraries in it."""
    one = recipe(hardware={"gpu": "cpu"})
    on_gpu = measured(one, 1, peak_device_bytes=2 * GIB)
    assert on_gpu.measurement is not None
    where = on_gpu.measurement.environment.model_copy(update={"cuda": None})
    on_cpu = on_gpu.measurement.model_copy(update={"environment": where})
    assert compare([predicted(one, 1), on_gpu])[0].error("peak_device_bytes") == pytest.approx(-0.5)
    (found,) = compare([predicted(one, 1), on_gpu.model_copy(update={"measurement": on_cpu})])
    assert found.error("peak_device_bytes") is None
    assert found.error("peak_allocated_bytes") == 0
