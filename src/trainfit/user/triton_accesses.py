"""Find which pointer parameters a Triton kernel reads and which it writes, from its source.

A pointer parameter flows through assignments and arithmetic to ``tl.load``, ``tl.store`` and ``tl.atomic_*``,
or to a function of the kernel's module, whose source is read too. All branches count. No torch here.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

LOADS = {"load", "gather", "load_tensor_descriptor"}
STORES = {"store", "scatter", "store_tensor_descriptor"}


class Access(NamedTuple):
    """How a kernel uses a pointer."""

    reads: bool = False
    writes: bool = False

    def __or__(self, other: Any) -> "Access":
        return Access(self.reads or other.reads, self.writes or other.writes)


@cache
def accesses(fn: Callable[..., Any]) -> dict[str, Access]:
    """Return the accesses by name of a parameter; one that is not found is not a pointer, or not used.

    Args:
        fn: the Python function of a kernel.
    """
    return _accesses(fn, ())


def _accesses(fn: Any, callers: tuple[Any, ...]) -> dict[str, Access]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn))).body[0]
    except (OSError, TypeError, SyntaxError):  # Generated code
        return {name: Access(True, True) for name in inspect.signature(fn).parameters}
    assert isinstance(tree, ast.FunctionDef)
    names = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
    found = _Kernel(fn, names, (*callers, fn))
    for _ in range(2):  # A loop's body may use names that it assigns later.
        for statement in tree.body:
            found.visit(statement)
    return found.accesses


class _Kernel(ast.NodeVisitor):
    """Follows the pointers of one function."""

    def __init__(self, fn: Any, names: list[str], callers: tuple[Any, ...]):
        self._callers = callers
        self._scope = {**fn.__globals__, **inspect.getclosurevars(fn).nonlocals}
        self._pointers: dict[str, set[str]] = {name: {name} for name in names}
        """Name of a variable -> the parameters that it may point to."""
        self.accesses: dict[str, Access] = {}

    def _add(self, parameters: set[str], access: Access) -> None:
        for name in parameters:
            self.accesses[name] = self.accesses.get(name, Access()) | access

    def _pointed(self, node: ast.AST | None) -> set[str]:
        """Return the parameters that an expression may point to; a loaded value points to none."""
        if node is None:
            return set()
        if isinstance(node, ast.Name):
            return self._pointers.get(node.id, set())
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Compare):
            return set()
        return {name for child in ast.iter_child_nodes(node) for name in self._pointed(child)}

    def _called(self, node: ast.Call) -> set[str]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_method = isinstance(node.func, ast.Attribute) and bool(self._pointed(node.func.value))
        operands = [*node.args, *(keyword.value for keyword in node.keywords)]
        target = node.func.value if is_method and isinstance(node.func, ast.Attribute) else None
        if target is None and operands:
            target = operands[0]
        for operand in operands:
            self._pointed(operand)  # Loads inside the operands
        if name in LOADS:
            self._add(self._pointed(target), Access(reads=True))
            return set()
        if name in STORES:
            self._add(self._pointed(target), Access(writes=True))
            return set()
        if name.startswith("atomic_"):
            self._add(self._pointed(target), Access(reads=True, writes=True))
            return set()
        callee = self._resolve(node.func)
        if callee is not None:
            self._enter(callee, node)
            return set()
        return {pointer for operand in operands for pointer in self._pointed(operand)}

    def _resolve(self, node: ast.AST) -> Any:
        """Return the Python function of a called kernel function, None for others (``tl.exp``)."""
        if isinstance(node, ast.Name):
            value = self._scope.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            value = getattr(self._scope.get(node.value.id), node.attr, None)
        else:
            return None
        fn = getattr(value, "fn", None)
        while fn is not None and not inspect.isfunction(fn):
            fn = getattr(fn, "fn", None)
        is_library = getattr(fn, "__module__", "").partition(".")[0] == "triton"
        return None if fn is None or is_library else fn

    def _enter(self, callee: Any, node: ast.Call) -> None:
        passed = {name: self._pointed(value) for name, value in zip(
            inspect.signature(callee).parameters, node.args, strict=False
        )}  # fmt: skip
        passed |= {keyword.arg: self._pointed(keyword.value) for keyword in node.keywords if keyword.arg}
        if not any(passed.values()):
            return
        if callee in self._callers:
            return
        for name, access in _accesses(callee, self._callers).items():
            self._add(passed.get(name, set()), access)

    def visit_Assign(self, node: ast.Assign) -> None:
        pointed = self._pointed(node.value)
        for target in node.targets:
            self._bind(target, node.value, pointed)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._bind(node.target, None, self._pointed(node.value) | self._pointed(node.target))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind(node.target, node.value, self._pointed(node.value))

    def visit_Expr(self, node: ast.Expr) -> None:
        self._pointed(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        self._pointed(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        self._pointed(node.test)

    def _bind(self, target: ast.AST, value: ast.AST | None, pointed: set[str]) -> None:
        if isinstance(target, ast.Name):
            self._pointers[target.id] = self._pointers.get(target.id, set()) | pointed
        elif isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) else [None] * len(target.elts)
            for part, one in zip(target.elts, values, strict=False):
                self._bind(part, one, pointed if one is None else self._pointed(one))

    def generic_visit(self, node: ast.AST) -> None:
        """Visit statements' bodies, and the expressions of their conditions."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._pointed(child)
            else:
                self.visit(child)
