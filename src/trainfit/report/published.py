"""The peak-memory experiment's folder: its recipes by name, and the published figures beside them. No torch here."""

import tomllib
from pathlib import Path

from trainfit.spec.errors import InputError
from trainfit.spec.recipe_file import load_recipe, read_text
from trainfit.spec.value import PositiveInt, Value, parse

NOT_ROWS = ("sweep", "separate", "pareto")
"""Files of the folder that are no recipe."""


class PublishedRow(Value):
    """One configuration as its authors measured it."""

    title: str
    peak_gib: float
    """Highest allocated, GiB of 2**30 bytes."""
    samples_per_s: float
    """Of the whole run, compiling included."""
    late_s: float
    """Seconds from step 10 to the last."""
    perplexity: float
    note: str = ""


class Published(Value):
    """The published table and where it comes from."""

    source: str
    gpu: str
    torch: str
    steps: PositiveInt
    samples_from_step_10: PositiveInt
    rows: dict[str, PublishedRow]

    def late_samples_per_s(self, name: str) -> float:
        """Samples a second of the steps from 10 on."""
        return self.samples_from_step_10 / self.rows[name].late_s


def read_published(path: Path) -> Published:
    """The figures of a ``published.toml``.

    Raises:
        InputError: not TOML, or not the figures.
        OSError: the file cannot be read.
    """
    try:
        data = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"not TOML: {error}", "correct it", file=str(path)) from None
    return parse(Published, {**data.get("conditions", {}), "rows": data.get("rows", {})}, file=str(path))


def recipe_ids(folder: Path) -> dict[str, str]:
    """Name of each row's file -> the recipe's id.

    Raises:
        InputError: a file that is no recipe.
    """
    files = sorted(path for path in folder.glob("*.yaml") if path.stem not in NOT_ROWS)
    return {path.stem: load_recipe(path).id for path in files}
