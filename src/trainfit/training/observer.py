"""Metrics of a training run, and the protocol of its observers (progress.py, log.py). Free of torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from trainfit.spec.errors import EXIT_BAD_INPUT
from trainfit.spec.value import Bytes, Count, Flops, Seconds, Share, Value
from trainfit.training.data.plan import RunData


class PredictedRun(Value):
    """Prediction of a run's step on the recipe's GPU, made before the run."""

    gpu: str
    num_gpus: Count = 1
    step_s: Seconds | None = None  # None: the GPU's speed is not known
    price_per_gpu_hour: float | None = None
    step_bytes: Bytes | None = None  # Peak of the step; with eval_bytes, that of the evaluation
    eval_bytes: Bytes | None = None


class StepFlops(Value):
    """FLOPs of one optimizer step (from the Estimate), and the device's dense peak for the recipe's dtype."""

    model_flops: Flops
    hardware_flops: Flops
    peak_flops_per_s: float | None = None
    predicted: PredictedRun | None = None


class RunStart(Value):
    """Facts known before the first step."""

    out: str
    model: str
    device: str
    device_type: Literal["cpu", "cuda"]
    params: Count
    trainable_params: Count
    steps: Count
    first_step: Count  # Steps already done: 0, or the resumed checkpoint's
    tokens_per_step: Count
    train_tokens: Count
    eval_tokens: Count
    tokenizer_tokens: Count
    data: RunData | None = None  # None: of a record of an older version
    predicted: PredictedRun | None = None
    resumed_from: str | None = None
    rollouts: str | None = None  # What the model's own completions answer; None: it trains on data
    notes: tuple[str, ...] = ()  # Remarks for the user, such as versions that changed since the checkpoint


def pair_fields(means: Sequence[float]) -> dict[str, float]:
    """Return fields of StepMetrics and EvalMetrics, of mean rewards (chosen, rejected) and accuracy."""
    chosen, rejected, accuracy = means
    return {
        "reward_chosen": chosen, "reward_rejected": rejected, "reward_accuracy": accuracy,
        "reward_margin": chosen - rejected,
    }  # fmt: skip


class StepMetrics(Value):
    """One optimizer step. ``step`` counts from 1, over the whole run."""

    step: Count
    loss: float  # Training loss, nats per token; with loss_terms it includes them
    learning_rate: float
    epoch: float  # Passes over the training sequences so far
    step_s: Seconds
    tokens_per_s: float
    mfu: Share | None = None
    hfu: Share | None = None
    data_wait_s: Seconds | None = None
    """Part of ``step_s`` in which the device had no work because the next batch was not read yet."""
    peak_memory_bytes: Bytes | None = None
    """Highest allocated bytes so far; on a CPU the live tensors of one step."""
    busy: Share | None = None
    """GPU utilisation by its driver; on a CPU this process's time over that of all usable cores."""
    held_back: tuple[str, ...] | None = None
    """Why the driver throttled a rank's GPU during the step (NVML's names); the speeds are then not the GPU's
    own.
    """
    gradient_norm: float | None = None  # Norm of all gradients before clipping; None without clipping
    reward: float | None = None  # Of a policy: mean reward of the completions of this update
    kl: float | None = None  # Divergence from the reference, nats a token
    clipped_share: float | None = None  # Share of tokens that the clipped loss leaves as they are
    reward_chosen: float | None = None  # Of pairs: mean of beta times the chosen answer's log-ratio
    reward_rejected: float | None = None
    reward_accuracy: Share | None = None  # Share of pairs whose chosen answer has the higher reward
    reward_margin: float | None = None  # reward_chosen - reward_rejected


