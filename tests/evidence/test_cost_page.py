"""The guide's figures of published budgets are those of the table, whose recipes are predicted as written."""

from evidence.scripts.tables import budgets
from page_claims import check

PAGE = "docs/guide/cost.md"


def test_the_implied_mfu_and_the_unexplained_hours_are_those_of_the_table() -> None:
    found = budgets.rows()
    shares = [one.mfu * 100 for one, _ in found]
    check(PAGE, r"MFU of # % \(8B\), # % \(70B\) and # % \(405B\)", shares)
    check(PAGE, r"tokens are #T, and #T for", [found[0][0].tokens / 1e12, found[2][0].tokens / 1e12])
    one, row = found[0]
    check(PAGE, r"does not explain: # for 8B", [one.gpu_hours / row["gpu_hours"]])


def test_the_predictions_are_of_the_recipes_as_they_are_written() -> None:
    for one, row in budgets.rows():
        assert budgets.recipe_of(one).id == row["recipe_id"]
        tokens_per_s = one.tokens / row["run_s"]
        assert abs(row["gpu_hours"] / (one.tokens / tokens_per_s * row["num_gpus"] / 3600) - 1) < 1e-9
