"""Tiny configs that both implementations build, and transformers' model of one with random norms and
biases."""

import torch

from trainfit.models.hf import build_hf

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # large, so that attention is far from uniform and a wrong position shows
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SEQ = 40


def batch(vocabulary: int = 97) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (2, SEQ), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    return ids, labels


def theirs_with_random_norms_and_biases(
    config: dict[str, object], attention: str = "sdpa"
) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build_hf(config, dtype=torch.float32, device="cpu", attention=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model
