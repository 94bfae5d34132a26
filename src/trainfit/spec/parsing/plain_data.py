"""Read YAML and JSON files as plain data (dict, list, str, int, float, bool, None), safely.

Refused, each with one line: irregular files, files over 1 MB, text that is not UTF-8, YAML that takes over a
second, duplicate keys, aliases that expand without end, merge keys, several documents, NaN and infinity,
numbers beyond a double's range, keys that are not text, values that JSON cannot hold.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from trainfit.spec import files
from trainfit.spec.errors import InputError

FLOAT_TAG = "__float__"
"""transformers' key of a number that JSON lacks, such as ``{"__float__": "Infinity"}``."""
MAX_FILE_BYTES = 1_000_000
MAX_NODES = 100_000
MAX_DEPTH = 64
MAX_INT_BITS = 1024
"""Whole numbers up to a double's range; from 4300 digits on Python cannot print them."""
MAX_YAML_MARKS = 20_000
"""Separators in a YAML text. The parser is written in Python: 20,000 take it a second."""
MAX_BRACKETS = 1000
"""Brackets that are open at once, also where they stand in quoted text."""
YAML_MARKS = ("\n", ",", ":", "[", "{", "?", "&", "*", "!", "- ")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
BRACKET = re.compile(r"[\[\]{}]")
MERGE_TAG = "tag:yaml.org,2002:merge"


def read_yaml(path: Path) -> Any:
    """Return a file's one YAML 1.2 document as plain data; refused content is an InputError."""
    return parse_yaml(files.read_text(path, MAX_FILE_BYTES), str(path))


def parse_yaml(text: str, file: str = "") -> Any:
    """Return the YAML 1.2 document in ``text`` as plain data; ``1e-4`` is a number, ``yes`` is text."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    _check_marks(text, file)
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_duplicate_keys = False
    try:
        node = yaml.compose(text)
        _check_nodes(node, file)
        data = None if node is None else yaml.constructor.construct_document(node)
    except InputError:
        raise
    except YAMLError as error:
        raise _yaml_error(error, file) from None
    except RecursionError:
        raise _too_deep(file) from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        # The loader's own constructors: !!int x, a date such as 2020-99-99, a number of 5000 digits.
        problem = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        if "Exceeds the limit" in problem:
            raise _too_long("not YAML: ", file) from None
        raise InputError(f"not YAML: a value cannot be read ({problem})", "quote it", file=file) from None
    return plain(data, file)


def read_config(path: Path) -> Any:
    """Return a config.json as plain data; ``Infinity`` is tagged, as transformers 5 does."""
    return read_json(path, tag_constants=True)


def read_json(path: Path, limit_bytes: int = MAX_FILE_BYTES, *, tag_constants: bool = False) -> Any:
    """Return a file's one JSON document as plain data; refused content is an InputError."""
    data = parse_json(files.read_text(path, limit_bytes), str(path), tag_constants=tag_constants)
    if _num_values(data) > MAX_NODES:
        raise InputError("too many values", f"write at most {MAX_NODES:,}", file=str(path))
    return data


def parse_json(text: str | bytes, file: str = "", *, tag_constants: bool = False) -> Any:
    """Return the one JSON document in ``text`` as plain data; refused content is an InputError.

    Args:
        tag_constants: ``Infinity`` becomes ``{FLOAT_TAG: "Infinity"}``; else it is refused, as ``NaN`` is.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in pairs:
            if key in data:
                raise InputError("duplicate key", "keep one of them", field=key, file=file)
            data[key] = value
        return data

    def constant(text: str) -> Any:
        if tag_constants and text != "NaN":
            return {FLOAT_TAG: text}
        raise InputError(f"{text} is not JSON", "write a finite number or null", file=file)

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg[:1].lower()}{error.msg[1:]} at line {error.lineno}"
        raise InputError(problem, "correct it", file=file) from None
    except UnicodeDecodeError:
        raise InputError("not UTF-8 text", "save it as UTF-8", file=file) from None
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError:  # An integer of more than 4300 digits.
        raise _too_long("not JSON: ", file) from None
    return plain(data, file)


def plain(data: Any, file: str = "", field: str = "", depth: int = 0) -> Any:
    """Return ``data`` if it is JSON: finite numbers, text, lists, and mappings with text keys."""
    if depth > MAX_DEPTH:
        raise _too_deep(file)
    if isinstance(data, dict):
        for key in data:
            if not isinstance(key, str):
                raise InputError("key is not text", "quote it", field=field or "(top)", value=key, file=file)
            plain(key, file, field or "(top)", depth + 1)
        at = f"{field}." if field else ""
        return {key: plain(value, file, f"{at}{key}", depth + 1) for key, value in data.items()}
    if isinstance(data, list):
        return [plain(value, file, f"{field}[{index}]", depth + 1) for index, value in enumerate(data)]
    if isinstance(data, int) and data.bit_length() > MAX_INT_BITS:
        raise _too_long("", file, field)
    if isinstance(data, float) and not math.isfinite(data):
        raise InputError("not a finite number", "write a finite number", field=field, value=data, file=file)
    if isinstance(data, str) and not data.isascii() and LONE_SURROGATE.search(data):
        problem = "not Unicode text (a lone surrogate)"
        raise InputError(problem, "write the character itself", field=field, file=file)
    if data is not None and not isinstance(data, bool | int | float | str):
        problem = f"a {type(data).__name__} is not a recipe's value"
        raise InputError(problem, "write text or a number", field=field, value=str(data), file=file)
    return data


def _num_values(data: Any) -> int:
    """Count the values in lists and mappings, these as one each."""
    if isinstance(data, dict | list):
        return 1 + sum(map(_num_values, data.values() if isinstance(data, dict) else data))
    return 1


def _too_deep(file: str) -> InputError:
    return InputError("nested too deeply", f"nest at most {MAX_DEPTH} levels", file=file)


def _too_long(which: str, file: str, field: str = "") -> InputError:
    return InputError(f"{which}a number is too long", "write a shorter number", field=field, file=file)


def _check_marks(text: str, file: str) -> None:
    """Refuse, before it is parsed, a text that the parser would work on for long; comments take no time."""
    uncommented = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    if sum(uncommented.count(mark) for mark in YAML_MARKS) > MAX_YAML_MARKS:
        remedy = f"write at most {MAX_YAML_MARKS:,} lines, commas and colons together, or name a JSON file"
        raise InputError("too many values for a YAML file", remedy, file=file)
    depth = 0
    for found in BRACKET.finditer(text):  # The parser's time grows with the square of the depth.
        depth += 1 if found[0] in "[{" else -1
        if depth > MAX_BRACKETS:
            raise _too_deep(file)


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
    """Count nodes as if every alias were written out, which stops a 'billion laughs' file; refuse merge keys.

    YAML 1.2 has no merge keys (``<<``); ``extends`` is the way to build on a recipe.
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
            if children and isinstance(children[0], tuple):  # Pairs of key and value.
                if any(key.tag == MERGE_TAG for key, _ in children):
                    problem = f"merge key '<<' at line {node.start_mark.line + 1}"
                    raise InputError(problem, "write the keys out, or use extends", file=file)
                children = [child for pair in children for child in pair]
            sizes[id(node)] = 1 + sum(size(child, depth + 1) for child in children)
        if sizes[id(node)] > MAX_NODES:
            raise InputError("aliases expand without end", f"write at most {MAX_NODES:,} values", file=file)
        return sizes[id(node)]

    size(node, 0)
