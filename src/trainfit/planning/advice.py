"""The changes with which a recipe that is too large fits."""

from trainfit.planning.estimates import Estimates
from trainfit.planning.search import Goal, Key, Search
from trainfit.planning.space import OWN_FAMILY
from trainfit.spec.plan import Found
from trainfit.spec.recipe import Recipe


def changes_that_fit(recipe: Recipe, goal: Goal, estimates: Estimates, *, most: int = 3) -> list[Found]:
    """Return the recipe with one change each, of those that fit the fastest first; empty: none is enough.

    A change is another level of recomputation, a smaller micro-batch with as many more of them, or one option
    of a technique. Options that are slow to trace, and other models, are not tried.

    Args:
        goal: limits; without ``tokens_per_step`` the recipe's own tokens are kept.
        most: number of changes returned.

    Raises:
        InputError: as ``planning.search.plan``.
    """
    if goal.tokens_per_step is None:
        goal = Goal(**{**vars(goal), "tokens_per_step": recipe.batch.tokens * recipe.mesh.data_ranks})
    search = Search(recipe, goal, estimates, lambda text: None)
    micro, count = recipe.batch.micro, recipe.batch.accumulate
    own = search.space.levels[0]
    smaller = [each for each in search.batches(()) if each[0] < micro]
    keys: list[Key] = [((), level, micro, count) for level in search.space.levels[1:]]
    keys += [((), own, *each) for each in {*smaller[:1], *smaller[-1:]}]
    for option in search.space.options:
        if not option.is_slow and option.family != OWN_FAMILY:
            keys.append(((option,), own, micro, count))
    search.trace(keys)
    fitting = [one for one in search.traced.values() if search.fits(one)]
    return [search.found(one) for one in sorted(fitting, key=lambda one: -one.rate)[:most]]
