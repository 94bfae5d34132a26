"""The native decoder's own variants, against torch's layers and published constants."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfit.models.build import build_model, build_native
from trainfit.models.native.decoder import NativeDecoder
from trainfit.models.native.families import native_config
from trainfit.models.native.positions import additive_bias, alibi_slopes
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import ModelSpec

OWN = {
    "model_type": "trainfit", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 97, "max_position_embeddings": 24, "initializer_range": 0.3,
}  # fmt: skip
TORCH_LIKE = {
    "norm": "layernorm", "norm_eps": 1e-5, "gated_mlp": False, "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
VARIANTS = {
    "post-alibi-relu-glu": {"norm_placement": "post", "position_embedding": "alibi", "hidden_act": "relu"},
    "unfused-norm-bias-per-layer": {
        "position_embedding": "alibi", "alibi_bias": "per_layer", "norm": "rmsnorm_unfused", "qk_norm": True
    },
    "alibi-grouped": {"position_embedding": "alibi", "num_key_value_heads": 2},
    "learned-gelu": {"position_embedding": "learned", "hidden_act": "gelu", "gated_mlp": False},
    "qk-norm-partial-rope": {"qk_norm": True, "partial_rotary_factor": 0.5},
    "layernorm-tied": {"norm": "layernorm", "tie_word_embeddings": True},
    "window": {"sliding_window": 5, "num_key_value_heads": 2},
}  # fmt: skip
SEQ = 16


def own(
    changes: dict[str, object], attention: str = "sdpa", dtype: torch.dtype = torch.float32
) -> NativeDecoder:
    torch.manual_seed(0)
    return build_native({**OWN, **changes}, dtype=dtype, device="cpu", attention=attention)


def ids() -> torch.Tensor:
    return torch.randint(0, 97, (2, SEQ), generator=torch.Generator().manual_seed(1))


def by_torch(model: NativeDecoder, activation: str) -> torch.Tensor:
    """Logits of the same weights run through torch.nn.TransformerEncoderLayer."""
    config = model.config
    mask = torch.full((SEQ, SEQ), -math.inf).triu(1).expand(4, SEQ, SEQ).clone()
    if config.position_embedding == "alibi":
        positions = torch.arange(SEQ)
        for head in range(4):  # four heads: the slopes are 1/4, 1/16, 1/64, 1/256
            mask[head] += -(4.0 ** -(head + 1)) * (positions[:, None] - positions[None, :]).clamp(min=0)
    x = model.embed(ids())
    if model.embed_positions is not None:
        x = x + model.embed_positions.weight[:SEQ]
    for block in model.layers:
        layer = nn.TransformerEncoderLayer(
            32, 4, 48, 0.0, activation, batch_first=True, norm_first=config.norm_placement == "pre"
        )
        names = {
            "self_attn.in_proj_": "attention.qkv.", "self_attn.out_proj.": "attention.out.",
            "linear1.": "mlp.up.",
            "linear2.": "mlp.down.", "norm1.": "attention_norm.", "norm2.": "mlp_norm.",
        }  # fmt: skip
        layer.load_state_dict(
            {
                theirs + kind: block.get_parameter(f"{ours}{kind}")
                for theirs, ours in names.items()
                for kind in ("weight", "bias")
            }
        )
        x = layer(x, src_mask=mask.repeat(2, 1, 1))
    return model.lm_head(model.norm(x))


@pytest.mark.parametrize(
    ("placement", "position", "activation", "attention"),
    [("pre", "learned", "relu", "sdpa"), ("pre", "alibi", "gelu", "eager"),
     ("post", "learned", "gelu", "eager"), ("post", "alibi", "relu", "sdpa")],
)  # fmt: skip
def test_equals_torchs_own_layer(placement: str, position: str, activation: str, attention: str) -> None:
    varied = {"norm_placement": placement, "position_embedding": position, "hidden_act": activation}
    changes = TORCH_LIKE | varied
    model = own(changes, attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        expected = by_torch(model, activation)
        torch.testing.assert_close(model(ids()).logits, expected, rtol=1e-5, atol=2e-5)


def test_alibi_slopes_are_the_papers() -> None:
    """arXiv:2108.12409, section 3: for 8 heads 1/2, 1/4, ..., 1/256. Other counts as transformers' Bloom."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    for heads in (1, 4, 12, 16, 20, 32):
        theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # [heads, 1, 2], slope x position
        assert alibi_slopes(heads) == pytest.approx(theirs[:, 0, 1].tolist())


def test_window_counts_the_token_itself() -> None:
    config = native_config({**OWN, "sliding_window": 3})
    bias = additive_bias(config, 6, None, torch.float32, torch.device("cpu"))
    assert bias is not None
    assert (bias[0, 0] == 0).sum(dim=1).tolist() == [1, 2, 3, 3, 3, 3]
    assert additive_bias(config, 3, None, torch.float32, torch.device("cpu")) is None


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants(changes: dict[str, object]) -> None:
    """Eager attention equals SDPA, the future is not seen, one step lowers the loss, all of it trains."""
    model = own(changes)
    logits = model(ids()).logits
    torch.testing.assert_close(own(changes, "eager")(ids()).logits, logits, rtol=1e-5, atol=2e-5)

    changed = ids()
    changed[:, 9] = (changed[:, 9] + 1) % 97
    moved = (model(changed).logits - logits).abs().amax(dim=(0, 2))
    assert moved[:9].max() == 0
    assert moved[9] > 1e-3

    before = model(ids(), ids()).loss
    before.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    assert model(ids(), ids()).loss < before


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_dtypes_and_compiled_blocks(changes: dict[str, object]) -> None:
    """Weights' own dtype and autocast: logits bf16, loss fp32. Blocks compile without graph breaks."""
    for dtype, amp, attention in ((torch.bfloat16, False, "sdpa"), (torch.float32, True, "eager")):
        model = own(changes, attention, dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = model(ids(), ids())
        assert (out.logits.dtype, out.loss.dtype) == (torch.bfloat16, torch.float32)
        out.loss.backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}
    compiled = own(changes)
    for block in compiled.layers:
        block.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids()).logits, own(changes)(ids()).logits)


