"""The fit of compile times: the constants are the fit's, and the page's figures are theirs."""

from evidence.scripts import fit_compile
from evidence.scripts.tables import compile as tables
from page_claims import check
from trainfit.catalog.constants import constants

PAGE = "evidence/pages/torch-compile.md"
ROWS = fit_compile.compilations()


def test_the_constants_are_those_of_the_fit() -> None:
    found = fit_compile.fit(ROWS)
    assert [f"{one:.3g}" for one in found] == [f"{one:.3g}" for one in tables.fitted()]


def test_the_bounds_cover_every_measured_compilation() -> None:
    found, known = fit_compile.ratios(ROWS, tables.fitted()), constants().compile
    assert known.low <= found[0] < 1.1 * known.low
    assert 0.9 * known.high < found[-1] <= known.high
    assert f"covers {len(ROWS)} of {len(ROWS)}" in known.basis


def test_the_held_out_compilations_were_not_fitted() -> None:
    kept = [row for row in ROWS if not row.held_out]
    assert len(kept) == len(ROWS) - 3
    assert fit_compile.fit(kept) == fit_compile.fit(ROWS)


def test_figures_in_sentences() -> None:
    fitted = tables.fitted()
    check(PAGE, r"The fit is # s, and # s for each kernel, and # s for a process",
          (fitted.start_s, fitted.kernel_s, fitted.process_s))  # fmt: skip
    blocks = [row for row in ROWS if row.name.endswith("block") and not row.own_process]
    alone = fitted.process_s + sum(row.seconds for row in blocks) / len(blocks)
    check(PAGE, r"A decoder block takes about # seconds in a process of its own", (alone,))
    check(PAGE, r"A whole model takes # seconds for each kernel", (fitted.kernel_s,))
