"""The private names of torch, transformers and other libraries that trainfit patches or relies on.

One entry each (``spec/private_names.py``), in a table by the part of trainfit that relies on it. ``require``
checks the tables of a part before it is used: once for each set of installed versions, and the result is kept
beside the ledgers. A name that changed ends a prediction with one line instead of a wrong figure.
``tests/virtual/test_torch_internals.py`` finds each private name in the source that has no entry.

Checks run on a thread of their own, where no mode is entered, and see what the virtual GPU has replaced as it
was: a script's compiler is checked when the script first uses it, in the middle of a trace.
"""

import hashlib
import json
import os
import platform
import sys
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from trainfit.spec import private_names
from trainfit.spec.errors import InputError
from trainfit.spec.files import cache_folder
from trainfit.spec.optional import is_installed
from trainfit.spec.private_names import BELOW, CHECKED, FAILS, PrivateName, change
from trainfit.spec.provenance import installed_version
from trainfit.virtual.quiet_imports import silenced
from trainfit.virtual.trace.exclusive import stored

GROUPS = (
    "tracing", "operators", "models", "compiler", "ranks", "scripts", "accelerate", "bitsandbytes", "devices",
)  # fmt: skip
"""Parts of trainfit, each with a module and a table of its name here."""


@cache
def entries(group: str) -> tuple[PrivateName, ...]:
    """Return the entries of a part, also those of rooms below the virtual GPU. Imports torch."""
    table = getattr(import_module(f"{__name__}.{group}"), group.upper())
    return (*table, *BELOW.get(group, ()))


def require(*groups: str) -> None:
    """Check that the private names of some parts are as they were in the versions they were checked with.

    Raises:
        InputError: one of them changed.
    """
    for group in groups:
        if lines := _known_changes(group):
            more = f" (and {len(lines) - 1} more: trainfit --version -v)" if len(lines) > 1 else ""
            raise InputError(lines[0] + more, _remedy(lines[0]))


@cache
def _known_changes(group: str) -> list[str]:
    """Return the changed names of a part. A part found unchanged with these versions is not checked again."""
    if _kept().get(group) == []:
        return []
    lines = changes(entries(group))
    _keep({group: lines})
    return lines


def changes(checked: Iterable[PrivateName]) -> list[str]:
    """Check entries, and return a line for each that changed. Entries of missing libraries are left out.

    A call may fail because of another name that is gone, so failures come last.
    """
    found = list[tuple[bool, str]]()

    def check() -> None:
        import torch

        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # calls.py assumes it; the process waits for this thread.
        try:
            for one in checked:
                if what := _change(one):
                    found.append((FAILS in what, _line(one, what)))
        finally:
            torch.set_default_dtype(dtype)

    thread = threading.Thread(target=check, name="private names")
    with silenced(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A warning that a user turns into an error is no change.
        thread.start()
        thread.join()
    return [line for _, line in sorted(found, key=lambda each: each[0])]


def _change(one: PrivateName) -> str:
    if not is_installed(one.library):
        return ""
    try:
        return change(one, stored)
    except Exception as error:  # For example, the library's import fails
        return f"cannot be reached: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _line(one: PrivateName, what: str) -> str:
    return (
        f"{one.library} {_version(one.library)}: {one.dotted} {what}; "
        f"needed for {one.purpose}; checked with {one.library} {one.checked}"
    )


def _remedy(line: str) -> str:
    library = line.partition(" ")[0]
    return f"install {library} {CHECKED[library]}"


def _version(library: str) -> str:
    """Return a library's version, of torch with its build."""
    module = sys.modules.get(library)
    return str(getattr(module, "__version__", None) or installed_version(library))


def state() -> tuple[list[str], list[str]]:
    """Check every entry, keep the result, and describe it.

    Returns:
        Lines about versions and numbers of entries; one line for each entry that changed.
    """
    lines = {group: changes(entries(group)) for group in GROUPS}
    _keep(lines)
    table = [one for group in GROUPS for one in entries(group)]
    missing = sorted({one.library for one in table if not is_installed(one.library)})
    present = [one for one in table if one.library not in missing]
    changed = [line for group in GROUPS for line in lines[group]]
    versions = [f"{name} {_version(name)}" for name in CHECKED if name not in missing]
    about = [
        f"Python {platform.python_version()}, {', '.join(versions)}",
        f"private names of these libraries: {len(present)} entries, "
        + (f"{len(changed)} changed:" if changed else "all as in the versions they were checked with"),
    ]
    if missing:
        about.append(f"not installed: {', '.join(missing)} ({len(table) - len(present)} entries)")
    return about, changed


def explain(error: BaseException) -> str:
    """Return the line of a changed name that may have caused an unexpected error; "": none changed.

    Names that are gone fail where a module imports them, before ``require``.
    """
    if "torch" not in sys.modules or not isinstance(error, ImportError | AttributeError | TypeError):
        return ""
    for group in GROUPS:
        if lines := changes(one for one in entries(group) if one.library in sys.modules):
            return f"{lines[0]}; {_remedy(lines[0])}"
    return ""


def _file() -> Path:
    """Return the file of the results with the installed versions and this table."""
    digest = hashlib.sha256()
    for path in (Path(private_names.__file__), *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(path.read_bytes())
    # The same before and after torch is imported; differs for a torch in another environment.
    versions = [f"{name} {installed_version(name)}" for name in CHECKED]
    torch = find_spec("torch")
    place = str(torch.origin) if torch is not None else ""
    digest.update("\n".join([platform.python_version(), place, *versions]).encode())
    return cache_folder() / f"private-names-{digest.hexdigest()[:16]}.json"


def _kept() -> dict[str, list[str]]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):  # None, or a damaged one: check again.
        return {}
    return found if isinstance(found, dict) else {}


def _keep(lines: dict[str, list[str]]) -> None:
    """Keep results; a folder that cannot be written is not an error."""
    path = _file()
    partial = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(_kept() | lines))
        partial.replace(path)
