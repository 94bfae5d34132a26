"""A worker process that runs one trial after another, each in a fork: ``main(role, device)``.

It imports torch, transformers and peft once and does not touch CUDA, so a trial starts in milliseconds
instead of seconds (where CUDA does not work in a copy, each trial is a new interpreter). Enters: a
PartRequest a line on standard input. Leaves: ``ready``, then a PartResult a line on standard output. Its end,
by SIGTERM too, ends its trial.
"""

import importlib
import json
import os
import signal
import sys
import time

from trainfit.measurement.lifeline import die_with_parent
from trainfit.measurement.process import forked, spawned
from trainfit.measurement.trial import import_for_steps
from trainfit.spec.printable import say
from trainfit.spec.value import parse
from trainfit.sweeps.parts import PartRequest, Starter, run_part

READY = "ready"
IMPORTS = {
    "predict": ("trainfit.prediction.estimate", "trainfit.prediction.trace"),
    "device": ("trainfit.measurement.meter", "trainfit.training.loop"),
}
"""Modules that the trials of each role would otherwise import one by one."""


def main(role: str, device: str) -> int:
    """Serve until standard input ends."""
    die_with_parent()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The sweep handles it and ends this process.
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
    for module in IMPORTS[role]:
        importlib.import_module(module)
    return ready_to_fork("cpu" if role == "predict" else device)


def ready_to_fork(device: str) -> Starter:
    """Import what trials need; return ``forked`` if a fork can use CUDA, else ``spawned``."""
    start_s = time.monotonic()
    import torch

    import_for_steps()  # Once for all copies, which otherwise take seconds each.
    if "peft" not in sys.modules:
        say("peft cannot be imported: recipes with an adapter will be refused")
    can = not torch.cuda.is_initialized() and (device == "cpu" or _copy_can_use_cuda())
    say(f"imports took {time.monotonic() - start_s:.1f} s; trials start by {'fork' if can else 'spawn'}")
    return forked if can else spawned


def _copy_can_use_cuda() -> bool:
    """Return whether a forked child can create a CUDA context, or torch has no CUDA at all."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return True
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if torch.cuda.is_available():
                torch.zeros(1, device="cuda")
            code = 0
        except RuntimeError as error:
            say(f"CUDA does not work in a copy of this process: {error}", err=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # run_to_end ends its trial's group on the way out
