"""What lies where in a run's folder. No torch here, so that a process that is ended early can say what is saved."""

import re
from pathlib import Path

RUN, LOCK, DATA, CHECKPOINTS = "run.json", ".lock", "data", "checkpoints"


def existing(folder: Path) -> list[Path]:
    """Return the finished checkpoints of ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name))


def how_to_go_on(out: Path) -> str:
    """Return what is saved in a run's folder and what goes on from it, as the end of a sentence."""
    checkpoints = existing(out / CHECKPOINTS)
    if checkpoints:
        return f"--resume goes on from {checkpoints[-1]}"
    if (out / RUN).is_file():
        return "no checkpoint had been saved: --resume begins with the first step"
    return "nothing had been saved: the same command starts again"
