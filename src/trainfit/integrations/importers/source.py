"""Read a configuration as plain data: YAML, JSON, TOML, or the calls in a Python file, never executed."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfit.integrations.importers.calls import CALLEE, Call, calls_in, configs_in
from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import MAX_FILE_BYTES, plain, read_json, read_yaml

KINDS = "YAML, JSON, TOML or Python"
MAX_NAME_DEPTH = 3


@dataclass(frozen=True)
class Source:
    """One file: its values as a mapping, and of a Python file the calls in it.

    Attributes:
        path: as the user named it.
        part: function or line of a Python file, after a colon; empty: none was named.
        values: content of the file; of a Python file the configuration that a function returns.
        calls: of a Python file every call by name, with its keyword arguments.
    """

    path: str
    part: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()

    @property
    def folder(self) -> Path:
        return Path(self.path).parent

    def names(self) -> frozenset[str]:
        """Return the dotted names of the fields, three levels deep, and the names of called objects."""
        called = (one.name.rpartition(".")[2] for one in self.calls)
        return frozenset((*_names(self.values), *called, *(f"{one.name}()" for one in self.calls)))


def _names(values: Mapping[str, Any], prefix: str = "", depth: int = 1) -> Iterator[str]:
    for name, value in values.items():
        if name == CALLEE:
            yield f"{value}()"
            continue
        yield f"{prefix}{name}"
        if isinstance(value, Mapping) and depth < MAX_NAME_DEPTH:
            yield from _names(value, f"{prefix}{name}.", depth + 1)


def read(text: str) -> Source:
    """Return the content of a file; ``FILE.py:NAME`` names a function or line of a Python file.

    Raises:
        InputError: another kind of file, or content that is refused; one line.
        OSError: the file cannot be read.
    """
    path, part = _parted(text)
    suffix = path.suffix.lower()
    if suffix == ".py":
        code = files.read_text(path, MAX_FILE_BYTES)
        return Source(str(path), part, configs_in(code, str(path), part), calls_in(code, str(path)))
    if suffix == ".json":
        values = read_json(path)
    elif suffix == ".toml":
        values = _toml(path)
    elif suffix in (".yaml", ".yml"):
        values = read_yaml(path)
    else:
        files.read_text(path, MAX_FILE_BYTES)  # No such file, a folder or a binary file is refused first.
        remedy = "save it with the ending of its kind"
        raise InputError(f"not {KINDS} by its ending {suffix!r}", remedy, file=str(path))
    if values is None or values == {}:
        raise InputError("the file is empty", "name a configuration", file=str(path))
    if not isinstance(values, dict):
        raise InputError("not a mapping of fields", "name a configuration", file=str(path))
    return Source(str(path), part, values)


def _parted(text: str) -> tuple[Path, str]:
    """Return path and part of ``FILE.py:NAME``; a file of that whole name takes precedence."""
    if "\0" in text:
        raise InputError("not a path", "name a file", value=text)
    path, colon, part = text.rpartition(":")
    if colon and path.endswith(".py") and not Path(text).exists():
        return Path(path), part
    return Path(text), ""


def _toml(path: Path) -> Any:
    text = files.read_text(path, MAX_FILE_BYTES)
    try:
        return plain(tomllib.loads(text), str(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"not TOML: {str(error).splitlines()[0]}", "correct it", file=str(path)) from None
    except RecursionError:
        raise InputError("nested too deeply", "nest it less", file=str(path)) from None
    except ValueError:  # A whole number of more than 4300 digits.
        raise InputError("not TOML: a number is too long", "write a shorter number", file=str(path)) from None
