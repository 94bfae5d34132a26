"""Perplexity on held-out documents. Shapes: b micro-batch, s sequence."""

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from trainfit.step import Step
from trainfit.training.corpus import Corpus
from trainfit.training.observer import EvalMetrics


def evaluate(
    step: Step,
    corpus: Corpus,
    *,
    at_step: int,
    max_sequences: int,
    stopped: Callable[[], bool] = lambda: False,
) -> EvalMetrics | None:
    """Return the mean next-token cross-entropy of the first held-out sequences, without dropout.

    Label smoothing and z-loss are left out. The first token of a sequence has no context and is not
    predicted. No random numbers are drawn, so evaluating does not change the training.

    Args:
        at_step: number of training steps done.
        stopped: called before each micro-batch; True ends the evaluation.

    Returns:
        The metrics; None if ``stopped`` ended it or the loss is not finite.
    """
    count = min(max_sequences, len(corpus))
    micro = step.recipe.batch.micro
    start_s = time.perf_counter()
    step.model.eval()
    total = 0.0
    try:
        with torch.no_grad():
            for first in range(0, count, micro):
                if stopped():
                    return None
                rows = corpus.sequences(np.arange(first, min(first + micro, count)))
                ids_bs = torch.from_numpy(rows).to(step.device)
                # All sequences have equally many tokens, so each weighs the same.
                total += step.cross_entropy({"input_ids": ids_bs, "labels": ids_bs}).item() * len(ids_bs)
    finally:
        step.model.train()
    loss = total / count
    if not math.isfinite(loss) or loss > math.log(1e300):
        return None
    seconds = time.perf_counter() - start_s
    return EvalMetrics(step=at_step, loss=loss, perplexity=math.exp(loss), sequences=count, eval_s=seconds)
