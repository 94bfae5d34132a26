"""Autocast and composite operations on the virtual GPU are CUDA's, not a CPU's."""

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_blocks import on_h200
from trainfit.ledger.ledger import ALLOCATE, Segment
from trainfit.prediction.predict import ledger_of
from trainfit.step import assemble
from trainfit.virtual.cuda import autocast
from trainfit.virtual.cuda.attention_backend import Query, attend, choose_backend
from trainfit.virtual.cuda.ops import cuda_ops
from virtual_runs import recipe_of, with_layers

CPU = torch.device("cpu")
LOW = torch.bfloat16


def test_dtypes_under_autocast() -> None:
    """Loss fp32; logits and linear layers low; LayerNorm's output fp32; weights and gradients fp32."""
    seen: dict[str, set[torch.dtype]] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            seen.setdefault(type(module).__name__, set()).add(output.dtype)

    with on_h200() as virtual:
        step = assemble(recipe_of(with_layers("gpt2", 2), precision="amp-fp16"), CPU)
        virtual.model_is_complete(step.model, [])
        for module in step.model.modules():
            module.register_forward_hook(note)
        batch = step.random_batches()[0]
        loss = step.loss(batch)
        step([batch])
        weights = {p.dtype for p in step.model.parameters()}
    assert loss.dtype == torch.float32
    assert seen["Linear"] == {torch.float16}  # the logits
    assert seen["Conv1D"] == {torch.float16}
    assert seen["LayerNorm"] == {torch.float32}
    assert weights == {torch.float32}