class RolloutMetrics(Value):
    """One rollout: completions of prompts by the model, their rewards and log-probabilities.

    Attributes:
        step: the first step that trains on it.
        reward, deviation: mean and standard deviation over all completions.
        parts: mean of each part of the reward; ``shares``: share of completions where it is above 0.
        equal_groups: share of prompts whose completions all have one reward, from which GRPO learns nothing;
            None if a prompt has one completion.
        prompts_cut: share of prompts longer than ``max_prompt``, whose beginnings were left out.
        prompt_lengths, lengths: tokens of each prompt and completion, by the completions' numbers.
        tokens_mean, tokens_max, cut_share: lengths of the completions; share that ``max_new`` ended.
        log_difference_mean, log_difference_max: size of the difference between the log-probabilities that
            tokens had when they were sampled and those that the update's forward gives them.
        rollout_s, reward_s, scoring_s: time of each phase, of the rank that took longest.
        rollout_tokens_per_s, scoring_tokens_per_s: completion tokens, and all tokens, a second.
    """

    step: Count
    completions: Count
    reward: float
    deviation: float
    parts: dict[str, float]
    shares: dict[str, float]
    equal_groups: Share | None
    prompts_cut: Share
    prompt_lengths: tuple[Count, ...] = ()  # Empty: of an older version
    lengths: tuple[Count, ...] = ()
    prompt_tokens_mean: float
    tokens_mean: float
    tokens_max: Count
    cut_share: Share
    log_difference_mean: float
    log_difference_max: float
    rollout_s: Seconds
    reward_s: Seconds
    scoring_s: Seconds
    rollout_tokens_per_s: float
    scoring_tokens_per_s: float


class EvalMetrics(Value):
    """Evaluation after ``step`` steps: loss of held-out data, or a policy's reward of held-out prompts."""

    step: Count
    loss: float | None = None
    """Mean next-token cross-entropy, nats per token, without loss_terms; of pairs their mean loss."""
    perplexity: float | None = None  # Of text
    reward_chosen: float | None = None  # Of pairs, as of StepMetrics
    reward_rejected: float | None = None
    reward_accuracy: Share | None = None
    reward_margin: float | None = None
    reward: float | None = None
    parts: dict[str, float] | None = None  # Mean of each part of the reward
    shares: dict[str, float] | None = None  # Share of completions where it is above 0
    sequences: Count
    eval_s: Seconds

    @property
    def cost(self) -> float:
        """What the best evaluation has least of: the loss, or minus the reward."""
        if self.loss is not None:
            return self.loss
        assert self.reward is not None, "an evaluation has one of both"
        return -self.reward


class TrainSummary(Value):
    """Result of a run: the ``train`` field of a Record. Speeds and losses cover this process's steps."""

    status: Literal["done", "stopped", "diverged", "out-of-memory"]
    """stopped: by a signal, resumable; diverged: loss or weights are not finite; see ``message``."""
    message: str = ""  # Why the run ended early, and the remedy
    steps: Count  # Steps done in the whole run; first_step: before this process started
    first_step: Count
    final_loss: float | None  # Training loss of the last step; like losses, it includes loss_terms
    losses: tuple[float, ...]
    evaluations: tuple[EvalMetrics, ...]
    eval_perplexity: float | None
    eval_reward: float | None = None
    step_s: Seconds | None
    """Median without the first step and throttled steps; speeds and shares follow from it."""
    tokens_per_s: float | None
    mfu: Share | None
    hfu: Share | None
    data_wait_share: Share | None = None
    """Share of these steps' time in which the device waited for data. Records of older versions lack it."""
    peak_memory_bytes: Bytes | None
    peak_memory_is: Literal["cuda-allocated", "live-tensors"] | None
    wall_s: Seconds
    run: RunStart
    checkpoint: str | None  # Folder of the newest one
    held_back: dict[str, Count] = Field(default={})
    """Number of this process's steps during which the driver throttled a GPU, by its reason."""

    @property
    def exit_code(self) -> int:
        """0: done; 75: stopped, resumable (EX_TEMPFAIL of sysexits.h); 65: the recipe does not work here."""
        return {"done": 0, "stopped": 75}.get(self.status, EXIT_BAD_INPUT)

    def content(self) -> dict[str, Any]:
        """Return plain data, as a Record holds it."""
        return self.model_dump(mode="json")


class Observer(Protocol):
    """Callbacks of a run. An exception that one raises ends the run."""

    def on_start(self, run: RunStart) -> None: ...
    def on_step(self, metrics: StepMetrics) -> None: ...
    def on_eval(self, metrics: EvalMetrics) -> None: ...
    # Also called where it exists: on_rollout(metrics: RolloutMetrics), before the steps that train on it.
    def on_checkpoint(self, step: int, path: Path) -> None: ...
    def on_end(self, summary: TrainSummary) -> None:
        """Handle the end of the run; not called if an exception ended it."""

    def close(self) -> None:
        """Release resources; called once, last, however the run ended."""
