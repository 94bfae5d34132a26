"""Published runs: sourced, predicted as they are written, large errors with a cause, the page's sentences."""

import json
import subprocess
import sys
from statistics import median

import pytest

from evidence.scripts import published_runs
from evidence.scripts.fit_shares import GPUS, fit
from evidence.scripts.published_runs import FOLDER, LARGE, ONE_HOST, RESULTS, content, is_learned, predictions
from evidence.scripts.tables import budgets
from evidence.scripts.tables.published import held_out, kind
from page_claims import check
from trainfit.catalog.load import gpu

PAGE, COST = "evidence/pages/accuracy.md", "docs/tasks/cost.md"


def test_at_least_ten_runs_have_a_source_and_their_large_errors_a_cause() -> None:
    runs = content()["runs"]
    assert len({run["name"] for run in runs}) == len(runs) >= 10
    for run in runs:
        assert content()["sources"][run["source"]]["url"].startswith("https://")
    assert {one.run["name"] for one in published_runs.figures()} == {run["name"] for run in runs}
    for one in published_runs.figures():
        assert bool(one.cause) is (abs(one.error) > LARGE), (one.run["name"], one.name, one.error)


def test_the_predictions_are_of_the_recipes_as_they_are_written() -> None:
    """Their GPUs are rows of an own catalog, which a process reads once: another process."""
    code = """
import json
from evidence.scripts.published_runs import content
from trainfit.spec.parsing.recipe_file import recipe_from
from evidence.scripts.published_runs import RESULTS
runs = [run for file in RESULTS for run in content(file)["runs"]]
print(json.dumps({run["name"]: recipe_from(run["recipe"]).id for run in runs}))
"""
    environment = {"TRAINFIT_CATALOG": str(FOLDER), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    kept = {name: row["recipe_id"] for file in RESULTS for name, row in predictions(file).items()}
    assert kept == json.loads(done.stdout)


def test_mpts_number_of_parameters_is_the_published_one() -> None:
    assert predictions(published_runs.SEVERAL_HOSTS)["mpt-70b-h100-128"]["params"] == 64_862_437_376
    rows = predictions(ONE_HOST)
    assert all(
        rows[run["name"]]["params"] == run["params"] for run in content(ONE_HOST)["runs"] if "params" in run
    )


def test_the_pages_sentences_are_those_of_the_figures() -> None:
    found = published_runs.figures()
    speed: dict[str, list[float]] = {"A100": [], "H100": []}
    for one in found:
        if one.name != "memory_gib" and kind(one) == "FSDP":
            speed[one.run["recipe"]["hardware"]["gpu"][:4].upper()].append(100 * one.error)
    check(PAGE, r"# runs that others published", [len(content()["runs"])])
    unfit = sum(not row["fits"] for row in predictions(published_runs.SEVERAL_HOSTS).values())
    check(PAGE, r"# of the runs are predicted not to fit", [unfit])
    near = sum(abs(error) <= 100 * LARGE for error in speed["A100"])
    values = [near, len(speed["A100"]), median(speed["A100"])]
    check(PAGE, r"On A100 SXM, # of # tokens/s are within 10 %, the median error is # %", values)
    values = [min(speed["H100"]), max(speed["H100"]), median(speed["H100"])]
    check(PAGE, r"off by # to # %, median # %\.", values)


def test_held_out_runs_of_one_host_are_near_and_the_page_says_how_many() -> None:
    found = published_runs.figures(ONE_HOST)
    assert len(found) == len(content(ONE_HOST)["runs"])
    errors = held_out(found)
    near = sum(abs(error) <= LARGE for error in errors)
    assert near >= 0.8 * len(errors)
    on_a100 = [one for one in found if one.run["recipe"]["hardware"]["gpu"] in GPUS["A100"]]
    judged = held_out(on_a100)
    values = [len(found), len(errors), near, sum(abs(error) <= LARGE for error in judged), len(judged)]
    check(PAGE, r"# runs on one GPU or the GPUs of one host", values[:1])
    check(PAGE, r"of the # others, # are within 10 %. Those of A100 SXM: # of #;", values[1:])
    check(PAGE, r"were learned from # runs", [sum(is_learned(one.run["name"]) for one in on_a100)])


def test_an_a100s_shares_are_those_that_the_learned_runs_give() -> None:
    for name in GPUS["A100"]:
        shares = gpu(name).sustained
        assert shares is not None
        assert (shares.products, shares.memory) == fit(GPUS["A100"])


def test_the_page_of_gpus_says_what_shares_would_be_if_every_source_counted_alike() -> None:
    alike = fit(GPUS["A100"], by_source=True)
    check("docs/reference/gpus.md", r"published runs, which give # and # if every source counts alike", alike)
    values = [fit(GPUS["H100"], by_source=by_source).products for by_source in (False, True)]
    check("docs/reference/gpus.md", r"published runs give #, or # if every source counts alike", values)


@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "h100-sxm"])
def test_the_catalogs_bounds_hold_published_steps(name: str) -> None:
    shares = gpu(name).sustained
    assert shares is not None
    assert shares.steps is not None
    files, family = ([ONE_HOST], "A100") if name.startswith("a100") else (list(RESULTS), "H100")
    some = [
        one
        for file in files
        for one in published_runs.figures(file)
        if one.name != "memory_gib"
        and one.run["recipe"]["hardware"]["gpu"] in GPUS[family]
        and "pipeline" not in kind(one)
        and not (family == "A100" and is_learned(one.run["name"]))
    ]
    assert f" {len(some)} " in shares.steps.basis
    assert all(shares.steps.low <= 1 + one.error <= shares.steps.high for one in some)


def test_the_implied_mfu_and_the_unexplained_hours_are_those_of_the_table() -> None:
    found = budgets.rows()
    shares = [one.mfu * 100 for one, _ in found]
    check(COST, r"MFU of # % \(8B\), # % \(70B\) and # % \(405B\)", shares)
    check(COST, r"tokens are #T, and #T for", [found[0][0].tokens / 1e12, found[2][0].tokens / 1e12])
    one, row = found[0]
    check(COST, r"does not explain: # for 8B", [one.gpu_hours / row["gpu_hours"]])


def test_the_predictions_of_budgets_are_of_their_recipes() -> None:
    for one, row in budgets.rows():
        assert budgets.recipe_of(one).id == row["recipe_id"]
        tokens_per_s = one.tokens / row["run_s"]
        assert abs(row["gpu_hours"] / (one.tokens / tokens_per_s * row["num_gpus"] / 3600) - 1) < 1e-9
