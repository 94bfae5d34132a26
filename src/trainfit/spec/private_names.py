"""Entries for the private names of other libraries that trainfit relies on, and the check of an entry.

A private name can be removed, take other arguments or return something else in any release. Its entry says
what trainfit needs it for, which versions it was checked with, which form it has and, where a figure depends
on its result, a small call with the result that is relied on.

Imports no library by itself. ``virtual/torch_internals/`` has the entries of the virtual GPU and of the
rooms above it, and runs the checks. The entries of the rooms below the virtual GPU are here.
"""

import ctypes
import dis
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

CHECKED = {
    "torch": "2.11 to 2.13",
    "transformers": "5.17 to 5.23",
    "triton": "3.6 to 3.7",
    "torchao": "0.16 to 0.18",
    "peft": "0.20 to 0.21",
    "accelerate": "1.15",
    "bitsandbytes": "0.50",
    "safetensors": "0.8",
}
"""Library -> the versions that its entries were checked with."""
ABSENT = "absent"
"""Form of a name that some of the checked versions or builds do not have; trainfit does without it there."""
INSTANCE = "instance attribute"
"""Form of an attribute that the methods of its class set."""
GENERATED_SIGNATURES = ("($self, /)", "($self, object, /)")
"""What Python 3.13 and later give a function in C that declares no signature and takes no or one argument."""

FAILS = "fails in a small call"


@dataclass(frozen=True)
class PrivateName:
    """The entry of one private name.

    Args:
        name: module, colon, attributes: ``torch._C:_storage_Use_Count``; of a module without a colon.
        purpose: what trainfit needs it for.
        forms: what it is, as ``form_of`` returns it; several, where the checked versions differ.
        call: a small call of the object on the host; None: no figure depends on what it returns.
        result: what ``call`` returns in the checked versions.
    """

    name: str
    purpose: str
    forms: tuple[str, ...]
    call: Callable[[Any], Any] | None = None
    result: Any = None

    @property
    def dotted(self) -> str:
        """The name as Python code has it."""
        return self.name.replace(":", ".")

    @property
    def library(self) -> str:
        return self.name.partition(".")[0].partition(":")[0]

    @property
    def checked(self) -> str:
        """The versions of its library that the entry was checked with."""
        return CHECKED[self.library]


def entry(
    name: str, purpose: str, *forms: str, call: Callable[[Any], Any] | None = None, result: Any = None
) -> PrivateName:
    """Return an entry; without a form it is that of a module or class."""
    return PrivateName(name, purpose, forms or ("class" if ":" in name else "module",), call, result)


def read(owner: Any, name: str) -> Any:
    """Return an attribute as its owner stores it: a method as a function, a property as itself.

    Raises:
        AttributeError: there is none.
    """
    if not isinstance(owner, type):
        return getattr(owner, name)
    for base in owner.__mro__:
        if name in vars(base):
            return vars(base)[name]
    if any(name in vars(base).get("__annotations__", ()) or _sets(base, name) for base in owner.__mro__):
        return INSTANCE
    return getattr(owner, name)  # Of a metaclass


def _sets(kind: type, name: str) -> bool:
    """Return whether a method of the class sets an attribute of this name."""
    codes = (
        getattr(inspect.unwrap(value), "__code__", None) for value in vars(kind).values() if callable(value)
    )
    naming = (code for code in codes if code is not None and name in code.co_names)
    return any(
        step.opname == "STORE_ATTR" and step.argval == name
        for code in naming
        for step in dis.get_instructions(code)
    )


Read = Callable[[Any, str], Any]


def change(one: PrivateName, read: Read = read) -> str:
    """Return what changed since the versions that an entry was checked with, as half a sentence; "": nothing.

    Args:
        read: returns an owner's attribute as it is stored.
    """
    try:
        raw, value = _found(one.name, read)
        form = form_of(raw)
    except AttributeError:
        form = ABSENT
    except ImportError as error:
        return f"cannot be imported: {_one_line(error)}"
    if form not in one.forms:
        return "is gone" if form == ABSENT else f"is now {form}, was {' or '.join(one.forms)}"
    if one.call is None or form == ABSENT:
        return ""
    try:
        result = one.call(value)
    except Exception as error:
        return f"{FAILS}: {_one_line(error)}"
    return "" if result == one.result else f"returns {result!r} in a small call, was {one.result!r}"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _found(name: str, read: Read) -> tuple[Any, Any]:
    """Return what a name's owner stores, and what the owner's attribute is."""
    path, _, attributes = name.partition(":")
    library = importlib.import_module(path.partition(".")[0])
    if ".lib." in path:  # A symbol of a shared library
        symbol = read(_shared_library(library, path.rpartition(".")[2]), attributes)
        return symbol, symbol
    try:
        value: Any = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # Of another library
        raise AttributeError(path) from None
    raw = value
    if not attributes:
        parent, _, last = path.rpartition(".")
        raw = value = read(importlib.import_module(parent), last) if parent else value
    for part in attributes.split(".") if attributes else ():
        raw = read(value, part)
        bind = getattr(raw, "__get__", None) if isinstance(value, type) else None
        value = raw if bind is None else bind(None, value)
    return raw, value


