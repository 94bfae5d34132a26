"""Load the catalog: GPUs, links, models and shipped recipes, by name.

Rows come from the data files of this folder and of the folder that TRAINFIT_CATALOG names. An unknown name is
an InputError that lists near names, never a guess.
"""

import copy
import difflib
import functools
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import JsonValue

from trainfit.catalog import names
from trainfit.catalog.config_checks import check_config
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import DeviceMemory, Gpu, Link, Source, Sustained, Transfers
from trainfit.spec.parsing.parse import V, parse
from trainfit.spec.parsing.plain_data import read_config
from trainfit.spec.units import read_count
from trainfit.spec.value import Value

FOLDER = Path(__file__).parent
MAX_NAMES_LISTED = 50  # An error line that lists more names is no longer read


class ModelRow(Value):
    """One model of the catalog; ``config`` is the content of its config.json."""

    name: str
    family: str
    config: dict[str, JsonValue]
    published: str = ""
    """Parameter count as its source prints it: every digit (``1,235,814,400``) or rounded (``671B``)."""
    hub: tuple[str, ...] = ()  # Repositories on the Hub that have this shape, by which it may be named
    source: Source

    @property
    def published_params(self) -> int | None:
        """The published count as a number, rounded as its source rounds it."""
        return round(read_count(self.published)) if self.published else None


@functools.cache
def gpus() -> dict[str, Gpu]:
    """Return every accelerator of the catalog, by name, not to be changed."""
    return _parsed(Gpu, names.GPUS)


@functools.cache
def links() -> dict[str, Link]:
    """Return every link of the catalog, by name, not to be changed."""
    return _parsed(Link, names.LINKS)


def _parsed(kind: type[V], file: str) -> dict[str, V]:
    return {
        name: parse(kind, {"name": name, **row}, file=names.place(file, name))
        for name, row in names.rows(file).items()
    }


def gpu(name: str) -> Gpu:
    """Return the accelerator called ``name``, such as ``H100 80GB``; ``cpu`` is this machine."""
    known = names.gpu_name(name)
    if known == names.CPU:
        return _this_cpu()
    if (alone := names.counted(name))[1] is not None:
        remedy = f"name it as {alone[0]!r}; the number of GPUs has an option of its own"
        raise InputError("a count stands on the name", remedy, field="hardware.gpu", value=name)
    return gpus().get(known) or _unknown("hardware.gpu", name, gpus(), "accelerator", names.gpus_like(name))


