"""Names as people type them -> the catalog's: any case, Hub names of models, other spellings of GPUs.

A text that fits several rows stands for none, unless a row has it among its aliases. Recipes hold only the
catalog's names, so that a recipe's id does not depend on the spelling.
"""

import functools
import os
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from trainfit.spec.errors import InputError

FOLDER = Path(__file__).parent
GPUS, LINKS, MODELS, MODEL_TYPES = "gpus.toml", "links.toml", "models.toml", "model_types.toml"
COLLECTIVES = "collectives.toml"
CPU = "cpu"  # This machine's own processor, which is no row

MAKERS = frozenset("nvidia amd google intel instinct geforce tesla gpu".split())
"""Words of a GPU's name that distinguish it from no other."""
MEMORY = re.compile(r"(?<![a-z0-9.])(\d+)\s*(?:g|gb|gib)(?![a-z0-9])")
JOINED = re.compile(r"(?<=[a-z0-9])(sxm\d?|pcie|nvl)(?![a-z0-9])|(?<![a-z0-9])(?:rtx(?=\d)|tpu(?=v\d))")
"""A form factor written onto the name (h100sxm), and a series (rtx4090)."""
SIZE = re.compile(r"\d+gb")
COUNTED = (
    re.compile(r"(?P<count>\d+)\s*[x×*]\s*(?P<gpu>.+)"),
    re.compile(r"(?P<gpu>.+?)\s*[x×*:]\s*(?P<count>\d+)"),
)
"""A count written onto a GPU's name, before it (4xH100) or after it (H100 x 4, H100:4)."""


class Found(NamedTuple):
    """The row that a name stands for."""

    name: str
    is_full: bool  # The name is the row's own in another spelling, with nothing left out
    others: tuple[str, ...] = ()  # Rows that it could stand for as well


OWN_CATALOG = "TRAINFIT_CATALOG"
"""Environment variable: a folder with data files of the same names, whose rows join the catalog's."""


@functools.cache
def rows(file: str) -> dict[str, dict[str, Any]]:
    """Return the rows of one of the catalog's data files, and of one's own, not to be changed."""
    found: dict[str, dict[str, Any]] = {}
    for path in (folder / file for folder in _folders()):
        for name in _read(path).keys() & found.keys():
            problem = "the catalog has a row of this name"
            raise InputError(problem, "choose another name", field=name, file=str(path))
        found |= _read(path)
    return found


def folder_of(file: str, name: str) -> Path:
    """Return the folder whose data file holds the row ``name``: the catalog's or one's own."""
    return next(folder for folder in _folders() if name in _read(folder / file))


def place(file: str, name: str) -> str:
    """Return the file and row, as errors name them: ``gpus.toml [h200]``."""
    folder = folder_of(file, name)
    return f"{file if folder == FOLDER else folder / file} [{name}]"


def own_files() -> list[Path]:
    """Return the data files of one's own catalog, if there is one."""
    return [path for folder in _folders()[1:] for path in sorted(folder.rglob("*")) if path.is_file()]


def _folders() -> list[Path]:
    own = os.environ.get(OWN_CATALOG)
    return [FOLDER, Path(own)] if own else [FOLDER]


@functools.cache
def _read(path: Path) -> dict[str, dict[str, Any]]:
    if path.parent != FOLDER and not path.exists():
        if not path.parent.is_dir():
            remedy = f"set {OWN_CATALOG} to a folder"
            raise InputError("no such folder", remedy, field=OWN_CATALOG, value=str(path.parent))
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"cannot be read: {error}", "write TOML", file=str(path)) from None


def gpu_name(text: str) -> str:
    """Return the catalog's name of the GPU, or ``text`` itself where it stands for none or for several."""
    found = find_gpu(text)
    return text if found is None else found.name


def find_gpu(text: str) -> Found | None:
    """Return the GPU that ``text`` stands for, such as ``H100``, ``NVIDIA A100-SXM4-80GB`` or ``rtx4090``."""
    if text in rows(GPUS) or text.lower() == CPU:
        return Found(text.lower(), is_full=True)
    words = gpu_words(text)
    spellings = _gpu_spellings()
    named = [name for name, (_, full) in spellings.items() if words in full]
    if len(named) == 1:
        return Found(named[0], is_full=True)
    aliased = [name for name in spellings if words in _gpu_aliases(name)]
    # More than a size or a form factor.
    counted = aliased or any(_is_family(word) and not word.startswith("sxm") for word in words)
    fitting = [name for name, (known, _) in spellings.items() if counted and words <= known]
    bare = [name for name in fitting if gpu_words(name) <= words]
    for chosen in (aliased, bare, fitting):
        if len(chosen) == 1:
            others = tuple(name for name in fitting if name != chosen[0])
            return Found(chosen[0], is_full=chosen is not fitting and not others, others=others)
    return None


