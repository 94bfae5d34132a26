"""Generation with a cache: as without one, whatever is generated beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainfit.kernels.sampling.op import least_kept, row_keys, sample_tokens
from trainfit.models.build import build_native
from trainfit.models.native.decoder import NativeDecoder
from trainfit.rl.rollout.generate import Completion, Generator, Sampling
from trainfit.spec.errors import InputError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral, window": {"model_type": "mistral", "sliding_window": 9},
    "learned": {"model_type": "trainfit", "position_embedding": "learned", "norm_placement": "post"},
    "alibi": {"model_type": "trainfit", "position_embedding": "alibi"},
}
PROMPTS = [[5, 6, 7], [11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [40, 41], [3, 3, 3, 3], [90]]


def model_of(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> NativeDecoder:
    torch.manual_seed(1)
    # On the CPU first: the weights of a seed differ from device to device.
    model = build_native({**SMALL, **MODELS[name]}, dtype=dtype, device="cpu", attention="sdpa")
    assert isinstance(model, NativeDecoder)
    model.init_weights()
    return model.to(device)


@torch.no_grad()
def without_cache(model: NativeDecoder, prompt: list[int], number: int, sampling: Sampling) -> Completion:
    """Each token from a forward of everything before it."""
    ids, tokens, logs = list(prompt), [], []
    while len(tokens) < sampling.max_new:
        logits = model(torch.tensor([ids])).logits[:, -1].float()
        least = least_kept(logits, sampling.temperature, sampling.top_p) if sampling.top_p < 1 else None
        keys = row_keys(sampling.seed, torch.tensor([number]), torch.tensor([len(ids)]))
        token, log = sample_tokens(logits, keys, temperature=sampling.temperature, least=least)
        ids.append(int(token))
        tokens.append(int(token))
        logs.append(float(log))
        if tokens[-1] in sampling.stop:
            return Completion(tokens, logs, True)
    return Completion(tokens, logs, False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_as_without_a_cache(name: str, temperature: float) -> None:
    model = model_of(name)
    sampling = Sampling(max_new=23, temperature=temperature, stop=(13, 14, 15, 16), seed=4)
    found = Generator(model, sampling, slots=2, positions=64)(PROMPTS)
    expected = [without_cache(model, prompt, number, sampling) for number, prompt in enumerate(PROMPTS)]
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.stopped for one in found] == [one.stopped for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logs == pytest.approx(other.logs, abs=2e-4)
    if temperature:  # Completions of several lengths, which slots were given up for.
        assert len({len(one.tokens) for one in found}) > 2


def test_the_nucleus() -> None:
    model = model_of("llama")
    sampling = Sampling(max_new=12, temperature=1.3, top_p=0.5)
    found = Generator(model, sampling, slots=3, positions=64)(PROMPTS)
    assert [one.tokens for one in found] == [
        without_cache(model, prompt, number, sampling).tokens for number, prompt in enumerate(PROMPTS)
    ]


def test_the_number_of_slots_changes_nothing() -> None:
    model = model_of("llama")
    sampling = Sampling(max_new=17, stop=(13,), seed=9)
    runs = [Generator(model, sampling, slots=slots, positions=64)(PROMPTS) for slots in (1, 4, 8)]
    assert (
        [one.tokens for one in runs[0]] == [one.tokens for one in runs[1]] == [one.tokens for one in runs[2]]
    )
    later = list(Generator(model, sampling, slots=3, positions=64).completions(PROMPTS[2:], first=2))
    assert [one.tokens for one in later] == [one.tokens for one in runs[0][2:]]


def test_weights_that_change_are_used() -> None:
    """A generator is kept from one rollout to the next, while training changes the weights in place."""
    model = model_of("llama")
    sampling = Sampling(max_new=8, temperature=0)
    generator = Generator(model, sampling, slots=2, positions=64)
    before = generator(PROMPTS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    after = generator(PROMPTS)
    expected = [
        without_cache(model, prompt, number, sampling).tokens for number, prompt in enumerate(PROMPTS)
    ]
    assert [one.tokens for one in after] == expected != [one.tokens for one in before]


def test_as_transformers_generates(tmp_path: Path) -> None:
    """Greedily, from a folder that transformers wrote."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        **SMALL, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    theirs = transformers.Qwen2ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    from trainfit.api.recipes import read
    from trainfit.step import assemble

    fields = [
        f"model.weights={tmp_path}",
        "model.implementation=native",
        "precision=fp32",
        "hardware.gpu=cpu",
    ]
    recipe, _ = read(str(tmp_path / "config.json"), [*fields, "batch.seq=32"])
    model: Any = assemble(recipe, torch.device("cpu")).model
    found = Generator(model, Sampling(max_new=10, temperature=0), slots=3, positions=64)(PROMPTS)
    for prompt, one in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        expected: Tensor = theirs.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
        assert one.tokens == expected[0, len(prompt) :].tolist()


def test_prompts_without_room_are_refused() -> None:
    generator = Generator(model_of("llama"), Sampling(max_new=32), slots=2, positions=64)
    for prompt in ([], [1] * 33):
        with pytest.raises(InputError, match="prompt 0 has"):
            generator([prompt])
    with pytest.raises(InputError, match="512 learned positions"):
        Generator(model_of("learned"), Sampling(), slots=1, positions=600)
    # Positions that are no multiple of the padding.
    torch.manual_seed(1)
    few = build_native(
        {**SMALL, **MODELS["learned"], "max_position_embeddings": 100}, dtype=torch.float32, device="cpu"
    )
    (found,) = Generator(few, Sampling(max_new=20), slots=1, positions=100)([[3] * 80])
    assert len(found.tokens) == 20


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_step_is_the_step(name: str) -> None:
    model = model_of(name, "cuda")
    sampling = Sampling(max_new=23, stop=(13, 14, 15, 16), seed=4)
    recorded, plain = (
        Generator(model, sampling, slots=2, positions=64, graph=graph)(PROMPTS) for graph in (True, False)
    )
    assert [one.tokens for one in recorded] == [one.tokens for one in plain]
    on_cpu = Generator(model_of(name), sampling, slots=2, positions=64)(PROMPTS)
    assert [one.tokens[:5] for one in recorded] == [one.tokens[:5] for one in on_cpu]
