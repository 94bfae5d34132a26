"""Find code that evaluates or generates in the source of what is traced. No torch here.

A trace ends after a few steps, before most loops evaluate. Where the source has such code and no step
reached it, the trace goes on for a while (user/steps.py).
"""

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAMES = frozenset(
    """
    evaluate evaluation estimate_loss validate validation validation_step eval_step test_step eval_dataset
    eval_dataloader eval_loader val_dataset val_dataloader val_dataloaders val_loader eval_strategy
    evaluation_strategy eval_steps eval_interval eval_iters eval_every inference_mode generate
    """.split()
)
"""Of functions, methods, variables and arguments."""
WITHOUT_GRAD = ("no_grad", "inference_mode")
MODELS = ("model", "net", "network", "module", "policy", "forward")
INITIALIZES = ("init", "_init", "update", "ema")
"""Beginnings of names of functions that run without gradients and evaluate nothing."""
NO = "no"
"""Value of an argument that switches evaluation off."""


def evaluates_at(step: Callable[..., Any]) -> str:
    """Return the place of the first code that evaluates, such as ``train.py:12``; empty: none is seen.

    Args:
        step: the traced callable; its ``script`` attribute is the file that it runs, if it runs one.
    """
    while isinstance(step, functools.partial):
        step = step.func
    script: Path | None = getattr(step, "script", None)
    try:
        if script is not None:
            name, source, first = script.name, script.read_text(errors="replace"), 1
        else:
            lines, first = inspect.getsourcelines(step)
            name, source = Path(inspect.getsourcefile(step) or "").name, textwrap.dedent("".join(lines))
        found = min(_lines(ast.parse(source)), default=None)
    except (OSError, TypeError, SyntaxError, ValueError):  # Built-in, or without its source.
        return ""
    return "" if found is None else f"{name}:{found + max(first, 1) - 1}"


def _lines(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        found = False
        if isinstance(node, ast.keyword):
            is_off = isinstance(node.value, ast.Constant) and node.value.value in (NO, None, False)
            if node.arg in NAMES and not is_off:
                yield node.value.lineno
        elif isinstance(node, ast.Attribute):
            found = node.attr in NAMES
        elif isinstance(node, ast.Name):
            found = node.id in NAMES
        elif isinstance(node, ast.FunctionDef):
            found = node.name in NAMES or _calls_a_model(node, node.decorator_list)
        elif isinstance(node, ast.With):
            found = _calls_a_model(node, [item.context_expr for item in node.items])
        if found:
            yield getattr(node, "lineno", 0)


def _calls_a_model(node: ast.AST, contexts: list[ast.expr]) -> bool:
    """Return whether code without gradients calls what may be a model: a name, or an attribute of MODELS."""
    names = [each.attr for one in contexts for each in ast.walk(one) if isinstance(each, ast.Attribute)]
    if not any(name in WITHOUT_GRAD for name in names):
        return False
    called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(
        one.attr in MODELS
        if isinstance(one, ast.Attribute)
        else isinstance(one, ast.Name)
        and not hasattr(builtins, one.id)
        and not one.id.startswith(INITIALIZES)
        for one in called
    )
