"""Families of the catalog's models, from which recipes are drawn at random."""

FAMILIES: dict[str, tuple[str, ...]] = {
    family: tuple(models.split())
    for family, models in {
        "gpt2": "gpt2 gpt2-medium gpt2-large gpt2-xl",
        "gpt-neox": "pythia-160m pythia-410m pythia-1b pythia-1.4b pythia-2.8b pythia-6.9b",
        "opt": "opt-125m opt-350m opt-1.3b opt-2.7b opt-6.7b",
        "bloom": "bloom-560m bloom-1b1 bloom-1b7 bloom-3b",
        "falcon": "falcon-7b",
        "llama": "smollm-135m llama-3.2-1b tinyllama-1.1b llama-3.2-3b llama-2-7b llama-3.1-8b llama-2-13b",
        "mistral": "mistral-7b-v0.1 mistral-7b-v0.3 mistral-nemo-12b",
        "qwen2": "qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-14b",
        "qwen3": "qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b",
        "gemma": "gemma-2b gemma-7b",
        "gemma2": "gemma-2-2b gemma-2-9b",
        "gemma3": "gemma-3-270m gemma-3-1b gemma-3-4b",
        "phi3": "phi-3-mini-4k phi-3-medium-4k",
        "phi": "phi-2",
        "olmoe": "olmoe-1b-7b",
        "mixtral": "mixtral-8x7b",
        "deepseek-moe": "deepseek-v2-lite",
        "qwen3-moe": "qwen3-30b-a3b",
        "native": "small medium large xl 2.7b deep-one-1.6b llama-3.2-1b qwen2.5-0.5b qwen3-0.6b",
    }.items()
}
