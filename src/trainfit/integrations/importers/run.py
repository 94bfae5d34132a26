"""``import_config``: read files, recognise their tools, fill one draft, and build the recipe."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from trainfit.api.results import Printed
from trainfit.catalog.config_checks import check_config
from trainfit.catalog.other_files import SIZES, is_no_recipe
from trainfit.integrations.importers import models, settle
from trainfit.integrations.importers.base import Draft, Importer, Reading
from trainfit.integrations.importers.registry import importer, importers, recognised
from trainfit.integrations.importers.source import Source, read
from trainfit.spec.errors import InputError
from trainfit.spec.imported import ConfigFile, Imported
from trainfit.spec.optional import is_installed
from trainfit.spec.parsing.recipe_file import apply_settings, written
from trainfit.spec.parsing.synonyms import written_out
from trainfit.spec.recipe import Recipe

MAX_FILES = 16
MODEL_OPTION = "--model"
File = str | os.PathLike[str]


class ImportedConfig(Printed, Imported):
    """A recipe made of other tools' files; ``str`` is what ``trainfit import`` prints."""

    def written(self) -> str:
        """Return the text of the recipe's file."""
        return written(self.recipe)

    def _print(self, out: Console) -> None:
        from trainfit.report.imported_text import show

        show(self, out=out)


def import_config(
    path: File, *more: File, model: File | None = None, tool: str | None = None,
    gpu: str | None = None, count: int | None = None, set: Sequence[str] = (),
) -> ImportedConfig:  # fmt: skip
    """Return the recipe of another tool's configuration, with an account of every field in it.

    Args:
        path: a file of axolotl, LLaMA-Factory, torchtune, torchtitan, transformers' TrainingArguments (JSON,
            YAML or a script), TRL, PEFT, DeepSpeed or accelerate; of a Python file also ``FILE.py:FUNCTION``.
        more: further files of the same run, such as a DeepSpeed JSON.
        model: a catalog or Hub name, or a config.json, in place of what the files name.
        tool: the tool of the first file, where its fields do not tell.
        gpu: GPU of the recipe.
        count: number of GPUs.
        set: fields set on the recipe, such as ``["batch.seq=4096"]``.

    Raises:
        InputError: a file that is refused, a model that is not known; one line.
        OSError: a file cannot be read.
    """
    settings = [*set]
    settings += [] if gpu is None else [f"hardware.gpu={gpu}"]
    settings += [] if count is None else [f"hardware.count={count}"]
    paths = [os.fspath(one) for one in (path, *more)]
    return imported(paths, settings, None if model is None else os.fspath(model), tool)


def predictable(recipe: Recipe) -> tuple[Recipe, str]:
    """Return the recipe, or the nearest one without libraries that are missing, and a line that says so."""
    changed: dict[str, Any] = {}
    missing: dict[str, str] = {}
    name, base = recipe.optimizer.name, recipe.base
    package = "torchao" if name.startswith("torchao") else "bitsandbytes"
    nearest = settle.NEAREST["optimizer.name"].get(name)
    if nearest is not None and not is_installed(package):
        changed["optimizer"] = recipe.optimizer.model_copy(update={"name": nearest[0]})
        missing["optimizer.name"] = package
    library = getattr(base, "library", "trainfit")
    if base is not None and library != "trainfit" and not is_installed(library):
        changed["quantize"] = base.model_copy(update={"library": "trainfit"})
        missing["quantize.library"] = library
    if not missing:
        return recipe, ""
    packages = " and ".join(dict.fromkeys(missing.values()))
    note = f"{packages} is missing here, so trainfit's own states and layout are predicted"
    return recipe.model_copy(update=changed), f"{note}: {', '.join(missing)}"


def on_one_gpu(
    found: ImportedConfig, paths: Sequence[str], settings: Sequence[str], model: str | None, tool: str | None
) -> ImportedConfig | None:
    """Return the files' recipe for one GPU, where only that keeps in host memory what they keep there."""
    hardware = found.recipe.hardware
    if hardware.count == 1:
        return None
    others = [one for one in settings if not one.startswith(("hardware", "parallel"))]
    try:
        alone = imported(paths, [*others, f"hardware.gpu={hardware.gpu}", "hardware.count=1"], model, tool)
    except InputError:  # What the files share over GPUs is not for one.
        return None
    return None if alone.recipe.offload == found.recipe.offload else alone


