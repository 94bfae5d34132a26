"""InputError, the one error for bad input, and the exit codes."""

EXIT_BAD_INPUT = 65
"""Exit code for a bad recipe, config or data (EX_DATAERR in sysexits.h)."""
EXIT_IO = 74
"""Exit code where a file cannot be read or written, such as on a full disk (EX_IOERR)."""
EXIT_STOPPED = 75
"""Exit code of work that was stopped early and can be resumed (EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 130
"""Exit code of work that Ctrl-C ended and that has nothing to resume, as shells give it."""
EXIT_TERMINATED = 143
"""The same for SIGTERM."""


class InputError(ValueError):
    """Bad input, reported in one line: file, dotted field (``batch.micro``), value, problem and remedy."""

    def __init__(self, problem: str, remedy: str, *, field: str = "", value: object = None, file: str = ""):
        self.problem, self.remedy, self.field, self.value, self.file = problem, remedy, field, value, file
        shown = "" if value is None else f" = {_short(value)}"
        where = ": ".join(part for part in (file, f"{field}{shown}" if field else shown.strip(" =")) if part)
        problem = problem.rstrip(". ")  # Another library's sentence ends in a dot.
        text = f"{where}: {problem}; {remedy}" if where else f"{problem}; {remedy}"
        super().__init__(" ".join(text.split()))

    def in_file(self, file: str) -> "InputError":
        """The same error, naming its file."""
        file = self.file or file
        return InputError(self.problem, self.remedy, field=self.field, value=self.value, file=file)


def _short(value: object, limit: int = 60) -> str:
    try:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError):  # Python prints no whole number of more than 4300 digits.
        text = f"({type(value).__name__})"
    return text if len(text) <= limit else text[: limit - 3] + "..."