def _this_cpu() -> Gpu:
    """Return this machine's CPU. Its memory is known, its peak and bandwidth are not."""
    kind, num_bytes = platform.machine(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    title = f"this machine's CPU ({kind}, {os.cpu_count()} cores)"
    source = Source(url="", accessed="now", note="read from the operating system")
    return Gpu(
        name=names.CPU, title=title, vendor="host", architecture=kind, memory_bytes=num_bytes,
        usable_bytes=num_bytes, memory_bytes_per_s=None, peak_flops_per_s={}, link="none", host_link="none",
        gpus_per_host=1, source=source,
    )  # fmt: skip


def gpu_of_device(device_name: str) -> Gpu:
    """Return the GPU that a driver calls ``device_name``, as in ``torch.cuda.get_device_name``."""
    rows = {name: row for row in gpus().values() for name in row.device_names}
    if device_name in rows:
        return rows[device_name]
    near = difflib.get_close_matches(device_name, rows, n=4, cutoff=0.5)
    known = ", ".join(f"{rows[name].name} ({name})" for name in near) or ", ".join(gpus())
    remedy = f"if it is one of these, name it with --gpu: {known}"
    problem = "no GPU of the catalog is called that by its driver"
    raise InputError(problem, remedy, field="gpu", value=device_name)


def reference(row: Gpu) -> Gpu:
    """Return the measured GPU whose columns and operations stand for those that a row lacks.

    Raises:
        InputError: ``reference`` names no row that has them itself.
    """
    return _reference(row.name, row.reference)


@functools.cache
def _reference(name: str, of: str) -> Gpu:
    measured = [row.name for row in gpus().values() if row.sustained and row.device_memory and row.transfers]
    if of not in measured:
        problem = "no row that has sustained, device_memory and transfers"
        remedy = f"name one of {', '.join(measured)}, or leave it out"
        raise InputError(problem, remedy, file=names.place(names.GPUS, name), field="reference", value=of)
    return gpus()[of]


def attention_gpu(row: Gpu) -> Gpu:
    """Return the GPU whose measured rates of attention a row takes, as shares of the dense peak."""
    of = row.attention_rates_of
    if of == row.name:
        return row
    return gpus().get(of) or _unknown("attention_rates_of", of, gpus(), "accelerator")


def sustained(row: Gpu) -> Sustained:
    """Return the shares of the data sheet that a GPU sustains: its own, else its reference's."""
    found = row.sustained or reference(row).sustained
    assert found is not None
    return found


def device_memory(row: Gpu) -> DeviceMemory:
    """Return a GPU's memory outside the caching allocator: its own, else its reference's."""
    found = row.device_memory or reference(row).device_memory
    assert found is not None
    return found


def transfers(row: Gpu) -> Transfers:
    """Return the shares of the links' rates that a GPU reaches: its own, else its reference's."""
    found = row.transfers or reference(row).transfers
    assert found is not None
    return found


def link(name: str) -> Link:
    """Return the link called ``name``, such as ``nvlink4``."""
    return links().get(name) or _unknown("link", name, links(), "link")


def models() -> dict[str, ModelRow]:
    """Return every model of the catalog, by name, with its config."""
    return {name: model(name) for name in model_names()}


def model_names() -> list[str]:
    """Return the names of the catalog's models, without reading their configs."""
    return list(names.rows(names.MODELS))


def model(name: str) -> ModelRow:
    """Return the model called ``name``, such as ``llama-3.1-8b`` or ``meta-llama/Llama-3.1-8B``."""
    known = _known_model(name)
    row = {"name": known, **names.rows(names.MODELS)[known], "config": _config(known)}
    return parse(ModelRow, row, file=names.place(names.MODELS, known))


def model_config(config: str | dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the mapping of a config.json, as data to build from; no code is loaded with it.

    Args:
        config: a name of the catalog or the Hub, a path that ends in ``.json``, or such a mapping.

    Raises:
        InputError: unknown name, or a mapping that requests remote code or has invalid sizes.
        FileNotFoundError: the path does not exist.
    """
    if isinstance(config, str) and config.endswith(".json"):
        return check_config(read_config(Path(config)), file=config)
    if isinstance(config, str):
        return copy.deepcopy(_config(_known_model(config)))
    return copy.deepcopy(check_config(config))


def recipes() -> dict[str, Path]:
    """Return the files of the shipped recipes, by name."""
    return {path.stem: path for path in sorted((FOLDER / "recipes").glob("*.yaml"))}


def _known_model(name: str) -> str:
    return names.find_model(name) or _unknown("model.config", name, model_names(), "model")


@functools.cache
def _config(name: str) -> dict[str, Any]:
    path = names.folder_of(names.MODELS, name) / "models" / f"{name}.json"
    return check_config(read_config(path), file=str(path))


def names_like(name: str, known: Iterable[str]) -> list[str]:
    """Return at most six of the ``known`` names that contain ``name`` or are spelt like it."""
    every, typed = list(known), name.rpartition("/")[2].lower()
    near = [one for one in every if typed and typed in one]
    near += [one for one in difflib.get_close_matches(typed, every, n=4, cutoff=0.5) if one not in near]
    return near[:6]


def _unknown(field: str, name: str, known: Iterable[str], noun: str, family: Sequence[str] = ()) -> NoReturn:
    every = list(known)
    remedy = f"known: {', '.join(every)}"
    if near := list(family) or names_like(name, every):
        remedy = f"did you mean {', '.join(near)}?"
    elif len(every) > MAX_NAMES_LISTED:
        remedy = f"trainfit {noun}s lists the {len(every)} that are known"
    raise InputError(f"no {noun} of that name", remedy, field=field, value=name)
