"""Every figure in a sentence on accuracy (evidence/pages/accuracy.md) is that of the records."""

import bisect
import math
import re
import subprocess
from collections.abc import Callable, Sequence

import pytest

from evidence.scripts import several_gpus as drawing
from evidence.scripts.accuracy.held_out import is_held_out
from evidence.scripts.tables import (
    accuracy,
    blind,
    joined,
    several_gpus,
    several_gpus_suite,
)
from evidence.scripts.tables.accuracy import ANEW, FIRST, PEAKS, suite, verdicts
from evidence.scripts.tables.errors import exact, percentile_95, share, worst
from evidence.scripts.tables.joined import errors
from page_claims import ROOT, check, figures, sentences
from trainfit.spec.result import Record

PAGE = "evidence/pages/accuracy.md"
Figures = tuple[float, ...]


def made_after_measuring() -> Figures:
    measured = {}
    for record in joined.records(joined.SUITE):
        if record.measurement is not None:
            at = measured.setdefault(record.recipe_id, record.created_at)
            measured[record.recipe_id] = min(at, record.created_at)
    ids = {one.recipe.id for one in suite()[FIRST]}
    first = [one for one in joined.records(joined.FIRST_FILE) if one.recipe_id in ids]
    return sum(one.created_at > measured[one.recipe_id] for one in first), len(first)


def device_errors(*titles: str) -> list[float]:
    found = [one.device_error for title in titles for one in blind.by_title()[title]]
    return [error for error in found if error is not None]


def sweep_errors() -> Figures:
    found = [one.error * 100 for one in blind.by_title()["sweep: separate effects, 1.6B"] if one.error]
    return max(found), min(found)


def without_device() -> Figures:
    return (sum(one.status == "done" and one.error(PEAKS["device"]) is None for one in suite()[ANEW]),)


def chosen() -> Figures:
    return (sum(accuracy.origins_by_id()[one.recipe.id] == "chosen" for one in suite()[ANEW]),)


def out_of_memory_near_the_cards_size() -> Figures:
    out = [one for one in suite()[ANEW] if one.status == "out-of-memory"]
    assert {accuracy.origins_by_id()[one.recipe.id] for one in out} == {
        "drawn by a seed, near the card's size"
    }
    return (len(out),)


def gemma() -> Figures:
    found = {}
    for record in joined.records("versions/predicted.jsonl"):
        recipe = joined.recipe_of(record)
        if recipe.batch.seq == 2840 and recipe.recompute == "none" and record.estimate is not None:
            found[joined.versions_of(record)[1]] = record.estimate.peak_allocated_bytes / 1e9
    return found["5.17.0"], found["5.23.0"]


def phases() -> Figures:
    steps = [
        f"{step}.{name}" for step in ("first", "steady") for name in ("forward", "backward", "optimizer")
    ]
    found = {name: errors(suite()[ANEW], f"phases.{name}") for name in steps}
    (count,) = {len(some) for some in found.values()}
    num_exact = [exact(some) for some in found.values()]
    within = max(percentile_95(some) for some in found.values()) * 100
    return min(num_exact), max(num_exact), count, 95, math.ceil(within * 1e3) / 1e3


def largest_phase_errors() -> Figures:
    forward = sorted(map(abs, errors(suite()[ANEW], "phases.first.forward")), reverse=True)
    others = [
        abs(error)
        for name in (
            "first.backward", "first.optimizer", "steady.forward", "steady.backward", "steady.optimizer",
        )
        for error in errors(suite()[ANEW], f"phases.{name}")
    ]  # fmt: skip
    return forward[0] * 100, forward[1] * 100, max(*forward[2:], *others) * 100


def measured_with_another_version() -> Figures:
    (found,) = [
        one for one in joined.records("versions/measured.jsonl") if joined.versions_of(one)[1] == "5.23.0"
    ]
    (predicted,) = {
        one.estimate.peak_allocated_bytes for one in joined.records("versions/predicted.jsonl")
        if one.recipe_id == found.recipe_id and joined.versions_of(one)[1] == "5.23.0" and one.estimate
    }  # fmt: skip
    assert found.measurement is not None
    assert found.measurement.peak_allocated_bytes == predicted
    return (predicted,)