def imported(
    paths: Sequence[str], settings: Sequence[str] = (), model: str | None = None, tool: str | None = None
) -> ImportedConfig:
    """Return the recipe of the files; ``settings`` as the command line has them (``a.b=c``)."""
    if len(paths) > MAX_FILES:
        raise InputError(f"{len(paths)} files", f"name at most {MAX_FILES}", field="FILE")
    sources: list[Source] = []
    config: str | None = model
    for one in paths:
        source = read(one)
        if is_no_recipe(source.values) and source.values.keys() & SIZES and len(paths) > 1:
            config = config or source.path
        else:
            sources.append(source)
    if not sources:
        raise InputError("only a model's config is given", "name a tool's file, too", file=paths[0])
    chosen = _chosen(sources, tool)
    draft = Draft(
        count=_count_in(settings), first=sources[0].path, tools=frozenset(one[1].name for one in chosen)
    )
    files: list[ConfigFile] = []
    queue = sorted(chosen, key=lambda entry: entry[1].order)
    while queue:
        source, reader, because = queue.pop(0)
        files.append(ConfigFile(path=source.path, tool=reader.name, because=because))
        reader.read(Reading(source, draft, source.values))
        for referred, name in draft.referred:
            if len(files) + len(queue) < MAX_FILES:
                queue.append((referred, importers()[name], (f"its name in {Path(source.path).name}",)))
        draft.referred = []
    _model(draft, config, chosen[0][0], is_option=model is not None)
    settle.settle(draft)
    try:
        recipe = settle.build(draft, list(settings))
    except InputError as error:
        raise error.in_file(sources[0].path) from error.__cause__
    lists: dict[str, Any] = {
        name: tuple(getattr(draft, name)) for name in ("taken", "without", "unread", "blank")
    }
    listed = {one.name for one in (*draft.taken, *draft.without, *draft.unread)} | {*draft.blank}
    lists["idle"] = tuple(dict.fromkeys(name for name in draft.idle if name not in listed))
    lists["assumed"] = tuple(one for one in draft.assumed if not _is_set(one.field, settings))
    return ImportedConfig(files=tuple(files), recipe=recipe, **lists)


def _chosen(sources: list[Source], tool: str | None) -> list[tuple[Source, Importer, tuple[str, ...]]]:
    """Return each file with its importer and the fields that decided; two of one tool are refused."""
    chosen: list[tuple[Source, Importer, tuple[str, ...]]] = []
    for index, source in enumerate(sources):
        reader, because = (importer(tool), ()) if tool and index == 0 else recognised(source)
        others = [one for one in chosen if one[1].name == reader.name or (one[1].alone and reader.alone)]
        if others:
            problem = f"{reader.title}, and {others[0][0].path} is {others[0][1].title}"
            raise InputError(problem, "import them one by one", file=source.path)
        chosen.append((source, reader, because))
    return chosen


def _count_in(settings: Sequence[str]) -> int | None:
    """Return the number of GPUs that a setting names, also on the GPU's name; None: none does."""
    hardware = written_out(apply_settings({}, list(settings))).get("hardware")
    count = hardware.get("count") if isinstance(hardware, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def _is_set(field: str, settings: Sequence[str]) -> bool:
    keys = [setting.partition("=")[0].strip() for setting in settings]
    return bool(field) and any(f"{field}.".startswith(f"{key}.") for key in keys)


def _model(draft: Draft, config: str | None, first: Source, *, is_option: bool) -> None:
    """Set the model: the option's, a config.json among the files, or the one that a file names."""
    if config is not None:
        found = models.find(config, Path())
        if found is None:
            field = MODEL_OPTION if is_option else "model.config"
            raise models.unknown(config, field, "")
        draft.set("model.config", found.config)
        if "model" in draft.facts and draft.facts["model"].is_stated:
            name = draft.facts["model"].name
            draft.taken = [one for one in draft.taken if one.field != "model.config"]
            draft.leave(name, draft.facts["model"].given, (), f"{config} takes its place")
        return
    if draft.value("model.config") is not None:  # An inline config, such as torchtitan's debug model.
        check_config(draft.data["model"]["config"])
        return
    fact = draft.facts.get("model")
    if fact is None:
        problem = "no file names a model"
        raise InputError(problem, models.REMEDY, field=MODEL_OPTION, file=first.path)
    found = models.find(str(fact.value), first.folder)
    if found is None:
        raise models.unknown(str(fact.given), fact.name, first.path)
    draft.take(fact.name, fact.given, "model.config", found.config, found.note)
    weights = models.weights_of(str(fact.value), first.folder)
    if weights is not None and not draft.fact("starts_random"):
        draft.take(fact.name, fact.given, "model.weights", weights, "trained weights, for train")
