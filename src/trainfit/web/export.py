"""The page as static files, with the answers to every combination of a few choices, to be hosted anywhere.

Answers are made by the functions that the server uses. The files name nothing outside their folder.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainfit.catalog import load as catalog
from trainfit.catalog.names import gpu_name, model_name
from trainfit.flops.calculators import ultrascale
from trainfit.spec.errors import InputError
from trainfit.spec.files import write_bytes
from trainfit.web import answers, calculators, form
from trainfit.web.app import files
from trainfit.web.questions import Question, answer, question_of, quick_answer
from trainfit.web.tracer import refusal

MOST_ANSWERS = 2000
TRAINED: dict[str, dict[str, Any]] = {
    "full": {"adapter": None, "quantize": None},
    "lora": {"adapter": {"kind": "lora"}, "quantize": None},
    "qlora": {"adapter": {"kind": "lora"}, "quantize": "nf4"},
}
LABELS = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA (nf4)"}


class Choices(NamedTuple):
    """Choices of the page; every combination is answered."""

    models: Sequence[str]
    gpus: Sequence[str]
    counts: Sequence[int] = (1,)
    seqs: Sequence[int] = (2048, 8192)
    batches: Sequence[int] = (1,)
    trained: Sequence[str] = ("full", "lora", "qlora")
    recompute: Sequence[str] = ("none", "full")


def export_page(folder: Path, choices: Choices, say: Callable[[str], None] = lambda text: None) -> int:
    """Write the page's files into a new or empty folder; return the number of answers.

    Args:
        say: called with what is predicted next.

    Raises:
        InputError: an unknown name, too many combinations, or a folder that holds something.
        OSError: a file cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("is not an empty folder", "name a new one", field="DIR", value=str(folder))
    axes = axes_of(choices)
    combinations = list(itertools.product(*(range(len(axis["values"])) for axis in axes)))
    if len(combinations) > MOST_ANSWERS:
        problem = f"{len(combinations):,} combinations"
        raise InputError(
            problem, f"choose at most {MOST_ANSWERS:,}: fewer models, GPUs or lengths", field="DIR"
        )
    questions = [_recipe(axes, numbers) for numbers in combinations]
    for recipe in questions:
        question_of("predict", {"recipe": recipe})  # An unknown name is refused before anything is traced.
    for inner in ("answers", "static"):
        (folder / inner).mkdir(parents=True)
    for number, (numbers, recipe) in enumerate(zip(combinations, questions, strict=True), 1):
        say(f"{number} of {len(combinations)}: {', '.join(_labels(axes, numbers))}")
        content = json.dumps(_answers(recipe), separators=(",", ":")).encode()
        write_bytes(folder / "answers" / f"{'-'.join(map(str, numbers))}.json", content)
    _write_page(folder, axes)
    return len(combinations)


def axes_of(choices: Choices) -> list[dict[str, Any]]:
    """Return the page's choices: of each its label, its fields, and the fields' values by label."""
    titles = {row.name: row.title.removeprefix("NVIDIA ") for row in catalog.gpus().values()}

    def axis(
        label: str, fields: Sequence[str], values: Sequence[tuple[str, dict[str, Any]]]
    ) -> dict[str, Any]:
        every = [{"label": name, "set": _nested(settings)} for name, settings in dict(values).items()]
        return {"label": label, "fields": list(fields), "values": every}

    def of_numbers(label: str, field: str, numbers: Sequence[int]) -> dict[str, Any]:
        return axis(label, [field], [(f"{one:,}", {field: one}) for one in numbers])

    models = [model_name(one) for one in choices.models]
    gpus = [gpu_name(one) for one in choices.gpus]
    trained = [(LABELS[one], TRAINED[one]) for one in choices.trained]
    return [
        axis("Model", ["model.config"], [(one, {"model.config": one}) for one in models]),
        axis("GPU", ["hardware.gpu"], [(titles.get(one, one), {"hardware.gpu": one}) for one in gpus]),
        of_numbers("GPUs", "hardware.count", choices.counts),
        of_numbers("Batch", "batch.micro", choices.batches),
        of_numbers("Sequence", "batch.seq", choices.seqs),
        axis("Train", ["adapter.kind", "quantize"], trained),
        axis("Recompute", ["recompute"], [(one, {"recompute": one}) for one in choices.recompute]),
    ]


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings by dotted names as nested data; None leaves the field out."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if value is not None:
            section, _, key = name.partition(".")
            found[section] = {**found.get(section, {}), key: value} if key else value
    return found


def _recipe(axes: list[dict[str, Any]], numbers: Sequence[int]) -> dict[str, Any]:
    recipe: dict[str, Any] = {}
    for axis, number in zip(axes, numbers, strict=True):
        for name, value in axis["values"][number]["set"].items():
            recipe[name] = {**recipe.get(name, {}), **value} if isinstance(value, dict) else value
    return recipe


def _labels(axes: list[dict[str, Any]], numbers: Sequence[int]) -> Iterator[str]:
    for axis, number in zip(axes, numbers, strict=True):
        if len(axis["values"]) > 1 or axis["label"] == "Model":
            yield axis["values"][number]["label"]


def _answers(recipe: dict[str, Any]) -> dict[str, Any]:
    return {kind: _answered(question_of(kind, {"recipe": recipe})) for kind in ("predict", "course")}


def _answered(question: Question) -> dict[str, Any]:
    try:
        quick = quick_answer(question)
        found = answer(question) if quick is None else quick.content
        if quick is None or not quick.is_kept:
            answers.keep(question.key, found)
        return found
    except InputError as error:
        return {"error": refusal(error)}


def _write_page(folder: Path, axes: list[dict[str, Any]]) -> None:
    contents = form.contents()
    used = {one["set"]["hardware"]["gpu"] for one in axes[1]["values"]}
    page = {
        **{name: contents[name] for name in ("version", "schema", "colors", "widget")},
        "gpus": [one for one in contents["gpus"] if one["name"] in used],
        "models": [], "recipes": {}, "main_fields": [], "oom_example": "",
        "axes": axes, "base": {}, "default": _recipe(axes, [0] * len(axes)),
        "widgets": _widgets(),
    }  # fmt: skip
    write_bytes(folder / "page.json", json.dumps(page, separators=(",", ":")).encode())
    for name, content in files().items():
        if name == "index.html":
            mark = b'<meta name="trainfit-static" content="page.json">\n'
            write_bytes(folder / name, re.sub(rb"(?=<title>)", mark, content, count=1))
        else:
            write_bytes(folder / "static" / name, content)


def _widgets() -> dict[str, Any]:
    """Return the Ultrascale calculator's numbers of each preset, with the answers to compare them with."""
    found: dict[str, Any] = {}
    for preset in (None, *ultrascale.PRESETS):
        reply = calculators.widget({} if preset is None else {"preset": preset})
        for one in reply["recipes"]:
            one["answer"] = _answered(question_of("predict", {"recipe": one["recipe"]}))
        found[preset or ""] = reply
    return found
