"""Files that ``explain`` writes: a plot, a memory snapshot, a trace."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainfit.explanation.kinds import JSON_SUFFIXES, SNAPSHOT_SUFFIXES
from trainfit.spec.errors import InputError
from trainfit.spec.files import check_can_write

if TYPE_CHECKING:
    from trainfit.cli.explain.subjects import Subject
    from trainfit.explanation.peak import Explained

HTML = ".html"


def _title(found: "Explained") -> str:
    """Return what a plot is of, in words."""
    from trainfit.report.words import describe

    if found.recipe is not None:
        return describe(found.recipe)
    facts = found.explanation.snapshot
    return facts.file if facts else f"{found.explanation.script}, on {found.explanation.gpu}"


@dataclass(frozen=True)
class Files:
    """Files to write; None: not requested."""

    plot: Path | None = None
    snapshot: Path | None = None
    perfetto: Path | None = None

    def check(self) -> None:
        """Refuse, before long work, a file that could not be written.

        Raises:
            InputError: another format, or no such folder.
            OSError: not writable.
        """
        if self.plot is not None:
            if self.plot.suffix == HTML:
                check_can_write(self.plot, "--plot")
            else:
                from trainfit.report.plot import check_plot_file

                check_plot_file(self.plot)
        for path, option, suffixes in (
            (self.snapshot, "--snapshot", SNAPSHOT_SUFFIXES),
            (self.perfetto, "--perfetto", JSON_SUFFIXES),
        ):
            if path is None:
                continue
            if not path.name.endswith(suffixes):
                remedy = f"end its name with {' or '.join(suffixes)}"
                raise InputError("another kind of file is written", remedy, field=option, value=str(path))
            check_can_write(path, option)

    def refuse(self, subject: "Subject") -> None:
        """Refuse all files: what is explained has no ledger of a step.

        Raises:
            InputError: a file is requested.
        """
        for path, option in (
            (self.plot, "--plot"),
            (self.snapshot, "--snapshot"),
            (self.perfetto, "--perfetto"),
        ):
            if path is not None:
                problem, remedy = f"{subject.name} has no step to write", "name a recipe or a script"
                raise InputError(problem, remedy, field=option, value=str(path))

    def write(self, found: "Explained") -> None:
        """Write the files.

        Raises:
            InputError: of a snapshot, which has no times.
            OSError: a file cannot be written.
        """
        if self.plot is not None:
            from trainfit.explanation.course import course_of_explained
            from trainfit.report.memory_plot import NUM_MOMENTS, write_plot

            write_plot(course_of_explained(found, NUM_MOMENTS), self.plot, _title(found))
        if self.snapshot is not None:
            from trainfit.integrations.exporters.memory_viz import write_snapshot

            write_snapshot(found.ledger, self.snapshot, found.capacity_bytes, expandable=found.expandable)
        if self.perfetto is not None:
            from trainfit.integrations.exporters.perfetto import write_trace

            if found.machine is None:
                problem, remedy = "a memory snapshot has no kernels", "name a recipe or a script"
                raise InputError(problem, remedy, field="--perfetto", value=str(self.perfetto))
            write_trace(found.ledger, found.machine, self.perfetto)

    def notes(self) -> list[str]:
        """Return a line for each file."""
        where = {"pytorch.org/memory_viz": self.snapshot, "ui.perfetto.dev": self.perfetto}
        lines = [f"plot: {self.plot}"] * (self.plot is not None)
        return [*lines, *(f"{path}: open it with {page}" for page, path in where.items() if path)]
