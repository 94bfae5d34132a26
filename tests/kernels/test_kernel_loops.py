"""No loop of a kernel assigns to a name the value of another that starts with the same value.

Triton (3.6, 3.7) treats such a name as constant: after ``last, tile = begin, begin``, ``last = tile`` in the
loop has no effect.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import trainfit

SOURCES = sorted(
    path
    for room in ("kernels", "optim", "bench/kernels")
    for path in (Path(trainfit.__path__[0]) / room).rglob("*.py")
)


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr, int]]:
    """Name, value and line of every assignment inside, tuples taken apart."""
    for each in ast.walk(node):
        if isinstance(each, ast.Assign):
            for target in each.targets:
                pairs = [(target, each.value)]
                if isinstance(target, ast.Tuple) and isinstance(each.value, ast.Tuple):
                    pairs = list(zip(target.elts, each.value.elts, strict=True))
                yield from ((t.id, value, each.lineno) for t, value in pairs if isinstance(t, ast.Name))


def lost(source: str) -> list[str]:
    """Names that a loop sets to another that it changes, and that begin as a bare name."""
    found = []
    for function in (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)):
        for loop in (each for each in ast.walk(function) if isinstance(each, (ast.For, ast.While))):
            names = [each for each in ast.walk(loop) if isinstance(each, ast.Name)]
            changing = {each.id for each in names if isinstance(each.ctx, ast.Store)}
            handed = {
                name
                for name, value, _ in assigned(loop)
                if isinstance(value, ast.Name) and value.id in changing
            }
            first = {
                name: value
                for name, value, line in sorted(assigned(function), key=lambda each: each[2])
                if name in handed and line < loop.lineno
            }
            found += [name for name, value in first.items() if isinstance(value, ast.Name)]
    return found


def test_a_lost_name_is_found() -> None:
    source = """
def kernel(begin, tiles):
    last_tile, tile = begin, {first}
    for step in range(tiles):
        use(last_tile)
        last_tile = tile
        tile += 1
"""
    assert lost(source.format(first="begin")) == ["last_tile"]
    assert lost(source.replace("begin, {first}", "begin - 1, begin")) == []


def test_no_kernel_loses_a_name() -> None:
    kernels = [
        path for path in SOURCES if "@gluon.jit" in path.read_text() or "@triton.jit" in path.read_text()
    ]
    assert len(kernels) > 10
    assert {path.name: names for path in kernels if (names := lost(path.read_text()))} == {}
