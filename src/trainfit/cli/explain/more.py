"""What ``explain`` predicts of a recipe beyond its peak: changes, and what comes later."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfit.cli import options
from trainfit.spec.errors import InputError

if TYPE_CHECKING:
    from trainfit.cli.explain.subjects import Subject
    from trainfit.explanation.peak import Explained
    from trainfit.spec.explanation import Later, Savings


@dataclass(frozen=True)
class More:
    """Options of ``explain`` that predict more than the peak."""

    changes: bool = False
    later: bool = False
    eval_batch: int | None = None
    longest: int | None = None

    def check(self, first: "Subject", second: "Subject | None") -> None:
        """Refuse these options for anything but a single recipe.

        Raises:
            InputError: naming the option.
        """
        given = {"--changes": self.changes or None, "--later": self.later or None,
                 "--eval-batch": self.eval_batch, "--longest": self.longest}  # fmt: skip
        named = [option for option, value in given.items() if value is not None]
        if named and (first.kind != "recipe" or second is not None):
            raise InputError("it needs a single recipe", "name one recipe and nothing else", field=named[0])
        for option in ("--eval-batch", "--longest"):
            if option in named and not self.later:
                raise InputError("it is part of --later", "add --later", field=option)

    def added(self, found: "Explained", *, json: bool) -> "Explained":
        """Return the explanation with the requested savings and later peaks."""
        savings = self._savings(found, json=json) if self.changes else None
        later = self._later(found, json=json) if self.later else None
        explanation = found.explanation.model_copy(update={"savings": savings, "later": later})
        return found._replace(explanation=explanation)

    def _savings(self, found: "Explained", *, json: bool) -> "Savings":
        from trainfit.planning.estimates import Estimates
        from trainfit.planning.savings import savings
        from trainfit.prediction.predict import predict
        from trainfit.report.console import progress

        recipe = found.recipe
        assert recipe is not None, "checked before"
        with options.only_json(json), progress("predicting each change") as say:
            own = predict(recipe, found.machine)
            with Estimates(processes=0) as estimates:  # This process has traced the recipe already.
                return savings(recipe, own, estimates, lambda text: say(f"predicting change {text}"))

    def _later(self, found: "Explained", *, json: bool) -> "Later":
        from trainfit.explanation.later.lengths import run_lengths
        from trainfit.explanation.later.spikes import check_longest, spikes
        from trainfit.report.console import progress
        from trainfit.spec.explanation import Later

        recipe = found.recipe
        assert recipe is not None, "checked before"
        with options.only_json(json), progress("predicting what comes later") as say:
            longest = check_longest(recipe, self.longest)
            each, notes = spikes(found, self.eval_batch, longest, lambda text: say(f"running {text}"))
            several = None
            if recipe.mesh.pipeline > 1 or recipe.hardware.gpu == "cpu":
                notes.append("varied lengths: not run for pipelines and CPUs")
            else:
                several = run_lengths(found, longest, say)
        return Later(spikes=tuple(each), lengths=several, notes=tuple(notes))