def lost_rows() -> Figures:
    lost = joined.lost_commits()
    rows = {
        file: sum(num for commit, num in counts.items() if commit in lost)
        for file, counts in joined.commits_by_file().items()
    }
    bench = "bench.jsonl"
    first, suite_rows = rows["first-predicted/h200.jsonl"], rows["h200-techniques.jsonl"]
    changed = ("adapters-and-optimizers/", "profiled-steps/", "reading-memory.jsonl")
    newest = sum(num for file, num in rows.items() if file.startswith(changed))
    assert sum(rows.values()) == first + rows[bench] + suite_rows + newest
    total = joined.commits_by_file()[bench].total()
    return sum(rows.values()), first, rows[bench], total, suite_rows, newest


def crashes() -> Figures:
    found = [one for one in joined.join(joined.records(joined.SUITE)) if one.status in ("crashed", "timeout")]
    causes = [accuracy._causes()[one.recipe.id] for one in found]
    return len(found), sum("positions, the model has" in cause for cause in causes)


CLAIMS: list[tuple[str, Callable[[], Figures]]] = [
    (r"- # of the # first predictions were made after", made_after_measuring),
    (r"less than predicted \(# % and # %\)", sweep_errors),
    (r"The device error of # %", lambda: (worst(device_errors("sweep: memory budgets, 1.6B")) * 100,)),
    (r"# recipes were chosen by hand", chosen),
    (r"# recipes drawn around one technique shared their GPU", without_device),
    (r"needs # GB with transformers 5.17.0 and # GB with 5.23.0", gemma),
    (r"first and the steady step\) # to # of # are to the byte, and # % are within # %", phases),
    (r"is off by # % and # %, neither .*? the next error is # %", largest_phase_errors),
    (r"card's memory; # of them ran out of memory", out_of_memory_near_the_cards_size),
    (r"2 x 1408 took # bytes", measured_with_another_version),
    (r"# recipes crashed on the GPU: # \(GPT-2, OPT\) have", crashes),
    (
        r"# rows name 2472b0f-dirty, .*? # are first predictions; # are of # benchmark .*? "
        r"# is a measurement .*? # of 2026-11-27",
        lost_rows,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "values"), CLAIMS, ids=[pattern for pattern, _ in CLAIMS])
def test_a_figure_is_that_of_the_records(pattern: str, values: Callable[[], Figures]) -> None:
    check(PAGE, pattern, values())


def test_figures_that_only_the_log_holds_are_in_the_log() -> None:
    log = " ".join((ROOT / "docs/log.md").read_text().split())
    assert figures(PAGE, r"was off by #, # and # %") == ("-2.1", "-3.8", "-8.5")
    assert "all native Qwen3 under amp (-2.1, -3.8, -8.5 %)" in log
    assert f"from {figures(PAGE, r'rules came from # chosen')[0]} hand-picked recipes" in log
    assert "first step holds less than predicted: `compile: model` 58 MB" in log


def test_the_effects_named_for_the_sweeps_are_those_of_the_records() -> None:
    differences = {
        title: {
            one.predicted.peak_allocated_bytes - one.allocated_bytes for one in found if one.allocated_bytes
        }
        for title, found in blind.by_title().items()
    }
    for title in ("sweep: recomputation budgets, Llama-3.1-8B", "sweep: ladder, Llama-3.2-1B"):
        assert differences[title] - {0} == {-512}
    low = differences["sweep: separate effects, 1.6B"] - {0}
    assert {f"{size / 1e6:.0f}" for size in low} == {figures(PAGE, r"their first step held # MB less")[0]}
    budgets = blind.by_title()["sweep: memory budgets, 1.6B"]
    off = max(budgets, key=lambda one: abs(one.device_error or 0))
    (planned,) = {
        str(one.recipe["recompute"])
        for one in joined.records("peak-memory-pareto/records.jsonl")
        if one.estimate is not None and one.estimate.recipe_id == off.predicted.recipe_id
    }
    assert planned == "{'budget': 0.8}"


def test_one_environment_measured_every_recipe() -> None:
    found = [
        one.measurement.environment for one in joined.records(joined.SUITE) if one.measurement is not None
    ]
    kinds = {(one.device, one.torch, one.transformers, one.cuda, one.driver) for one in found}
    assert kinds == {("NVIDIA H200", "2.11.0", "5.17.0", "13.0", "580.159.04")}
    for part in ("transformers 5.17.0", "CUDA 13.0", "580.159.04"):
        assert part in sentences(PAGE)


