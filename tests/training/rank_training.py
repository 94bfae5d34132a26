"""Training runs on each process of ``rank_processes.Ranks``."""

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tiny_training import GPT2, LLAMA, Listener, options_for, tiny
from trainfit.spec.recipe import Recipe
from trainfit.training import session
from trainfit.training.log import JsonlLog
from trainfit.training.loop import train

DROPOUT = ("attention=eager",)


def recipe_of(strategy: str | None, *settings: str, dropout: bool = False) -> Recipe:
    """A tiny recipe on two GPUs; ``strategy`` None: on one, with as many sequences a step."""
    ranks = ("hardware.count=2", f"parallel.strategy={strategy}") if strategy else ("batch.accumulate=2",)
    more = (*ranks, "hardware.gpu=h200", "batch.micro=2", *settings)
    return tiny(*more, *DROPOUT, config=GPT2) if dropout else tiny(*more, config=LLAMA)


def trained(
    out: Path, strategy: str | None, steps: int, *settings: str, dropout: bool = False,
    signal_at: int | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train, and return what this rank had; ``signal_at``: the step in which rank 1 alone gets SIGTERM."""
    listener = Listener()
    plain = session.Session._one_step

    def signalled(self: session.Session, *arguments: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == 1 and self.progress.step + 1 == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *arguments)

    session.Session._one_step = signalled  # pyright: ignore[reportAttributeAccessIssue]
    try:
        recipe = recipe_of(strategy, *settings, dropout=dropout)
        summary = train(recipe, options_for(out, steps, **more), observers=[listener, JsonlLog()])
    finally:
        session.Session._one_step = plain
    return {
        "status": summary.status, "message": summary.message, "losses": summary.losses,
        "perplexity": summary.eval_perplexity, "events": listener.events, "steps": summary.steps,
        "tokens_per_step": summary.run.tokens_per_step, "notes": summary.run.notes,
        "epochs": [metrics.epoch for metrics in listener.steps],
    }  # fmt: skip


def on_a_full_disk(out: Path) -> str:
    """Train until a checkpoint whose shards rank 1 cannot write; return the error."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(metrics: Any) -> None:
        pass

    plain = session.Session._save

    def save(self: session.Session) -> None:
        if dist.get_rank() == 1 and self.progress.step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        plain(self)

    session.Session._save = save
    try:
        train(recipe_of("fsdp"), options_for(out, 6, save_every=2), observers=[Listener(limit)])
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        session.Session._save = plain
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""
