"""Questions of the page as values, and the functions that answer them.

A question is made of a request by ``question_of``, which refuses bad ones, and is sent as JSON to the process
that traces. ``answer`` runs there, or in the server where every ledger is kept.
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, JsonValue

from trainfit.prediction import cache as ledgers
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.parsing.recipe_file import flat
from trainfit.spec.recipe import Recipe
from trainfit.spec.value import Value
from trainfit.web import answers
from trainfit.web.limits import recipe_of

Kind = Literal["predict", "course", "advice", "plan"]
QUICK = ("predict", "course")
"""Kinds that the server itself answers where the ledger is kept."""


class Request(Value):
    """The content of a request; ``recipe`` is a recipe's or a config.json's content, checked apart."""

    recipe: dict[str, JsonValue]


class PlanRequest(Request):
    """A search for the fastest recipe.

    Attributes:
        tune: which weights train, as ``trainfit plan --tune``; None: as the recipe says.
        keep_quality: exclude what changes the numerics.
        fixed: fields that stay as they are, by dotted names.
        memory_gib: of each GPU that may be used; None: all.
    """

    tune: Literal["full", "lora", "qlora"] | None = None
    keep_quality: bool = False
    fixed: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    memory_gib: Annotated[float, Field(gt=0, le=4096)] | None = None


REQUESTS: dict[str, type[Request]] = {
    "predict": Request, "course": Request, "advice": Request, "plan": PlanRequest,
}  # fmt: skip


class Question(NamedTuple):
    """A question whose recipe is checked."""

    kind: Kind
    recipe: Recipe
    options: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name under which the answer is kept."""
        fields = sorted(_set_fields(self.recipe))
        return answers.key(self.kind, [self.recipe.content(), fields, self.options])

    def as_json(self) -> dict[str, Any]:
        """Return what ``question_of`` makes the same question of."""
        recipe = self.recipe.model_dump(mode="json", exclude_unset=True)
        return {"kind": self.kind, "request": {"recipe": recipe, **self.options}}


def question_of(kind: str, content: Any) -> Question:
    """Return the question of a request.

    Raises:
        InputError: no such question, or wrong content.
    """
    if kind not in REQUESTS:
        raise InputError("no such question", f"ask one of {', '.join(REQUESTS)}", value=kind)
    request = parse(REQUESTS[kind], content)
    recipe, notes = recipe_of(request.recipe)
    options = request.model_dump(mode="json", exclude={"recipe"})
    if kind == "plan":
        _check_fixed(options["fixed"], recipe)
    return Question(kind, recipe, options, tuple(notes))  # type: ignore[arg-type]


def answer(question: Question, say: answers.Say = lambda text: None) -> dict[str, Any]:
    """Answer a question; ``answers.keep`` keeps the answer by the question's key.

    Raises:
        InputError: the recipe cannot work.
        NotKeptError: within ``only_kept``, a ledger that it needs is not kept.
    """
    found = ANSWERS[question.kind](question, say)
    if question.notes:
        found["notes"] = [*question.notes, *found.get("notes", [])]
    return found


class Quick(NamedTuple):
    """An answer without a trace."""

    content: dict[str, Any]
    is_kept: bool
    """False: it was made of kept ledgers."""


def quick_answer(question: Question) -> Quick | None:
    """Return the answer without a trace and without torch; None: something must be traced.

    Raises:
        InputError: the recipe cannot work.
    """
    found = answers.kept(question.key)
    if found is not None:
        return Quick(found, is_kept=True)
    if question.kind not in QUICK or question.recipe.has_open_fields:
        return None
    try:
        with ledgers.only_kept():
            return Quick(answer(question), is_kept=False)
    except ledgers.NotKeptError:
        return None


def prepare(recipe: dict[str, Any]) -> None:
    """Import and read what answers need, so that the first one need not wait for it."""
    question = question_of("predict", {"recipe": recipe})
    with suppress(ledgers.NotKeptError), ledgers.only_kept():
        ANSWERS["predict"](question, lambda text: None)
    answers.kept(question.key)
    gc.collect()
    gc.freeze()  # What is imported and read stays: no collection during an answer needs to visit it.


def _plan(question: Question, say: answers.Say) -> dict[str, Any]:
    options = {**question.options}
    fixed = list(options.pop("fixed"))
    return answers.plan(question.recipe, options, fixed, say)


ANSWERS: dict[str, Callable[[Question, answers.Say], dict[str, Any]]] = {
    "predict": lambda question, say: answers.prediction(question.recipe),
    "course": lambda question, say: answers.course(question.recipe),
    "advice": lambda question, say: answers.advice(question.recipe, say),
    "plan": _plan,
}


def _check_fixed(fixed: list[str], recipe: Recipe) -> None:
    known = flat(recipe.content())
    sections = {name.rpartition(".")[0] for name in known} | {name.partition(".")[0] for name in known}
    for name in fixed:
        if name not in known and name not in sections:
            raise InputError("no field of a recipe", "leave it out", field="fixed", value=name)


def _set_fields(recipe: Recipe) -> set[str]:
    """Return the fields that were given: words about what is assumed depend on them."""
    return set(flat(recipe.model_dump(mode="json", exclude_unset=True)))
