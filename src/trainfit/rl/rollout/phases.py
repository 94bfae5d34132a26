"""Generation and scoring with the model of a training step.

A policy's loop has three phases. *Rollout*: with all weights gathered, prompts are read (``prefill``) and
tokens appended (``decode``), by a ``Generator`` or one call at a time. *Scoring*: ``Step.token_logs`` of the
model and of its reference. *Update*: the step. Each function here takes fake tensors too, but for the
generator, which reads which sequences have ended.

Under FSDP2 the weights are gathered once a rollout, in the forward's dtype, and freed after it: gathering
them for each token would take longer than the token, and a rollout comes when no gradients, activations or
logits are held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.kernels.determinism import deterministic_kernels
from trainfit.models.native.decoder import NativeDecoder
from trainfit.rl.rollout import forward
from trainfit.rl.rollout.cache import KVCache
from trainfit.rl.rollout.generate import Generator, Sampling
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.step import Step

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def policy_of(recipe: Recipe) -> Policy:
    """Return the recipe's objective, a policy's."""
    assert isinstance(recipe.objective, Policy)
    return recipe.objective


def check(recipe: Recipe) -> None:
    """Refuse models and techniques without which a policy can be updated, but not generate.

    Raises:
        InputError: it names the field.
    """
    if recipe.model.implementation != "native":
        problem, remedy = "rollouts run on the native decoder", "use model.implementation: native"
        field, value = "model.implementation", recipe.model.implementation
        raise InputError(problem, remedy, field=field, value=value)
    if recipe.offload.weights:
        problem = "a rollout would copy all weights from the host for each token"
        raise InputError(problem, "leave offload.weights out", field="offload.weights", value=True)


def decoder_of(model: nn.Module) -> NativeDecoder:
    """Return the native decoder of a step's model, whose layers hold the adapter if there is one."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    assert isinstance(inner, NativeDecoder), "``check`` refuses others"
    forward.check(inner)
    return inner


def num_slots(recipe: Recipe) -> int:
    """Return the sequences that a rank generates at a time."""
    policy = policy_of(recipe)
    return min(policy.rollout.batch, -(-policy.completions // recipe.mesh.data_ranks))


def cache_of(step: Step) -> KVCache:
    """Allocate a rank's cache of keys and values, for sequences of the greatest length."""
    policy = policy_of(step.recipe)
    return KVCache.allocate(
        decoder_of(step.model).config, num_slots(step.recipe), policy.max_tokens,
        dtype=DTYPES[policy.rollout.kv_cache], device=step.device,
    )  # fmt: skip


@contextmanager
def generating(step: Step) -> Iterator[NativeDecoder]:
    """Yield the decoder with whole weights, in evaluation mode and without gradients; a collective."""
    was_training = step.model.training
    step.model.eval()
    try:
        # Its writes go to distinct places, so the kernels that sort them first change nothing.
        with torch.no_grad(), deterministic_kernels(False), step.gathered():
            yield decoder_of(step.model)
    finally:
        step.model.train(was_training)


def prefill(step: Step, cache: KVCache, slots: Tensor, input_ids: Tensor, lengths: Tensor) -> Tensor:
    """Read prompts within ``generating``; arguments and result as of ``forward.prefill``."""
    with step.forward_contexts():
        return forward.prefill(decoder_of(step.model), cache, slots, input_ids, lengths)


def decode(step: Step, cache: KVCache, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Append a token to every slot within ``generating``; arguments and result as of ``forward.decode``."""
    with step.forward_contexts():
        return forward.decode(decoder_of(step.model), cache, tokens, lengths)


def sampling_of(recipe: Recipe, stop: tuple[int, ...]) -> Sampling:
    """Return the recipe's sampling.

    Args:
        stop: tokens that end a completion.
    """
    policy, rollout = policy_of(recipe), policy_of(recipe).rollout
    return Sampling(
        max_new=policy.max_new, temperature=rollout.temperature, top_p=rollout.top_p, stop=stop,
        seed=recipe.seed,
    )  # fmt: skip


def generator_of(step: Step, sampling: Sampling) -> Generator:
    """Return a generator with the recipe's cache, which is used within ``generating``."""
    policy = policy_of(step.recipe)
    return Generator(
        decoder_of(step.model), sampling, slots=num_slots(step.recipe), positions=policy.max_tokens,
        cache_dtype=DTYPES[policy.rollout.kv_cache], autocast=step.forward_contexts, device=step.device,
    )  # fmt: skip


def score(step: Step, input_ids: Tensor, *, reference: bool = False) -> Tensor:
    """Return the log-probability of each position's next token, fp32 [b, s].

    Args:
        input_ids: int64 [b, s], padded at the end.
        reference: of the recipe's reference instead of the model.
    """
    return step.token_logs({"input_ids": input_ids}, reference=reference)
