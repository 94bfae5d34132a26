"""Fitted numbers: each with a unit, the command that makes it, and how far off it was."""

import ast
import importlib.util
import shlex
from pathlib import Path

import pytest

import trainfit
from trainfit.catalog import constants, rates
from trainfit.catalog.fitted import FittedRow, fitted_table
from trainfit.spec.errors import InputError

ROWS = [row for file in (constants.FILE, rates.FILE) for row in fitted_table(file).rows]
ROW = 'share = {{ value = 0.5, unit = "ratio", fit = "{fit}" }}\n[fits.steps]\nof = "steps"\nerror = "2 %"\n'


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_number_says_its_unit_what_it_was_fitted_to_and_its_error(row: FittedRow) -> None:
    assert row.unit
    assert row.fit.of
    assert row.fit.error


@pytest.mark.parametrize("command", sorted({row.fit.command for row in ROWS if row.fit.command}))
def test_the_command_of_a_fit_exists(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "python":
        assert words[0] == "-m"
        assert importlib.util.find_spec(words[1]) is not None
        assert all(Path(word).is_file() for word in words if word.startswith(("evidence/records/", "tests/")))
    else:
        assert program == "trainfit"
        assert importlib.util.find_spec(f"trainfit.cli.{words[0]}") is not None


def test_every_number_is_read_by_name() -> None:
    found = constants.constants()
    for row in fitted_table(constants.FILE).rows:
        table, name = row.name.split(".")
        value = getattr(getattr(found, table), name)
        assert value == row.value or hasattr(value, "model_dump") or isinstance(value, dict | tuple)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (ROW.format(fit="unknown"), "share.fit"),
        (ROW.format(fit="steps").replace('unit = "ratio", ', ""), "share"),
        ("share = 0.5\n" + ROW.format(fit="steps").partition("\n")[2], "share"),
    ],
    ids=["fit", "unit", "number"],
)
def test_a_number_without_its_origin_is_refused(tmp_path: Path, text: str, field: str) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(InputError, match=rf"own\.toml: {field}"):
        fitted_table(tmp_path / "own.toml")


WITHOUT_FIT = {"LEAST_SAID", "HOST_BOUND", "LEAST_S", "FAR_BEHIND"}
"""What a prediction lists, when the host is said to decide, an error of rounding, when a kernel is
warned of."""


def test_the_code_of_predictions_holds_no_fitted_number() -> None:
    """Shares, seconds and ratios at the top of a module are rows of the catalog."""
    root = Path(trainfit.__file__).parent / "prediction"
    files = [*root.glob("time/*.py"), *(root / f"{name}.py" for name in ("estimate", "device_overhead"))]
    found = {
        name for file in files for node in ast.parse(file.read_text("utf-8")).body for name in _floats(node)
    }
    assert found == WITHOUT_FIT


def _floats(node: ast.stmt) -> list[str]:
    """Return the names that a statement assigns a number with a fraction to."""
    if not isinstance(node, ast.Assign):
        return []
    numbers = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
    is_fraction = any(isinstance(number, float) for number in numbers)
    return [ast.unparse(target) for target in node.targets] if is_fraction else []
