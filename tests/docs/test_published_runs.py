"""Published runs: sourced, predicted as they are written, large errors with a cause, the page's sentences."""

import json
import subprocess
import sys
from statistics import median

from benchmarks import published_runs
from benchmarks.published_runs import FOLDER, LARGE, RESULTS, content
from benchmarks.tables.published import is_tensor
from page_claims import check

PAGE = "docs/results/accuracy.md"


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
from benchmarks.published_runs import content
from trainfit.spec.parsing.recipe_file import recipe_from
print(json.dumps({run["name"]: recipe_from(run["recipe"]).id for run in content()["runs"]}))
"""
    environment = {"TRAINFIT_CATALOG": str(FOLDER), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    rows = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]
    assert {row["name"]: row["recipe_id"] for row in rows} == json.loads(done.stdout)


def test_mpts_number_of_parameters_is_the_published_one() -> None:
    rows = {row["name"]: row["params"] for row in map(json.loads, RESULTS.read_text("utf-8").splitlines())}
    assert rows["mpt-7b-h100-8"] == 6_658_859_008
    assert rows["mpt-70b-h100-128"] == 64_862_437_376


def test_the_pages_sentences_are_those_of_the_figures() -> None:
    found = published_runs.figures()
    speed: dict[str, list[float]] = {"a100": [], "h100": [], "tensor": []}
    for one in found:
        if one.name == "tokens_per_s_per_gpu":
            kind = "tensor" if is_tensor(one) else one.run["recipe"]["hardware"]["gpu"][:4]
            speed[kind].append(100 * one.error)
    memory = [100 * one.error for one in found if one.name == "memory_gib"]
    check(PAGE, r"# runs that others published", [len(content()["runs"])])
    near = sum(abs(error) <= 100 * LARGE for error in speed["a100"])
    values = [near, len(speed["a100"]), median(speed["a100"])]
    check(PAGE, r"On A100 SXM, # of # tokens/s are within 10 %, the median error is # %", values)
    values = [min(speed["h100"]), max(speed["h100"]), median(speed["h100"])]
    check(PAGE, r"tokens/s are predicted too high, by # to # %, median # %", values)
    check(PAGE, r"With tensor parallel they are off by # and # %", speed["tensor"])
    rows = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]
    check(PAGE, r"# of the runs are predicted not to fit", [sum(not row["fits"] for row in rows)])
    check(PAGE, r"peaks of memory are predicted # to # % too high", [min(memory), max(memory)])
