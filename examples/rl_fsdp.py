"""GRPO in plain PyTorch with FSDP2 on several GPUs; ``rl_one_gpu.py`` is the same script on one.

    torchrun --nproc-per-node 2 examples/rl_fsdp.py                      # trains
    trainfit trace --gpu h100-sxm --world-size 2 examples/rl_fsdp.py     # what that takes, without GPUs

RL_TINY=1 takes a toy size. The reward is the share of even tokens: something that a model learns at once.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
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
    """Return prompts and sampled completions, [b, PROMPT + NEW], with the weights gathered once."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)  # Else each token gathers them anew.
    ids, cache, last = prompts, None, prompts
    for _ in range(NEW):
        output = model(last, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        last = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1)
        ids = torch.cat((ids, last), dim=1)
    for module in sharded:
        module.set_reshard_after_forward(module is not model, recurse=False)
        module.reshard()
    return ids


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local = dist.get_rank(), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # The same weights on every rank
    config = AutoConfig.for_model("qwen2", **SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    torch.manual_seed(1 + rank)  # Other prompts and other samples on every rank
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
        if rank == 0:
            print(f"loop {number + 1}: reward {rewards.mean().item():.3f} on rank 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
