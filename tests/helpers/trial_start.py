"""How tests start processes that train: as forks, which have nothing to import, where a fork can."""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch

from trainfit.measurement import process
from trainfit.virtual.forked import autograd_has_threads


def forked(folder: Path, module: str = process.TRIAL, *, own_group: bool = True) -> int:
    """Start a trial as a fork of this process; as a new interpreter where a fork could not train.

    That is so on a machine with GPUs after the first backward.
    """
    if a_fork_can_train():
        return process.forked(folder, module, own_group=own_group)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        return process.spawned(folder, module, own_group=own_group)
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def processes() -> Any:
    """Return the context of multiprocessing whose processes can run a backward: fork, or else spawn."""
    return multiprocessing.get_context("fork" if a_fork_can_train() else "spawn")


def a_fork_can_train() -> bool:
    """Return whether a fork of this process could run a backward."""
    return not torch.cuda.is_initialized() and not autograd_has_threads()