@cache
def _shared_library(library: ModuleType, name: str) -> Any:
    folder = Path(str(library.__file__)).parent / "lib"
    for path in (folder / f"{name}.so", folder / f"{name}.dylib"):
        if path.exists():
            return ctypes.CDLL(str(path))
    raise AttributeError(name)


def form_of(stored: Any) -> str:
    """Return what an object is: the parameters of a function or operator, or its kind."""
    if isinstance(stored, staticmethod | classmethod):
        stored = stored.__func__
    stored = inspect.unwrap(stored)
    if stored is INSTANCE:
        return INSTANCE
    if isinstance(stored, ModuleType):
        return "module"
    if isinstance(stored, type):
        return "class"
    if isinstance(stored, property) or inspect.isdatadescriptor(stored):
        return "property"
    if hasattr(stored, "overloads"):
        return "; ".join(map(_overload, (getattr(stored, name) for name in _functional(stored.overloads()))))
    if type(stored).__name__ == "_FuncPtr":  # Of ctypes; whether it has a signature depends on Python.
        return "symbol"
    if not callable(stored):
        return type(stored).__name__ if isinstance(stored, bool | list | dict) else "value"
    try:
        if getattr(stored, "__text_signature__", None) in GENERATED_SIGNATURES:
            raise ValueError
        return _parameters(inspect.signature(stored))
    except ValueError:  # A function in C; pybind11 begins its docstring with its declaration.
        declared = re.match(rf"{re.escape(stored.__name__)}\((.*)\) -> ", str(stored.__doc__))
        return f"builtin ({', '.join(_names(declared[1]))})" if declared else "builtin"


def _functional(overloads: list[str]) -> list[str]:
    """Return an operator's overloads without those that write into given tensors."""
    return sorted(name for name in overloads if "out" not in name)


def _overload(operator: Any) -> str:
    """Return the names of an operator's arguments and the number of its results."""
    schema = operator._schema
    arguments = (f"{one.name}{'=' if one.has_default_value() else ''}" for one in schema.arguments)
    return f"{operator._overloadname}({', '.join(arguments)}) -> {len(schema.returns)}"


def _parameters(signature: inspect.Signature) -> str:
    """Return the names of a function's parameters; ``=`` marks those with a default."""
    parts, marked = list[str](), False
    for one in signature.parameters.values():
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        if one.kind == one.KEYWORD_ONLY and not marked:
            parts.append("*")
        marked = marked or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        parts.append(f"{star}{one.name}{'' if one.default is one.empty else '='}")
    return f"({', '.join(parts)})"


def _names(declared: str) -> list[str]:
    """Return the names in a C++ function's parameters, such as ``a: dict[int, str], b: bool``."""
    return re.findall(r"(\w+): ", declared)


# fmt: off
BELOW: dict[str, tuple[PrivateName, ...]] = {
    "tracing": (
        entry(
            "torch.optim._muon:_adjust_lr", "Muon's updates with stochastic rounding",
            "(lr, adjust_lr_fn, param_shape)",
            call=lambda adjust: round(adjust(0.1, "match_rms_adamw", (4, 9)), 6), result=0.06,
        ),
        entry(
            "torch.optim._muon:_zeropower_via_newtonschulz", "Muon's updates with stochastic rounding",
            "(grad, ns_coefficients, ns_steps, eps)",
        ),
        entry(
            "torch.amp.grad_scaler:GradScaler._unscale_grads_", "a loss scaler for fp16 gradients",
            "(self, optimizer, inv_scale, found_inf, allow_fp16)",
        ),
    ),
    "devices": (
        entry("triton._C.libtriton:ir.DESCRIPTOR_REDUCE_KIND.ADD", "adding gradients of attention", "value"),
        entry("triton.experimental.gluon.language._core:builtin", "adding gradients of attention", "(fn)"),
        entry(
            "triton.experimental.gluon.language._semantic:GluonSemantic._convert_to_ir_values",
            "adding gradients of attention", "(self, list_like, require_i64=)",
        ),
    ),
}
"""Entries of the rooms below the virtual GPU (``optim/``, ``kernels/``), by the table they belong to."""
