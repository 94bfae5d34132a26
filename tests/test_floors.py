"""What .importlinter cannot say: no import circle among modules, of one room or of several."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the modules that a module imports from, in functions too, and the names that it takes from them.

    Imports for annotations alone (``TYPE_CHECKING``) never run, so that they close no circle.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        else:
            yield from imports(node)


def graph(package: Path) -> dict[str, set[str]]:
    """Return the modules of a package, and which of them each one imports."""
    files: dict[str, Path] = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file

    def imported(file: Path) -> Iterator[str]:
        for module, name in imports(ast.parse(file.read_text("utf-8"))):
            yield whole if (whole := f"{module}.{name}") in files else module

    return {name: {one for one in imported(file) if one in files} - {name} for name, file in files.items()}


@pytest.mark.parametrize("package", ["src/trainfit", "evidence"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    found = graph(ROOT / package)
    assert any(found.values())
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_a_lazy_import_counts_and_one_for_annotations_does_not(tmp_path: Path) -> None:
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "low.py").write_text("def f():\n    from house.high import g\n    return g\n")
    (package / "high.py").write_text("if TYPE_CHECKING:\n    from house import low\n\ndef g(): ...\n")
    TopologicalSorter(graph(package)).prepare()
    (package / "high.py").write_text("from house import low\n")
    with pytest.raises(CycleError):
        TopologicalSorter(graph(package)).prepare()
