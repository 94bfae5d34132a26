"""What the page is made of: the recipe's JSON schema with descriptions, the catalog's names, examples.

The page draws a control for every field from the schema, so a new field of the recipe needs no line here.
"""

import ast
import inspect
import re
import textwrap
from typing import Any

from pydantic import BaseModel

import trainfit
from trainfit.catalog import load as catalog
from trainfit.catalog import names
from trainfit.flops.calculators import ultrascale
from trainfit.report.plot import CATEGORY_COLORS
from trainfit.spec import data, objective, quantize, recipe, recompute
from trainfit.spec.parsing.plain_data import read_yaml
from trainfit.spec.recipe import Recipe
from trainfit.web.limits import MAX_BODY_BYTES

DEFAULT: dict[str, Any] = {
    "model": {"config": "llama-3.1-8b"},
    "batch": {"micro": 1, "seq": 4096},
    "precision": "bf16",
    "recompute": "full",
    "optimizer": {"name": "adamw"},
    "hardware": {"gpu": "h100-sxm", "count": 1},
}
"""The recipe that the page opens with."""
MAIN_FIELDS = (
    "hardware.gpu", "hardware.count", "batch.micro", "batch.seq", "batch.accumulate", "precision",
    "recompute", "optimizer.name",
)  # fmt: skip
"""Fields whose controls stand above the others; ``model`` and what is trained stand before them."""
EXAMPLES: dict[str, dict[str, Any]] = {
    "Every": {"every": 2}, "Budget": {"budget": 0.5}, "BudgetGib": {"budget_gib": 60.0},
    "Layers": {"layers": ["full"]}, "Selective": {"selective": {"save": ["mm", "attention"]}},
}  # fmt: skip
"""First values of kinds whose required fields have no values of their own."""
ROOMS = (recipe, data, objective, quantize, recompute)
OOM_EXAMPLE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.18 GiB of which 1.31 GiB is free. Including non-PyTorch memory, this process has 77.86 GiB memory in "
    "use. Of the allocated memory 71.02 GiB is allocated by PyTorch, and 6.11 GiB is reserved by PyTorch but "
    "unallocated."
)
_ATTRIBUTE = re.compile(r"^    (?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n        .*)*)", re.MULTILINE)


def contents() -> dict[str, Any]:
    """Return all that the page is made of."""
    return {
        "version": trainfit.__version__,
        "schema": schema(),
        "main_fields": list(MAIN_FIELDS),
        "default": DEFAULT,
        "models": _models(),
        "recipes": {name: read_yaml(path) for name, path in catalog.recipes().items()},
        "gpus": _gpus(),
        "colors": CATEGORY_COLORS,
        "widget": {
            "opened": ultrascale.OPENED.model_dump(),
            "presets": {name: spec.model_dump() for name, spec in ultrascale.PRESETS.items()},
            "schema": ultrascale.WidgetSpec.model_json_schema(),
        },
        "oom_example": OOM_EXAMPLE,
        "max_body_bytes": MAX_BODY_BYTES,
    }


def schema() -> dict[str, Any]:
    """Return the recipe's JSON schema, each field with its description where its source has one."""
    found = Recipe.model_json_schema()
    kinds = {
        name: kind
        for room in ROOMS
        for name, kind in vars(room).items()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }
    for name, part in found["$defs"].items():
        if name in kinds:
            _describe(part, kinds[name])
        if name in EXAMPLES:
            part["examples"] = [EXAMPLES[name]]
    _describe(found, Recipe)
    return found


def _describe(part: dict[str, Any], kind: type[BaseModel]) -> None:
    """Add descriptions to the properties of an object's schema, and keep its own to its first line."""
    known = descriptions(kind)
    for name, field in part.get("properties", {}).items():
        if name in known and "description" not in field:
            field["description"] = known[name]
    part["description"] = part.get("description", "").partition("\n")[0]


def descriptions(kind: type[BaseModel]) -> dict[str, str]:
    """Return the descriptions of a value's fields: from its docstring, and from below or after each."""
    source = textwrap.dedent(inspect.getsource(kind))
    (made,) = ast.parse(source).body
    assert isinstance(made, ast.ClassDef)
    lines, found = source.splitlines(), {}
    for one, after in zip(made.body, [*made.body[1:], None], strict=True):
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        below = after.value if isinstance(after, ast.Expr) else None
        if isinstance(below, ast.Constant) and isinstance(below.value, str):
            found[one.target.id] = _plain(below.value)
        elif (trailing := _comment(lines, one)) is not None:
            found[one.target.id] = _plain(trailing)
    attributes = (ast.get_docstring(made) or "").partition("Attributes:")[2]
    for match in _ATTRIBUTE.finditer(attributes):
        for name in match["names"].split(", "):
            found[name] = _plain(match["text"])
    return found


def _comment(lines: list[str], node: ast.AnnAssign) -> str | None:
    """Return the comment at the end of a field's line, if it is one for readers."""
    line = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset :]
    _, hash, text = line.partition("#")
    return text.strip() if hash and not text.strip().startswith(("fmt:", "noqa", "type:")) else None


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "").split())


def _models() -> list[dict[str, Any]]:
    rows = names.rows(names.MODELS)
    return [
        {"name": name, "family": row.get("family", ""), "published": row.get("published", ""),
         "hub": list(row.get("hub", ()))}
        for name, row in rows.items()
    ]  # fmt: skip


def _gpus() -> list[dict[str, Any]]:
    return [
        {
            "name": row.name, "title": row.title, "vendor": row.vendor, "architecture": row.architecture,
            "memory_bytes": row.usable_bytes, "price_per_hour": row.price_per_hour, "basis": row.basis,
        }
        for row in catalog.gpus().values()
        if row.basis != "accounted"
    ]  # fmt: skip
