"""Calls in a Python file as data: keyword arguments that are literals. The file is parsed, never executed.

A call becomes a mapping: its keyword arguments, the called name under ``()``, positional arguments under
``*``. A name stands for its value where it is assigned one literal only. What is no literal becomes a
``NotLiteral``.
"""

import ast
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainfit.spec.errors import InputError

CALLEE, POSITIONAL = "()", "*"
MAX_TEXT = 60
MAX_CALL_DEPTH = 16
MAX_FUNCTION_DEPTH = 8
MAX_EXPONENT = 64
MAX_NUMBER = 2**63
"""Largest result of arithmetic: a number that is squared line by line would fill the memory."""
MAX_ITEMS = 10_000
"""Largest value that a name stands for: a list that holds the one before it twice doubles line by line."""


@dataclass(frozen=True)
class NotLiteral:
    """An expression whose value is only known when the file runs."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call: the dotted name of what is called, its line, and its arguments."""

    name: str
    line: int
    values: Mapping[str, Any] = field(default_factory=dict)


def calls_in(code: str, file: str) -> tuple[Call, ...]:
    """Return the calls of dotted names with keyword arguments, or with text as the first argument.

    Raises:
        InputError: not Python.
    """
    tree = _parsed(code, file)
    scope = _Scope(tree)
    return tuple(_calls(tree, scope))


def configs_in(code: str, file: str, part: str) -> Mapping[str, Any]:
    """Return the configuration that the function ``part`` returns, or that ``default_config`` is.

    Without a part, a file with one such function is read; one with several, or none, gives an empty mapping.
    """
    tree = _parsed(code, file)
    scope = _Scope(tree)
    if part and not part.isdecimal():
        if part not in scope.functions:
            known = ", ".join(scope.functions) or "none"
            raise InputError(f"no function of that name; known: {known}", "name one", file=file, value=part)
        return _as_config(scope.returned(part))
    if found := _as_config(scope.constants.get("default_config")):
        return found
    returned = {name: _as_config(scope.returned(name)) for name in scope.functions}
    configs = [config for config in returned.values() if config]
    return configs[0] if len(configs) == 1 else {}


def config_functions(code: str, file: str) -> list[str]:
    """Return the names of functions that return a configuration."""
    scope = _Scope(_parsed(code, file))
    return [name for name in scope.functions if _as_config(scope.returned(name))]


def _as_config(value: Any) -> Mapping[str, Any]:
    """Return a mapping that came of a call such as ``Trainer.Config(...)``, else an empty one."""
    is_config = isinstance(value, dict) and str(value.get(CALLEE, "")).endswith("Config")
    return value if is_config else {}


def _parsed(code: str, file: str) -> ast.Module:
    try:
        return ast.parse(code)
    except SyntaxError as error:
        raise InputError(f"not Python: {error.msg} at line {error.lineno}", "correct it", file=file) from None
    except (ValueError, RecursionError, MemoryError):  # A NUL, or brackets nested by the thousand.
        raise InputError("not Python that can be read", "correct it", file=file) from None


def _calls(tree: ast.Module, scope: "_Scope") -> Iterator[Call]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (name := _dotted(node.func)) is None:
            continue
        first = node.args[0] if node.args else None
        is_text = isinstance(first, ast.Constant | ast.Name) and isinstance(scope.value(first), str)
        if node.keywords or is_text:
            yield Call(name, node.lineno, scope.value(node))


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join((node.id, *reversed(parts)))


