"""YAML and JSON files read as plain data (dict, list, str, int, float, bool, None), safely.

Enters: a path or a text. Leaves: plain data. Refused, each with one line: files over 1 MB, what is not UTF-8,
duplicate keys, aliases that expand to more than a file could say plainly, merge keys, several documents,
NaN and infinity, keys that are not text, values that JSON cannot hold.
"""

import json
import math
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError

MAX_FILE_BYTES = 1_000_000
MAX_NODES = 100_000
MAX_DEPTH = 64
MERGE_TAG = "tag:yaml.org,2002:merge"


def read_yaml(path: Path) -> Any:
    """One YAML 1.2 document as plain data.

    Raises:
        InputError: refused content.
        OSError: the file cannot be read.
    """
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, file: str = "") -> Any:
    """The one YAML 1.2 document in ``text`` as plain data; ``1e-4`` is a number, ``yes`` is text."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    yaml = YAML(typ="safe", pure=True)
    yaml.allow_duplicate_keys = False
    try:
        _check_nodes(yaml.compose(text), file)
        data = yaml.load(text)
    except InputError:
        raise
    except YAMLError as error:
        raise _yaml_error(error, file) from None
    except RecursionError:
        raise _too_deep(file) from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        # The loader's own constructors: !!int x, a date such as 2020-99-99, a number of 5000 digits.
        problem = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        long = "Exceeds the limit" in problem
        problem = "a number is too long" if long else f"a value cannot be read ({problem})"
        raise InputError(
            f"not YAML: {problem}", "write a shorter number" if long else "quote it", file=file
        ) from None
    return plain(data, file)


def read_json(path: Path) -> Any:
    """One JSON document as plain data.

    Raises:
        InputError: refused content.
        OSError: the file cannot be read.
    """
    file = str(path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in pairs:
            if key in data:
                raise InputError("duplicate key", "keep one of them", field=key, file=file)
            data[key] = value
        return data

    def no_constant(text: str) -> Any:
        raise InputError(f"{text} is not JSON", "write a finite number or null", file=file)

    try:
        data = json.loads(read_text(path), object_pairs_hook=unique, parse_constant=no_constant)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg[:1].lower()}{error.msg[1:]} at line {error.lineno}"
        raise InputError(problem, "correct it", file=file) from None
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError:  # An integer of more than 4300 digits.
        raise InputError("not JSON: a number is too long", "write a shorter number", file=file) from None
    return plain(data, file)


def read_text(path: Path) -> str:
    """The file's text, if it is at most 1 MB of UTF-8 (a byte order mark is dropped)."""
    if "\0" in str(path):
        raise InputError("not a path", "name a file", value=str(path))
    if path.is_dir():
        raise InputError("is a folder", "name a file", file=str(path))
    with path.open("rb") as stream:  # Bounded, so that a pipe or a device cannot fill memory.
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InputError(
            "the file is over 1 MB", f"at most {MAX_FILE_BYTES:,} bytes are read", file=str(path)
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError("not UTF-8 text", "save it as UTF-8", file=str(path)) from None


def plain(data: Any, file: str = "", field: str = "", depth: int = 0) -> Any:
    """``data`` if it holds only what JSON can hold: finite numbers, text, lists, and mappings with text keys."""
    if depth > MAX_DEPTH:
        raise _too_deep(file)
    if isinstance(data, dict):
        for key in data:
            if not isinstance(key, str):
                raise InputError("key is not text", "quote it", field=field or "(top)", value=key, file=file)
            plain(key, file, field or "(top)", depth + 1)
        return {
            key: plain(value, file, f"{field}.{key}".lstrip("."), depth + 1) for key, value in data.items()
        }
    if isinstance(data, list):
        return [plain(value, file, f"{field}[{index}]", depth + 1) for index, value in enumerate(data)]
    if isinstance(data, float) and not math.isfinite(data):
        raise InputError("not a finite number", "write a finite number", field=field, value=data, file=file)
    if isinstance(data, str) and any("\ud800" <= character <= "\udfff" for character in data):
        raise InputError(
            "not Unicode text (a lone surrogate)", "write the character itself", field=field, file=file
        )
    if data is None or isinstance(data, bool | int | float | str):
        return data
    problem = f"a {type(data).__name__} is not a recipe's value"
    raise InputError(problem, "write text or a number", field=field, value=str(data), file=file)


def _too_deep(file: str) -> InputError:
    return InputError("nested too deeply", f"nest at most {MAX_DEPTH} levels", file=file)


def _yaml_error(error: Any, file: str) -> InputError:
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}" if mark is not None else ""
    problem = str(getattr(error, "problem", None) or error).splitlines()[0]
    if "duplicate key" in problem:
        key = problem.partition('"')[2].partition('"')[0]
        return InputError(f"duplicate key {key!r}{where}", "keep one of them", file=file)
    if "another document" in problem:
        return InputError(f"a second document starts{where}", "keep one document a file", file=file)
    return InputError(f"not YAML: {problem}{where}", "correct it", file=file)


def _check_nodes(node: Any, file: str) -> None:
    """Count nodes as if every alias were written out, without writing it out (a 'billion laughs' file).

    Merge keys (``<<``) are refused too: YAML 1.2 has none, and ``extends`` is the one way to build on a recipe.
    """
    sizes: dict[int, int] = {}

    def size(node: Any, depth: int) -> int:
        if node is None:
            return 0
        if depth > MAX_DEPTH:
            raise _too_deep(file)
        if id(node) not in sizes:
            sizes[id(node)] = MAX_NODES + 1  # A node inside itself never ends.
            children = node.value if isinstance(node.value, list) else []
            pairs = [child for child in children if isinstance(child, tuple)]
            if any(key.tag == MERGE_TAG for key, _ in pairs):
                line = node.start_mark.line + 1
                raise InputError(
                    f"merge key '<<' at line {line}", "write the keys out, or use extends", file=file
                )
            flat = [n for child in children for n in (child if isinstance(child, tuple) else (child,))]
            sizes[id(node)] = 1 + sum(size(child, depth + 1) for child in flat)
        if sizes[id(node)] > MAX_NODES:
            raise InputError("aliases expand without end", f"write at most {MAX_NODES:,} values", file=file)
        return sizes[id(node)]

    size(node, 0)
