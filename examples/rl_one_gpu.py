"""GRPO in plain PyTorch on one GPU; ``rl_fsdp.py`` is the same script on several.

    python examples/rl_one_gpu.py                         # trains
    trainfit trace --gpu h100-sxm examples/rl_one_gpu.py  # what that takes, without a GPU

RL_TINY=1 takes a toy size. The reward is the share of even tokens: something that a model learns at once.
"""

import os

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

TINY = bool(os.environ.get("RL_TINY"))
SIZES = (
    dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=256)
    if TINY
    else dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12)
)
"""Qwen2.5-1.5B's shape."""
PROMPTS, GROUP, PROMPT, NEW = (2, 2, 8, 4) if TINY else (4, 8, 256, 64)
LOOPS, CLIP = 3, 0.2


def log_probabilities(model, ids):
    """Return the log-probability of each completion's tokens, [b, NEW]."""
    logits = model(ids, use_cache=False).logits[:, PROMPT - 1 : -1]
    return -F.cross_entropy(logits.float().flatten(0, 1), ids[:, PROMPT:].flatten(), reduction="none").view(
        -1, NEW
    )


@torch.no_grad()
def rollout(model, prompts):
    """Return prompts and sampled completions, [b, PROMPT + NEW]."""
    ids, cache, last = prompts, None, prompts
    for _ in range(NEW):
        output = model(last, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        last = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1)
        ids = torch.cat((ids, last), dim=1)
    return ids


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    for number in range(LOOPS):
        # Rollout
        prompts = torch.randint(config.vocab_size, (PROMPTS, PROMPT), device=device)
        ids = rollout(model, prompts.repeat_interleave(GROUP, dim=0))
        rewards = (ids[:, PROMPT:] % 2 == 0).float().mean(1).view(PROMPTS, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)

        # Scoring
        with torch.no_grad():
            old = log_probabilities(model, ids)

        # Update
        ratio = (log_probabilities(model, ids) - old).exp()
        gain = advantages.view(-1, 1)
        loss = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loop {number + 1}: reward {rewards.mean().item():.3f}")


if __name__ == "__main__":
    main()
