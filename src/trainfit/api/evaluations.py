"""``trainfit evaluate``: rewards of a policy on held-out tasks, and its games."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainfit.report.console import progress as show_progress
from trainfit.spec.recipe import Recipe

if TYPE_CHECKING:
    from trainfit.rl.evaluation import PolicyEvaluation


def lines_of(found: "PolicyEvaluation") -> list[str]:
    """Return an evaluation as lines of text."""
    where = "" if found.step is None else f" after step {found.step:,}"
    lines = [
        f"{found.environment}{where}: {found.prompts:,} held-out tasks at temperature {found.temperature:g}",
        f"  reward {found.reward:.4f} (standard deviation {found.deviation:.4f})",
    ]
    for name, mean in found.parts.items():
        lines.append(f"  {name}: mean {mean:.4f}, above 0 in {found.shares[name]:.1%}")
    lines.append(
        f"  answers of {found.tokens_mean:.1f} tokens, {found.cut_share:.1%} cut; {found.seconds:.1f} s"
    )
    if (games := found.games) is not None:
        lines += [
            f"{games.games:,} games of at most {games.limit:,} moves against a random player",
            f"  won {games.won:.1%}, drawn {games.drawn:.1%}, lost {games.lost:.1%}, of all "
            f"{games.illegal:.1%} by an illegal move",
            f"  {games.moves_median:g} moves in the median; {games.seconds:.1f} s",
        ]
    return lines


def evaluate(
    source: str,
    recipe: Recipe | None,
    *,
    prompts: int,
    games: int = 0,
    limit: int = 400,
    temperature: float | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> "PolicyEvaluation":
    """Evaluate the policy of a recipe, or of the folder of its run.

    Args:
        source: the run's folder, of which the best checkpoint is taken if it was kept, else the newest; not
            read where ``recipe`` is given.

    Raises:
        InputError: no policy, no such run, or a damaged checkpoint.
    """
    from trainfit.rl.evaluation import evaluate as run
    from trainfit.training.export.saved_run import open_saved
    from trainfit.training.folder import DATA
    from trainfit.training.options import train_options

    if recipe is None:
        saved = open_saved(Path(source), None)
        recipe, options = saved.recipe, saved.options.model_copy(update={"device": device})
        paths = saved.checkpoint, saved.folder / DATA
    else:
        options = train_options(None, recipe.data, weights=recipe.model.weights, out="(none)", device=device)
        paths = None
    with show_progress(f"building {recipe.model.display_name}") as replace:
        return run(
            recipe, options, prompts=prompts, games=games, limit=limit, temperature=temperature, saved=paths,
            on_phase=replace,
        )  # fmt: skip