def test_compiled_predictions_without_versions_state_the_versions_they_count_for() -> None:
    """`joined.UNNAMED` is what the assumptions of every compiled recipe say."""
    compiled = [
        one.estimate.assumptions
        for one in joined.records(joined.FIRST_FILE)
        if one.estimate is not None and not one.estimate.versions and one.recipe.get("compile")
    ]
    assert len(compiled) > 70
    for assumptions in compiled:
        assert set(re.findall(r"torch (\d+\.\d+\.\d+)", " ".join(assumptions))) == {joined.UNNAMED[0]}


def of_other_versions(record: Record) -> Record:
    assert record.estimate is not None
    versions = {"torch": "2.13.0", "transformers": "5.23.0"}
    return record.model_copy(update={"estimate": record.estimate.model_copy(update={"versions": versions})})


def test_a_prediction_of_other_versions_is_not_joined() -> None:
    some = joined.records("techniques/*.jsonl")[:40]
    predictions = [one for one in joined.records("techniques/*.jsonl") if one.estimate is not None]
    measurements = [one for one in some if one.measurement is not None]
    assert all(one.predicted is not None for one in joined.join([*predictions, *measurements]))
    others = [of_other_versions(one) for one in predictions]
    assert all(one.predicted is None for one in joined.join([*others, *measurements]))
    # A newer prediction of other versions does not hide the one that counts.
    assert all(one.predicted is not None for one in joined.join([*others, *predictions, *measurements]))


def test_groups_and_halves_count_each_recipe_once() -> None:
    pairs = suite()[ANEW]
    assert [one.recipe.id for one in suite()[FIRST]] == [one.recipe.id for one in pairs]
    assert len({one.recipe.id for one in pairs}) == len(pairs)
    ran = [int(line.split("|")[2]) for line in accuracy.groups().splitlines()[2:]]
    assert sum(ran[:4]) == sum(ran[4:]) == len(errors(pairs, PEAKS["allocated"]))


def test_the_halves_are_about_even_and_fixed() -> None:
    held_out = sum(is_held_out(f"{number:016x}") for number in range(2000)) / 2000
    # Five standard deviations of a fair coin thrown 2000 times are 0.056.
    assert abs(held_out - 0.5) < 0.056
    # First bytes of sha256("held-out 1b35129e6cd28e75"): 25; of the other: c7. Odd ones are held out.
    assert is_held_out("1b35129e6cd28e75") is True
    assert is_held_out("d07def421706fe4c") is True


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0 %"), (1e-9, "< 0.0001 %"), (0.00012, "+0.0120 %"), (-0.0123, "-1.23 %"), (0.1679, "+16.79 %")],
)
def test_a_share_that_is_not_0_never_reads_0(value: float, shown: str) -> None:
    assert share(value, signed=True) == shown


def test_the_lost_commits_are_those_that_head_does_not_descend_from() -> None:
    # Commits that were rebased away stay in the repository that made them and in its local clones.
    # "-dirty" at a name's end says that files were changed: no commit holds what was run.
    answer = subprocess.run(
        ["git", "-C", str(ROOT), "rev-list", "HEAD"], capture_output=True, text=True, check=False
    )
    if answer.returncode or (ROOT / ".git/shallow").exists() or not answer.stdout:
        pytest.skip("no whole git history here")
    held = sorted(answer.stdout.split())
    named = sorted({commit for counts in joined.commits_by_file().values() for commit in counts})
    assert all(f"{name[:7]}{name[40:]}" in sentences(PAGE) for name in joined.lost_commits())
    assert tuple(name for name in named if not _is_held(name, held)) == joined.lost_commits()


def _is_held(name: str, held: Sequence[str]) -> bool:
    at = bisect.bisect_left(held, name)
    return at < len(held) and held[at].startswith(name)


def test_first_predictions_are_of_the_measured_recipes() -> None:
    first = {one.recipe_id for one in joined.records(joined.FIRST_FILE)}
    assert {one.recipe.id for one in suite()[ANEW]} <= first


def test_recipes_of_two_gpus_are_exact_but_for_the_barriers_tensor() -> None:
    found = several_gpus.comparisons()
    num, barrier = figures(PAGE, r"# recipes for two H200s of one host .*? is exact, or # bytes low")
    assert (len(found), {one.error_bytes() for one in found}) == (int(num), {0, -int(barrier)})
    assert {one.recipe.hardware.count for one in found} == {2}
    check(PAGE, r"Reserved peaks are within # %", [100 * max(abs(one.reserved_error()) for one in found)])


