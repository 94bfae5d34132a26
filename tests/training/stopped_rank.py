"""A rank of a run on two CPUs that stops itself (SIGSTOP): rank ``STOPPED``, at the point ``POINT``."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import rank_training
from tiny_training import options_for
from trainfit.training import session
from trainfit.training.loop import train
from trainfit.training.ranks import exchange, watch


def stop() -> None:
    if os.environ["RANK"] == os.environ["STOPPED"]:
        print("stopped", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def before(owner: Any, name: str, condition: Any = lambda *_: True) -> None:
    """Let a rank stop itself before it calls ``owner.name``."""
    plain = getattr(owner, name)

    def stopping(*arguments: Any, **options: Any) -> Any:
        if condition(*arguments):
            stop()
        return plain(*arguments, **options)

    setattr(owner, name, stopping)


def main(out: Path) -> None:
    watch.STOPPED_S = 1.0
    point = os.environ["POINT"]
    if point == "join":
        before(exchange, "process_group")
    elif point == "last checkpoint":
        before(session.Session, "_save", lambda one: one.progress.step == 2)
    elif point == "last checkpoint written":
        before(session.Session, "_report", lambda one, event, *_: event == "on_checkpoint")
    elif point == "summary":
        before(session.Session, "_report", lambda one, event, *_: event == "on_end")
    elif point == "end":
        before(watch.Watch, "finish")
    elif point == "leave":
        before(watch.Watch, "leave")
    elif point == "group":
        before(dist, "destroy_process_group")
    train(rank_training.recipe_of("fsdp"), options_for(out, 2, hang_timeout_s=60.0))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
