"""A slot: a process that runs one trial after another, each a copy of itself. ``python -m trainfit.sweeps.slot ROLE DEVICE``.

It imports torch, transformers and peft once and does not touch CUDA, so a trial starts in milliseconds instead of
seconds (where CUDA does not work in a copy, each trial is a new interpreter). Enters: a PartRequest a line on standard
input. Leaves: ``ready``, then a PartResult a line on standard output. Its end, by SIGTERM too, ends its trial.
"""

import importlib
import json
import os
import signal
import sys
from typing import Any

from trainfit.measurement.lifeline import die_with_parent
from trainfit.spec.value import parse
from trainfit.sweeps.parts import PartRequest, Starter, run_part

READY = "ready"
IMPORTS = {
    "predict": ("trainfit.prediction.estimate", "trainfit.prediction.trace"),
    "device": ("trainfit.measurement.meter", "trainfit.training.loop"),
}
"""What the trials of each role would otherwise import one by one."""


def main(role: str, device: str) -> int:
    """Serve until standard input ends."""
    die_with_parent()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The sweep hears it, and ends this process in order.
    # What libraries print must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start = _starter(role, device)
    answers.write(READY + "\n")
    for line in iter(sys.stdin.readline, ""):
        request = parse(PartRequest, json.loads(line))
        answers.write(run_part(request, start).model_dump_json() + "\n")
    return 0


def _starter(role: str, device: str) -> Starter:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that importing leaves CUDA untouched
    from trainfit.measurement.suite import ready_to_fork

    for module in IMPORTS[role]:
        importlib.import_module(module)
    start: Any = ready_to_fork("cpu" if role == "predict" else device)
    return start


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # run_to_end ends its trial's group on the way out


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