def test_figures_of_the_drawn_recipes_for_two_gpus() -> None:
    pairs = several_gpus_suite.suite()
    errors = [abs(several_gpus_suite.allocated_error(one) or 0.0) for one in pairs]
    assert figures(PAGE, r"# recipes for two H200s, drawn by a seed") == (str(drawing.NUM_RECIPES),)
    assert len(pairs) == drawing.NUM_RECIPES
    close = sum(size <= 0.0002 for size in errors)
    check(
        PAGE, r"# of the allocated peaks were within 0\.02 %, # of them to the byte, .*? off by # %",
        (close, errors.count(0.0), 100 * max(errors)),
    )  # fmt: skip
    lower = [
        one for one in pairs if one.error("peak_allocated_bytes") != several_gpus_suite.allocated_error(one)
    ]
    assert figures(PAGE, r"the nearer counts here, # times the lower") == (str(len(lower)),)
    reserved: dict[bool, list[float]] = {True: [], False: []}
    for one in pairs:
        is_ddp = one.recipe.mesh.strategy in ("ddp", "zero1")
        reserved[is_ddp].append(abs(one.error("peak_reserved_bytes") or 0.0))
    check(PAGE, r"reserved peaks of PyTorch's DDP were up to # % too high", (100 * max(reserved[True]),))
    close = sum(size <= 0.005 for size in reserved[False])
    check(
        PAGE, r"of the # recipes without it, # had the reserved peak within 0\.5 %, the worst was off by # %",
        (len(reserved[False]), close, 100 * max(reserved[False])),
    )  # fmt: skip
    assert verdicts(list(pairs)) == {(True, "done"): len(pairs)}


def test_the_worst_step_of_two_gpus_predicted_anew() -> None:
    anew = several_gpus_suite.anew()
    worst = max(anew, key=lambda one: abs(one.error("step_s") or 0.0))
    assert (worst.recipe.model.config, worst.recipe.compile) == ("gpt2-large", "block")
    assert worst.measured is not None
    assert worst.measured.step_times is not None
    samples = worst.measured.step_times.samples
    check(
        PAGE, r"compiled gpt2-large, is # % short; its measured steps differ by # times",
        (-100 * (worst.error("step_s") or 0.0), max(samples) / min(samples)),
    )  # fmt: skip


def test_the_sharded_recipes_of_two_gpus_were_measured_again() -> None:
    measured = several_gpus_suite.load(several_gpus_suite.FOLDER / several_gpus_suite.FILES[1])
    ids = [one.recipe_id for one in measured]
    again = [
        one
        for one in several_gpus_suite.anew()
        if ids.count(one.recipe.id) > 1 and several_gpus_suite.strategy_of(one) in ("fsdp", "hsdp")
    ]
    exact = [
        sum(several_gpus_suite.peak_error(one, name) == 0.0 for one in again)
        for name in ("allocated", "reserved")
    ]
    check(
        PAGE, r"all # recipes of FSDP2 .*? \(commit 9a80c3ca\): # of their allocated and # of their reserved",
        (len(again), *exact),
    )  # fmt: skip


def test_figures_of_fsdp2_at_speed() -> None:
    ours, usual = (one.measured for one in several_gpus_suite.fsdp2("qwen3-14b"))
    assert ours is not None
    assert usual is not None
    check(
        PAGE, r"reaches # % MFU on two H200s, # times .*? recomputed blocks \(# %\)",
        (100 * (ours.mfu or 0), (ours.tokens_per_s or 0) / (usual.tokens_per_s or 1), 100 * (usual.mfu or 0)),
    )  # fmt: skip
    shares: dict[bool, list[float]] = {False: [], True: []}
    for alone, several in several_gpus_suite.scaling_pairs():
        shares[several.recipe.parallel.copy_engines].append(100 * several_gpus_suite.scaled(alone, several))
    check(
        PAGE, r"each GPU of two reaches # to # % of the speed of one alone, and # to # % with `copy_engines`",
        [limit(some) for some in shares.values() for limit in (min, max)],
    )  # fmt: skip


def test_figures_of_scripts_on_two_gpus() -> None:
    found = [row["error"] for row in several_gpus.scripts()]
    check(PAGE, r"# scripts that know nothing of trainfit", (len(found),))
    check(PAGE, r"The largest error of the allocated peak is # %", (100 * max(map(abs, found)),))


def test_figures_of_experts() -> None:
    errors = [one.error("peak_allocated_bytes") or 0.0 for one in several_gpus_suite.measured_of("experts")]
    check(PAGE, r"the allocated peak is up to # % above the prediction", (-100 * min(errors),))