class _Scope:
    """Names of a module that stand for literals, and its functions."""

    def __init__(self, tree: ast.Module):
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._returned: dict[str, Any] = {}
        self.constants: dict[str, Any] = {}
        several: set[str] = set()
        for node in ast.walk(tree):
            for name, expression in _assigned(node):
                value = self.value(expression)
                if name in self.constants and self.constants[name] != value:
                    several.add(name)
                self.constants[name] = value
        for name in several:
            self.constants[name] = NotLiteral(name)

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression as data."""
        if depth > MAX_CALL_DEPTH:
            return _unread(node)
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str | int | float | None) else _unread(node)
        if isinstance(node, ast.Name):
            found = self.constants.get(node.id, NotLiteral(node.id))
            return found if _is_small(found) else NotLiteral(node.id)
        if isinstance(node, ast.Attribute):
            return _dotted(node) if (_dotted(node) or "").startswith("torch.") else _unread(node)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            found = [self.value(one, depth + 1) for one in node.elts]
            return _unread(node) if any(isinstance(one, NotLiteral) for one in found) else found
        if isinstance(node, ast.Dict):
            return self._mapping(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.UnaryOp | ast.BinOp):
            return self._number(node, depth)
        return _unread(node)

    def _mapping(self, node: ast.Dict, depth: int) -> Any:
        keys = [one.value if isinstance(one, ast.Constant) else None for one in node.keys]
        if not all(isinstance(key, str) for key in keys):
            return _unread(node)
        return {str(key): self.value(one, depth + 1) for key, one in zip(keys, node.values, strict=True)}

    def _call(self, node: ast.Call, depth: int) -> Any:
        name = _dotted(node.func)
        if name is None:
            return _unread(node)
        values: dict[str, Any] = {} if name == "dict" else {CALLEE: name}
        if node.args:
            values[POSITIONAL] = [self.value(one, depth + 1) for one in node.args]
        for one in node.keywords:
            key = one.arg or f"**{ast.unparse(one.value)[:MAX_TEXT]}"
            values[key] = self.value(one.value, depth + 1) if one.arg else _unread(one.value)
        return values

    def _number(self, node: ast.UnaryOp | ast.BinOp, depth: int) -> Any:
        """Return the value of arithmetic with numbers, such as ``8 * 2048``."""
        parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        found = [self.value(one, depth + 1) for one in parts]
        if any(isinstance(one, bool) or not isinstance(one, int | float) for one in found):
            return _unread(node)
        try:
            result = self._computed(node, found)
        except OverflowError:
            return _unread(node)
        return result if isinstance(result, NotLiteral) or abs(result) <= MAX_NUMBER else _unread(node)

    @staticmethod
    def _computed(node: ast.UnaryOp | ast.BinOp, found: list[Any]) -> Any:
        match node.op, found:
            case ast.USub(), [a]:
                return -a
            case ast.Mult(), [a, b]:
                return a * b
            case ast.Add(), [a, b]:
                return a + b
            case ast.Sub(), [a, b]:
                return a - b
            case ast.Div(), [a, b] if b:
                return a / b
            case ast.FloorDiv(), [a, b] if b:
                return a // b
            case ast.Pow(), [int() as a, int() as b] if 0 <= b <= MAX_EXPONENT and abs(a) <= MAX_EXPONENT:
                return a**b
        return _unread(node)

    def returned(self, function: str, depth: int = 0) -> Any:
        """Return what a function of the module returns, as data: a call, or one that it then changes."""
        if function not in self._returned and depth <= MAX_FUNCTION_DEPTH:
            self._returned[function] = None  # What calls itself returns nothing that can be read.
            self._returned[function] = self._last_value(function, depth)
        return copy.deepcopy(self._returned.get(function))

    def _last_value(self, function: str, depth: int) -> Any:
        local: dict[str, Any] = {}
        for node in self.functions[function].body:
            if isinstance(node, ast.Return) and node.value is not None:
                return self._in_function(node.value, local, depth)
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            target, value = node.targets[0], self._in_function(node.value, local, depth)
            if isinstance(target, ast.Name):
                local[target.id] = value
            elif isinstance(target, ast.Attribute) and (name := _dotted(target)) is not None:
                _set_field(local, name.split("."), value)
        return None

    def _in_function(self, node: ast.expr, local: dict[str, Any], depth: int) -> Any:
        if isinstance(node, ast.Name) and node.id in local:  # A copy: a field of it may be set to itself.
            return copy.deepcopy(local[node.id]) if _is_small(local[node.id]) else NotLiteral(node.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            return self.returned(node.func.id, depth + 1)
        outer, self.constants = self.constants, {**self.constants, **local}
        try:
            return self.value(node)
        finally:
            self.constants = outer


def _is_small(value: Any) -> bool:
    """Return whether a value has at most ``MAX_ITEMS`` parts, one that it has twice counted twice."""
    left, parts = MAX_ITEMS, [value]
    while parts and left > 0:
        left -= 1
        one = parts.pop()
        if isinstance(one, dict | list):
            left -= len(one)
            parts += one.values() if isinstance(one, dict) else one
    return left > 0


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement assigns one expression to."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name) and node.value:
        yield node.target.id, node.value


def _set_field(local: dict[str, Any], parts: list[str], value: Any) -> None:
    """Set ``config.training.steps``; a field of something unknown is left out."""
    found: Any = local
    for part in parts[:-1]:
        if not isinstance(found, dict):
            return
        found = found.setdefault(part, {})
    if isinstance(found, dict):
        found[parts[-1]] = value


def _unread(node: ast.expr) -> NotLiteral:
    try:
        text = " ".join(ast.unparse(node).split())
    except RecursionError:
        text = type(node).__name__
    return NotLiteral(text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}...")
