"""A trial whose disk is full: what the process of a sweep's part then does."""

import errno
import os
from pathlib import Path

from trainfit.measurement.trial import ended_by_storage


def main(folder: Path) -> int:
    def run() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk/model")

    return ended_by_storage(run)
