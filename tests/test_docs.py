"""The documentation is right: examples are accepted, tables name every field, links lead somewhere."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from trainfit.cli.main import app
from trainfit.spec.parsing.plain_data import parse_yaml
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.sweep import SweepFile
from trainfit.sweeps.read import read_sweep
from trainfit.techniques.registry import check

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *(ROOT / "evidence").rglob("*.md")]
)
MODEL = {"config": "llama-3.2-1b"}


def blocks(page: str) -> list[str]:
    """The YAML examples of a page."""
    return re.findall(r"^```yaml\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def fields(kind: type[BaseModel], before: str = "") -> Iterator[str]:
    """Every dotted field; of a union of kinds (``recompute``), the union's own name."""
    for name, field in kind.model_fields.items():
        inner = [field.annotation, *getattr(field.annotation, "__args__", ())]
        nested = [one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)]
        if len(nested) == 1:
            yield from fields(nested[0], f"{before}{name}.")
        else:
            yield f"{before}{name}"


def test_the_first_recipe_shows_the_defaults() -> None:
    data: dict[str, Any] = parse_yaml(blocks("reference/recipe.md")[0])
    del data["extends"], data["batch"]
    assert set(data) == set(Recipe.model_fields) - {"batch"}
    assert recipe_from(data) == recipe_from({"model": MODEL})


@pytest.mark.parametrize("text", blocks("reference/recipe.md")[1:])
def test_every_example_of_a_technique_is_accepted_and_changes_the_recipe(text: str) -> None:
    recipe = recipe_from({"model": MODEL, **parse_yaml(text)})
    assert recipe != recipe_from({"model": MODEL})
    check(recipe.without_open_fields())  # Planned first, into values that have examples of their own.


def test_the_examples_cover_what_the_recipe_has_for_techniques() -> None:
    written = "\n".join(blocks("reference/recipe.md")[1:])
    for word in ("offload", "loader", "empty_cache_every", "in_backward: block", "stochastic_rounding",
        "clip_norm", "tokens",
                 "every", "selective", "budget", "budget_gib", "layers", "quantize", "fp8", "chunked",
                 "loss: fused", "loss_terms",
                 "block_kernels"):  # fmt: skip
        assert word in written


def test_every_field_of_a_recipe_is_in_its_table() -> None:
    table = [
        line.split("|")[1]
        for line in (DOCS / "reference/recipe.md").read_text().splitlines()
        if line.startswith("|")
    ]
    named: set[str] = set()
    for cell in table:
        group = ""
        for name in re.findall(r"`([\w.]+)`", cell):
            group = name.partition(".")[0] or group
            named.add(f"{group}{name}" if name.startswith(".") else name)
    missing = {field for field in fields(Recipe) if field not in named}
    in_one_row = {"replicate", "shard", "tensor", "context", "expert", "pipeline"}
    assert missing == {f"parallel.{name}" for name in in_one_row}
    assert "parallel" in named


@pytest.mark.parametrize("text", blocks("guide/sweep.md"))
def test_every_example_of_a_sweep_is_read(text: str, tmp_path: Path) -> None:
    for name, precision in (("first", "bf16"), ("second", "fp32")):
        (tmp_path / f"{name}.yaml").write_text(f"model: {{config: gpt2}}\nprecision: {precision}\n")
    path = tmp_path / "example.yaml"
    path.write_text(text)
    sweep = read_sweep(path)
    assert len(sweep.variants) > 3
    for variant in sweep.variants:
        check(variant.recipe)


def test_every_field_and_status_of_a_sweep_is_in_its_tables() -> None:
    text = (DOCS / "guide/sweep.md").read_text()
    named = set(re.findall(r"^\| `([\w.-]+)`", text, re.MULTILINE))
    assert {field for field in SweepFile.model_fields if field != "limits"} <= named
    from trainfit.spec.result import Outcome

    statuses = Outcome.model_fields["status"].annotation.__args__  # pyright: ignore[reportOptionalMemberAccess]
    assert set(statuses) <= named


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, spelled as GitHub spells them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_an_example_in_python_imports_and_passes_is_there(page: Path) -> None:
    """Also in examples that no test runs, as their inputs are the reader's."""
    for block in re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        tree = ast.parse(block)
        imported: dict[str, Any] = {"trainfit": importlib.import_module("trainfit")}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainfit"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
                    imported[alias.asname or alias.name] = getattr(module, alias.name)
        for node in (one for one in ast.walk(tree) if isinstance(one, ast.Call)):
            name, _, attribute = ast.unparse(node.func).partition(".")
            function = imported.get(name)
            if attribute:
                function = getattr(function, attribute) if function and attribute.isidentifier() else None
            if callable(function):
                given = {one.arg: None for one in node.keywords if one.arg}
                inspect.signature(function).bind_partial(**given)


def options(command: Any) -> Iterator[str]:
    """Yield every option of a command and of those below it, without ``--help``."""
    for inner in getattr(command, "commands", {}).values():
        yield from options(inner)
    for parameter in command.params:
        yield from (name for name in parameter.opts if name.startswith("--") and name != "--help")


def test_the_command_line_reference_names_every_verb_and_option() -> None:
    root: Any = typer.main.get_command(app())
    verbs = root.commands
    text = (DOCS / "reference/cli.md").read_text()
    assert len(verbs) > 10
    for verb, command in verbs.items():
        assert re.search(rf"`{verb}\b", text), verb
        for option in options(command):
            assert re.search(rf"`[^`]*{option}\b[^`]*`", text), f"{verb} {option}"


def test_the_site_has_every_public_name_and_lists_every_page() -> None:
    listed = re.findall(
        r"^\.\. auto\w+:: (\w+)$", (DOCS / "reference/functions.rst").read_text(), re.MULTILINE
    )
    assert {*listed, "__version__"} == set(importlib.import_module("trainfit").__all__)
    index = re.findall(r"^   ([\w/.*-]+)$", (DOCS / "index.rst").read_text(), re.MULTILINE)
    for folder in ("tasks", "guide", "reference"):
        assert {f"{folder}/{page.stem}" for page in (DOCS / folder).glob("*")} <= set(index)
    readme = (DOCS / "README.md").read_text()
    for folder in ("tasks", "guide"):
        assert [
            page.name for page in (DOCS / folder).glob("*.md") if f"({folder}/{page.name})" not in readme
        ] == []