def counted(text: str) -> tuple[str, int | None]:
    """Return a GPU's name and the count written onto it; None where there is none: ``4xH100``."""
    if find_gpu(text) is None:
        for form in COUNTED:
            found = form.fullmatch(text.strip().lower())
            if found and (find_gpu(found["gpu"]) or gpus_like(found["gpu"])):
                start, end = found.span("gpu")
                return text.strip()[start:end], int(found["count"])
    return text, None


def gpu_note(text: str) -> str | None:
    """Return a line where ``text`` leaves out a detail of the chosen row, else None."""
    found = find_gpu(text)
    if found is None or found.is_full:
        return None
    title = rows(GPUS)[found.name]["title"]
    also = f"; the catalog also has {', '.join(found.others)}" if found.others else ""
    return f"hardware.gpu = {text!r} is taken as {found.name} ({title}){also}"


def gpus_like(text: str) -> list[str]:
    """Return the rows of the longest family that ``text`` names, such as all A100s for ``a100-64gb``."""
    typed = "".join(sorted(gpu_words(text), key=lambda word: text.lower().find(word)))
    families = {
        name: max((len(word) for word in gpu_words(name) if _is_family(word) and word in typed), default=0)
        for name in rows(GPUS)
    }
    longest = max(families.values(), default=0)
    return [name for name, length in families.items() if length and length == longest]


def gpu_words(text: str) -> frozenset[str]:
    """Return the distinguishing words of a GPU's name: ``NVIDIA A100-80G`` has a100 and 80gb."""
    text = JOINED.sub(lambda found: f" {found[0]} ", MEMORY.sub(r" \1gb ", text.lower()))
    return frozenset(re.findall(r"[a-z0-9.]+", text)) - MAKERS


def _is_family(word: str) -> bool:
    return any(letter.isdigit() for letter in word) and not SIZE.fullmatch(word) and len(word) > 1


@functools.cache
def _gpu_spellings() -> dict[str, tuple[frozenset[str], tuple[frozenset[str], ...]]]:
    """Return for each row every word of its names, and the words of each of its full names."""
    found = {}
    for name, row in rows(GPUS).items():
        full = tuple(gpu_words(text) for text in (name, row["title"], *row.get("device_names", ())))
        known = frozenset().union(*full, *_gpu_aliases(name), _size_words(row["memory_bytes"]))
        forms = {"sxm" for word in known if word.startswith("sxm")}
        found[name] = (known | forms, full)
    return found


@functools.cache
def _gpu_aliases(name: str) -> tuple[frozenset[str], ...]:
    return tuple(gpu_words(text) for text in rows(GPUS)[name].get("aliases", ()))


def _size_words(memory_bytes: int) -> frozenset[str]:
    """Return the size as a shop prints it: 80gb of 80 * 2**30 bytes, 141gb of 141 * 10**9."""
    for unit in (2**30, 10**9):
        if memory_bytes % unit == 0:
            return frozenset({f"{memory_bytes // unit}gb"})
    return frozenset()


def model_name(text: str) -> str:
    """Return the catalog's name of the model, or ``text`` itself where it stands for none."""
    return find_model(text) or text


def find_model(text: str) -> str | None:
    """Return the model that ``text`` stands for, such as ``GPT2``, ``llama 3.1 8b`` or ``Qwen/Qwen3-8B``."""
    return text if text in rows(MODELS) else _model_spellings().get(_model_key(text))


def _model_key(text: str) -> str:
    return re.sub(r"[\s_-]", "", text.lower())


@functools.cache
def _model_spellings() -> dict[str, str]:
    """Map folded names, Hub names with and without owner to the catalog's, where only one model has them."""
    found: dict[str, set[str]] = {}
    for name, row in rows(MODELS).items():
        hub = row.get("hub", ())
        for text in (name, *hub, *(one.partition("/")[2] for one in hub)):
            found.setdefault(_model_key(text), set()).add(name)
    return {key: names.pop() for key, names in found.items() if len(names) == 1}
