"""What ``explain`` is given, as explanations with their ledgers: recipes, scripts and memory snapshots."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainfit.cli import options
from trainfit.explanation.kinds import Kind, kind_of
from trainfit.spec import DEFAULT_GPU
from trainfit.spec.errors import InputError

if TYPE_CHECKING:
    from trainfit.explanation.peak import Explained
    from trainfit.spec.recipe import Recipe

SCRIPT_FIELDS = ("gpu", "count")
"""Fields of ``hardware`` that a script has."""


class Subject(NamedTuple):
    """An argument: its kind and its text."""

    kind: Kind
    name: str


def subjects(
    first: str, other: str | None, recipe: str | None, script: str | None
) -> tuple[Subject, Subject | None]:
    """Return what is explained, and what it is compared with.

    Raises:
        InputError: more than one to compare with.
    """
    given = {"OTHER": other, "--recipe": recipe, "--script": script}
    named = {option: text for option, text in given.items() if text is not None}
    if len(named) > 1:
        options_given = " and ".join(named)
        raise InputError(f"{options_given} both say what to compare with", "keep one of them")
    second = None
    if recipe is not None:
        second = Subject("recipe", recipe)
    elif script is not None:
        second = Subject("script", script)
    elif other is not None:
        second = Subject(kind_of(other), other)
    return Subject(kind_of(first), first), second


def explain(subject: Subject, settings: list[str], device: int | None, *, json: bool) -> "Explained":
    """Return the explanation of a recipe, a script or a snapshot.

    Raises:
        InputError: bad content, or an argument of another kind.
    """
    if subject.kind == "snapshot":
        return _snapshot(Path(subject.name), device)
    if subject.kind == "script":
        return _script(subject.name, settings, json=json)
    if subject.kind == "recipe":
        return _recipe(subject.name, settings, json=json)
    problem = f"a {subject.kind} is not compared by its memory"
    raise InputError(problem, "name a recipe, a script or a memory snapshot", value=subject.name)


def _recipe(name: str, settings: list[str], *, json: bool) -> "Explained":
    from trainfit.report.console import progress

    given = options.read_recipe(name, settings)
    with (
        options.work(name, settings, json=json, record=None),
        progress(f"explaining {given.model.display_name}: one step on the virtual GPU"),
    ):
        from trainfit.explanation.peak import explained

        return explained(planned(given))


def planned(recipe: "Recipe") -> "Recipe":
    """Return a recipe with its open fields planned; print how."""
    from trainfit.api.planned import planned as plan_fields

    built, notes = plan_fields(recipe)
    options.print_notes(notes)
    return built


def _script(command: str, settings: list[str], *, json: bool) -> "Explained":
    from trainfit.catalog.load import gpu as find_gpu
    from trainfit.cli.trace.launch import launch_of
    from trainfit.cli.trace.scripts import callable_of
    from trainfit.report.console import progress

    hardware = hardware_of(settings, "a script")
    name = hardware.get("gpu", DEFAULT_GPU)
    launch = launch_of(shlex.split(command), find_gpu(name).gpus_per_host)
    train = callable_of(launch)
    watched = progress(f"tracing {train.__qualname__} on {name}", live=False)
    with options.only_json(json), watched:
        from trainfit.explanation.peak import explained_script
        from trainfit.prediction.user_step import traced

        ranks = launch.ranks or hardware.get("count")
        return explained_script(traced(train, gpu=name, world_size=ranks, nodes=launch.nodes).code)


def hardware_of(settings: list[str], what: str) -> dict[str, Any]:
    """Return GPU and count of settings; a script or a trace has no other fields."""
    from trainfit.spec.parsing.recipe_file import apply_settings

    data = apply_settings({}, settings)
    found = data.pop("hardware", {})
    if data or set(found) - set(SCRIPT_FIELDS):
        problem, remedy = f"{what} has no fields but its GPU and count", "leave the others out"
        raise InputError(problem, remedy, field="--set", value=settings[0])
    return found


def _snapshot(path: Path, device: int | None) -> "Explained":
    from trainfit.explanation.snapshot.explain import explained_snapshot
    from trainfit.report.console import progress
    from trainfit.spec.units import MIB

    if not path.is_file():
        raise InputError("there is no such file", "name a memory snapshot of PyTorch", value=str(path))
    with progress(f"reading {path.name}") as replace:

        def advance(at: int, of: int) -> None:
            replace(
                f"reading {path.name}: {at / MIB:,.0f} of {of / MIB:,.0f} MiB"
                if at < of
                else f"replaying {path.name}"
            )

        return explained_snapshot(path, device, advance)
