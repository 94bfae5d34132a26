"""Perplexity on documents that training never sees. Shapes: b micro-batch, s sequence."""

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
    """Mean next-token cross-entropy of the first ``max_sequences`` held-out sequences, without dropout; None if it is not finite.

    Label smoothing and z-loss are no part of it, whatever training minimises. The first token of a sequence has no context and is not predicted. Draws from no random generator, so training
    goes on as if nothing had been evaluated.

    Args:
        stopped: asked before each micro-batch; True ends the evaluation with None.
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
                ids_bs = torch.from_numpy(corpus.sequences(np.arange(first, min(first + micro, count)))).to(
                    step.device
                )
                # Equally many tokens a sequence, so sequences are the weights.
                total += step.cross_entropy({"input_ids": ids_bs, "labels": ids_bs}).item() * len(ids_bs)
    finally:
        step.model.train()
    loss = total / count
    if not math.isfinite(loss) or loss > math.log(1e300):
        return None
    return EvalMetrics(
        step=at_step,
        loss=loss,
        perplexity=math.exp(loss),
        sequences=count,
        eval_s=time.perf_counter() - start_s,
    )