def test_compiles_whole_without_graph_breaks() -> None:
    model = own(VARIANTS["post-alibi-relu-glu"])
    expected = model(ids(), ids())
    model.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(model(ids(), ids()).loss, expected.loss)


def test_fake_and_meta() -> None:
    spec = ModelSpec(config="deep-one-1.6b", implementation="native")
    on_meta = build_model(spec, dtype=torch.float32, device="meta")
    # 32 x (4 x 2048^2 + 3 x 2048 x 5400 + 2 norms) + embedding and head; published as 1.63e9.
    assert (
        sum(p.numel() for p in on_meta.parameters())
        == 32 * (4 * 2048**2 + 3 * 2048 * 5400 + 4096) + 2 * 8000 * 2048
    )
    with FakeTensorMode():
        fake = build_model(spec, dtype=torch.bfloat16, device="cpu")
        tokens = torch.randint(0, 8000, (4, 768))
        fake(tokens, tokens).loss.backward()
    assert all(p.grad is not None for p in fake.parameters())


def test_meta_then_empty_then_init() -> None:
    """The way sharded models are made: buffers hold positions, not weights, and come back with the
    weights."""
    model = build_native({**OWN}, dtype=torch.float32, device="meta")
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    expected = own({})
    torch.testing.assert_close(model(ids()).logits, expected(ids()).logits)
    for (name, ours), (_, theirs) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_unfused_and_per_layer_change_memory_only() -> None:
    changes: dict[str, object] = {"position_embedding": "alibi"}
    plain = own({**changes, "norm": "rmsnorm_unfused", "alibi_bias": "per_layer"})
    torch.testing.assert_close(plain(ids()).logits, own(changes)(ids()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"hidden_act": "relu"}, [48, 48, 48]),  # relu(gate), up, their product
        ({"hidden_act": "silu"}, [96, 48, 48]),  # gate and up in one, silu(gate), the product
    ],
)
def test_what_the_feed_forward_keeps(changes: dict[str, object], kept: list[int]) -> None:
    """Elements a token of every tensor kept for the backward pass, its input (32 wide) and the weights
    aside."""
    mlp = own(changes).layers[0].mlp
    weights = {parameter.data_ptr() for parameter in mlp.parameters()}
    x = torch.randn(1, SEQ, 32, requires_grad=True)
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights | {x.data_ptr()}:
            storages[storage.data_ptr()] = storage.nbytes() // (4 * SEQ)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = mlp(x)
    assert sorted(storages.values(), reverse=True) == kept
    out.sum().backward()


def test_initial_weights_and_loss() -> None:
    """Weights have the config's spread, a tied head is one parameter, the loss is of a uniform guess."""
    model = own({"hidden_size": 128, "initializer_range": 0.02})
    assert model.layers[0].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.layers[0].attention_norm.weight.tolist() == [1.0] * 128
    assert len({block.mlp.down.weight.sum().item() for block in model.layers}) == 2
    assert model(ids(), ids()).loss.item() == pytest.approx(math.log(97), abs=0.1)
    tied, untied = (
        sum(p.numel() for p in own({"tie_word_embeddings": one}).parameters()) for one in (True, False)
    )
    assert untied - tied == 97 * 32


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt2"}, ["gpt2", "use implementation: hf"]),
        ({"model_type": "llama", "norm_placement": "post"}, ["norm_placement", "use model_type: trainfit"]),
        ({**OWN, "norm_placment": "post"}, ["norm_placment", "did you mean 'norm_placement'?"]),
        ({**OWN, "num_attention_heads": 5}, ["num_attention_heads", "head_dim"]),
        ({**OWN, "num_key_value_heads": 3}, ["num_key_value_heads 3", "make it one"]),
        ({**OWN, "head_dim": 7}, ["7 elements of each head", "even"]),
        ({**OWN, "norm": "batchnorm"}, ["norm", "'batchnorm'", "rmsnorm"]),
        ({**OWN, "hidden_size": 32.5}, ["hidden_size", "32.5"]),
        (
            {**OWN, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            ["original_max_position_embeddings"],
        ),
        ({"model_type": "trainfit", "hidden_size": 32}, ["missing"]),
    ],
)
def test_configs_that_native_cannot_express_are_refused(config: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        build_native(config, dtype=torch.float32, device="meta")
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words)


def test_learned_positions_end() -> None:
    model = own({"position_embedding": "learned", "max_position_embeddings": 8})
    with pytest.raises(InputError, match="8 learned positions"):
        model(ids())
