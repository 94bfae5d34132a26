"""Advantages of completions from their rewards, and the weights of their tokens.

GRPO (Shao et al., arXiv:2402.03300) samples a group of completions of each prompt; a completion's advantage
is its reward minus the group's mean, over the group's standard deviation. PPO without a critic takes the
reward minus the mean of the whole rollout, over its standard deviation.

Example: rewards 1, 0, 0, 1 of a group have mean 0.5 and deviation 0.577, so advantages 0.87, -0.87, -0.87 and
0.87.
"""

from torch import Tensor

SMALLEST = 1e-4
"""Added to a standard deviation: a group of equal rewards has advantages of 0."""


def group_advantages(rewards: Tensor, group: int, *, scale: bool = True) -> Tensor:
    """Return GRPO's advantages, [n].

    Args:
        rewards: [n]; the completions of a prompt follow one another.
        group: completions of a prompt, at least 2.
        scale: divide by the group's standard deviation (of a sample).
    """
    by_prompt = rewards.view(-1, group)
    centred = by_prompt - by_prompt.mean(dim=1, keepdim=True)
    if scale:
        centred = centred / (by_prompt.std(dim=1, keepdim=True) + SMALLEST)
    return centred.flatten()


def whitened(rewards: Tensor) -> Tensor:
    """Return the advantages of PPO without a critic, [n]: rewards with mean 0 and deviation 1."""
    return (rewards - rewards.mean()) / (rewards.std() + SMALLEST)


def token_weights(counted: Tensor, per: str) -> Tensor:
    """Return the weight of each token in the loss, fp32 [n, s]; their sum is 1.

    Args:
        counted: bool [n, s], tokens of completions.
        per: ``token``: all tokens equally. ``sequence``: all completions equally, whatever their length.
    """
    kept = counted.float()
    if per == "token":
        return kept / kept.sum().clamp(min=1)
    lengths = kept.sum(dim=1, keepdim=True)
    return kept / lengths.clamp(min=1) / (lengths > 0).sum().clamp(min=1)
