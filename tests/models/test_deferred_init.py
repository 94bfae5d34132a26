"""A model that is built on meta and materialised equals one built on the device, and is never there whole."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.models.build import build_model
from trainfit.models.deferred_init import DeferredInit
from trainfit.spec.recipe import ModelSpec

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 97, "max_position_embeddings": 64, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97, "n_positions": 64},
    "gpt_neox": {**SIZES, "rotary_pct": 0.25},
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97},
    "llama": {**SIZES, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3_moe": {**SIZES, **EXPERTS},
    "gemma3_text": {**SIZES, "head_dim": 8, "sliding_window": 8},
}


def spec(name: str) -> ModelSpec:
    if name == "native":
        return ModelSpec(config={"model_type": "qwen2", **MODELS["qwen2"]}, implementation="native")
    return ModelSpec(config={"model_type": name, **MODELS[name]})


def built(name: str, device: torch.device | str) -> nn.Module:
    torch.manual_seed(0)
    return build_model(spec(name), dtype=torch.float32, device=device)


def with_adapter(model: nn.Module) -> nn.Module:
    """Draw on the host, use it on the device, and join two weights: what PEFT and tensor parallel do."""
    like: Any = next(model.parameters())
    drawn = nn.init.kaiming_uniform_(torch.empty(3, 4)).to(like.device)
    nn.init.trunc_normal_(like, std=2.0, a=-1.0, b=1.0)
    like.data = torch.cat([like.detach()[:3, :4] * 2, drawn])
    model.added = nn.Parameter(torch.randn(5, device=like.device))
    return model


class MostAlive(TorchDispatchMode):
    """Counts the bytes of real tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storage = out.untyped_storage() if isinstance(out, Tensor) and not out.is_meta else None
        if storage is not None and storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
        return out

    def _freed(self, address: int, num_bytes: int) -> None:
        self._seen.discard(address)
        self.now -= num_bytes


@pytest.mark.parametrize("name", [*MODELS, "native"])
def test_values_are_those_of_a_model_built_on_the_device(name: str) -> None:
    expected = with_adapter(built(name, CPU))
    with DeferredInit() as deferred:
        model = with_adapter(built(name, "meta"))
    torch.manual_seed(0)
    deferred.materialise(model, CPU)
    found = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers()))
    wanted = dict((*expected.named_parameters(remove_duplicate=False), *expected.named_buffers()))
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key
        assert found[key].requires_grad == tensor.requires_grad
    assert len(list(model.parameters())) == len(list(expected.parameters()))  # Ties are kept.


def test_no_more_than_the_shards_and_one_weight_is_ever_on_the_device() -> None:
    with DeferredInit() as deferred:
        model = built("llama", "meta")
        for module in model.modules():
            for name, whole in list(module._parameters.items()):
                if whole is not None:
                    module._parameters[name] = nn.Parameter(whole.detach()[: len(whole) // 2].clone())
    with MostAlive() as alive:
        deferred.materialise(model, CPU)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    # A weight, its shard that is copied into place, and a few values of the rotary embedding.
    assert sum(sizes) < alive.most <= sum(sizes) + 4 * max(sizes) + 4 * buffers