def pytorchs_own_lists() -> Any:
    """``torch.testing``'s lists of what CUDA autocast does to each op. The file's only import is a test
    framework."""
    stub: Any = types.ModuleType("torch.testing._internal.common_utils")
    stub.TEST_WITH_ROCM, stub.TestCase = False, object
    path = Path(torch.__file__).parent / "testing" / "_internal" / "autocast_test_lists.py"
    spec = importlib.util.spec_from_file_location("autocast_test_lists", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(stub.__name__)
    sys.modules[stub.__name__] = stub
    try:
        spec.loader.exec_module(module)
    finally:
        if before is None:
            del sys.modules[stub.__name__]
        else:
            sys.modules[stub.__name__] = before
    return module.AutocastTestLists


def test_every_policy_of_cuda_has_one_here() -> None:
    """Of this version of PyTorch. The same policy as on a CPU needs no entry; cuDNN's have no CPU kernel."""
    names = [
        name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if "aten::" in name
    ]
    listed = {name for names, _ in autocast.POLICIES for name in names}
    missing = {
        name
        for name in names
        if autocast.has_policy(f"aten::{name}", "AutocastCUDA")
        and not autocast.has_policy(f"aten::{name}", "AutocastCPU")
        and name not in listed
    }
    assert missing <= {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}


def test_policies_that_no_list_of_pytorch_tests() -> None:
    with cuda_ops((9, 0), True), FakeTensorMode(), torch.autocast("cpu", dtype=LOW):
        x, wide = torch.ones(4, 4, dtype=LOW), torch.ones(1, 4, 6, 6)
        assert torch.ops.aten.norm.Scalar(x).dtype == torch.float32
        assert torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0]).dtype == torch.float32
        assert torch.linalg.matrix_norm(x).dtype == torch.float32
        kernel = torch.ones(4, 4, 3, 3)
        pair = [1, 1]
        found = torch.convolution(wide, kernel, None, pair, pair, pair, False, [0, 0], 1)
        assert found.dtype == LOW
        assert F.poisson_nll_loss(x, x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(torch.sigmoid(wide), wide)
    with cuda_ops((9, 0), True), FakeTensorMode():
        assert F.binary_cross_entropy(torch.ones(4), torch.ones(4)).dtype == torch.float32


NOT_COMPARED = {
    "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose",
     # parts of conv1d to conv3d
    "lstm_cell", "gru_cell", "pdist", "einsum", "equal",
     # no language model's; einsum: by the products inside it
}  # fmt: skip
LISTS = {
    "torch_fp16": LOW, "nn_fp16": LOW, "methods_fp16": LOW, "linalg_fp16": LOW, "torch_fp32": torch.float32,
    "nn_fp32": torch.float32, "methods_fp32": torch.float32, "torch_need_autocast_promote": torch.float32,
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_op_of_pytorchs_own_lists(name: str) -> None:
    low = torch.float16 if name == "torch_need_autocast_promote" else LOW
    wrong = []
    with cuda_ops((9, 0), True), FakeTensorMode():
        for op, args, *more in getattr(pytorchs_own_lists()("cpu"), name):
            if op in NOT_COMPARED:
                continue
            kwargs = more[0] if more and isinstance(more[0], dict) else {}
            function = (
                getattr(args[0], op) if name.startswith("methods")
                else next(getattr(room, op) for room in (torch, torch._C._nn,
                torch._C._linalg) if hasattr(room, op))
            )  # fmt: skip
            with torch.autocast("cpu", dtype=low):
                out = function(*(args[1:] if name.startswith("methods") else args), **kwargs)
            out = out[0] if isinstance(out, tuple | list) else out
            if out.dtype != LISTS[name]:
                wrong.append((op, out.dtype))
    assert not wrong


def test_a_norm_saves_what_it_saves_on_cuda() -> None:
    """One kernel where x and weight have one dtype; in steps as on any device, which keep fp32 copies, where
    they differ."""

    def saved(weight_dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        x = torch.ones(2, 3, 8, dtype=LOW, requires_grad=True)
        weight = torch.ones(8, dtype=weight_dtype, requires_grad=True)
        found: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            out = F.rms_norm(x, (8,), weight)
        assert out.dtype == LOW
        return sorted(
            (tuple(t.shape), t.dtype) for t in {t.untyped_storage()._cdata: t for t in found}.values()
        )

    in_steps = saved(torch.float32)
    with cuda_ops((9, 0), True), FakeTensorMode():
        assert saved(torch.float32) == in_steps
        assert saved(LOW) == [((2, 3, 1), torch.float32), ((2, 3, 8), LOW), ((8,), LOW)]
    assert ((2, 3, 8), torch.float32) in in_steps


# -- composite operations ---------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Operations that ran, and their results' dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) else out
        if isinstance(first, Tensor):
            self.names.append(func._schema.name)
            self.dtypes.append(first.dtype)
        return out


def seen_on_cuda(call: Callable[[], Any]) -> Seen:
    with cuda_ops((9, 0), prefers_cudnn=True), FakeTensorMode(), Seen() as seen:
        call()
    return seen


def test_a_bias_is_added_in_place() -> None:
    """aten/src/ATen/native/Linear.cpp: out of place only for subclasses, which fake tensors are."""
    x, weight, bias = torch.randn(4, 8, 16).transpose(0, 1), torch.randn(3, 16), torch.randn(3)
    call = lambda x: nn.functional.linear(x, torch.empty(3, 16), torch.empty(3))  # noqa: E731
    names = seen_on_cuda(lambda: call(torch.empty(4, 8, 16).transpose(0, 1))).names
    assert "aten::add_" in names
    assert "aten::add" not in names
    assert "aten::addmm" in seen_on_cuda(lambda: call(torch.empty(4, 8, 16))).names
    with cuda_ops((9, 0), prefers_cudnn=True):
        ours = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(ours, nn.functional.linear(x, weight, bias))


def test_autocast_leaves_alone_what_cuda_leaves_alone() -> None:
    """Cross-entropy of bf16 logits: log_softmax in bf16, as T5 showed on an H200; a CPU casts the logits
    first."""

    def run() -> None:
        logits = torch.empty(4, 8, dtype=torch.bfloat16)
        image = torch.empty(1, 1, 4, 4, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
            assert torch.cat([logits, logits.float()]).dtype == torch.float32
            assert nn.functional.interpolate(image, scale_factor=2).dtype == torch.float32

    seen = seen_on_cuda(run)
    dtypes = dict(zip(seen.names, seen.dtypes, strict=True))
    assert dtypes["aten::_log_softmax"] == torch.bfloat16
    assert dtypes["aten::nll_loss_forward"] == torch.float32


def test_a_mask_with_its_heads_innermost_goes_to_math() -> None:
    """check_last_dim_stride_equals_1_dense in sdp_utils; T5's learned bias on an H200."""
    q = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.empty(1, 16, 16, 4, dtype=torch.bfloat16, requires_grad=True).permute(0, 3, 1, 2)
    chosen = [
        choose_backend(Query(q, q, q, m, 0.0, False, False), (9, 0), True) for m in (mask, mask.contiguous())
    ]
    assert chosen == ["math", "efficient"]


@pytest.mark.parametrize(("scale", "causal"), [(None, False), (0.3, True), (-0.3, False)])
def test_math_attention_is_pytorchs(scale: float | None, causal: bool) -> None:
    q, k, v = (torch.randn(2, heads, 16, 8, dtype=torch.float64) for heads in (4, 2, 2))
    mask = None if causal else torch.rand(2, 1, 16, 16) > 0.3
    ours = attend(Query(q, k, v, mask, 0.0, causal, True), "math", scale)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = nn.functional.scaled_dot_product_attention(
            q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=True
        )
    torch.testing.assert_close(ours, theirs)


def test_a_norm_of_strided_queries_copies_them_before_it_allocates_its_results() -> None:
    """Queries are a slice of one product. The copy is freed when the kernel returns."""
    ledger = ledger_of(recipe_of(with_layers("qwen3-0.6b", 2), "native", precision="bf16"))
    queries = 64 * 16 * 128 * 2
    for name, others in (("forward", 4096), ("backward", 256)):
        suffix = "_backward" * (name == "backward")
        path = f"layers.0.attention.q_norm/aten._fused_rms_norm{suffix}.default"
        found = [
            (
                event.kind == ALLOCATE,
                ledger.storages[event.storage].path.rpartition(".default/")[2],
                event.num_bytes,
            )
            for event in ledger.expand()
            if ledger.segments[event.segment] == Segment("first", name)
            if path in ledger.storages[event.storage].path
        ]
        assert found[:4] == [
            (True, "scratch/0", queries), (True, "0/0", queries), (True, "1/0", others),
            (False, "scratch/0", queries),
        ]  # fmt: skip
