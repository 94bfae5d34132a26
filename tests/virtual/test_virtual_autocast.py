"""Autocast on the virtual GPU is CUDA's, and leaving it leaves PyTorch as it was, also after an exception."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tiny_recipe import tiny_recipe
from trainfit.catalog.load import gpu
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.step import assemble
from trainfit.virtual.cuda.ops import cuda_ops
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import virtual_gpu
from virtual_runs import recipe_of, with_layers

CPU = torch.device("cpu")
LOW = torch.bfloat16


def on_h200() -> Any:
    return virtual_gpu(GpuTraits.of(gpu("h200")), prefers_cudnn=True)


@pytest.mark.parametrize("precision", ["amp-bf16", "amp-fp16"])
def test_dtypes_under_autocast(precision: str) -> None:
    """Loss fp32; logits and linear layers low; LayerNorm's output fp32; weights and gradients fp32."""
    low = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}[precision]
    seen: dict[str, set[torch.dtype]] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            seen.setdefault(type(module).__name__, set()).add(output.dtype)

    with on_h200() as virtual:
        step = assemble(recipe_of(with_layers("gpt2", 2), precision=precision), CPU)
        virtual.model_is_complete(step.model, [])
        for module in step.model.modules():
            module.register_forward_hook(note)
        batch = step.random_batches()[0]
        loss = step.loss(batch)
        step([batch])
        weights = {p.dtype for p in step.model.parameters()}
    assert loss.dtype == torch.float32
    assert seen["Linear"] == {low}  # the logits
    assert seen["Conv1D"] == {low}
    assert seen["LayerNorm"] == {torch.float32}
    assert weights == {torch.float32}


def test_logits_and_norms_of_a_cpu_differ() -> None:
    """Why CUDA's policy is laid over: the CPU's own leaves LayerNorm and softmax in bf16."""
    x, weight = torch.ones(4, 8), torch.ones(8)
    with torch.autocast("cpu", dtype=LOW):
        of_cpu = F.layer_norm(x.bfloat16(), (8,), weight.bfloat16()).dtype, x.bfloat16().softmax(-1).dtype
    with on_h200(), torch.autocast("cpu", dtype=LOW):
        x = torch.ones(4, 8, device=CPU, dtype=LOW)
        of_gpu = F.layer_norm(x, (8,)).dtype, x.softmax(-1).dtype
        logits = F.linear(x.float(), torch.ones(8, 8, device=CPU))
        loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.int64, device=CPU))
    assert of_cpu == (LOW, LOW)
    assert of_gpu == (torch.float32, torch.float32)
    assert (logits.dtype, loss.dtype) == (LOW, torch.float32)


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


OVERRIDDEN = ("scaled_dot_product_attention", "dropout", "softmax.int", "log_softmax.int", "rms_norm")


def state_of_pytorch() -> dict[str, Any]:
    """Everything that the virtual GPU changes while it is entered."""
    import transformers.utils.import_utils as transformers_utils

    with torch.autocast("cpu", dtype=LOW):
        x = torch.ones(2, 4, dtype=LOW)
        autocast = [
            F.layer_norm(x, (4,)).dtype,
            x.softmax(-1).dtype,
            x.pow(2).dtype,
            x.sum().dtype,
            x.exp().dtype,
        ]
    module: Any = torch.nn.modules.module
    autograd: Any = torch.autograd
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        "autocast": autocast,
        "overrides": {name: has_kernel(f"aten::{name}", "AutogradCPU") for name in OVERRIDDEN},
        "hooks": (len(module._global_forward_hooks), len(module._global_forward_pre_hooks)),
        "engine": autograd._engine_run_backward,
        "is_fake_tensor": transformers_utils.is_fake_tensor,
        "dispatch_modes": list(_get_current_dispatch_mode_stack()),
        "function_modes": list(_get_current_function_mode_stack()),
    }


def real_loss() -> list[float]:
    step = assemble(tiny_recipe(precision="amp-bf16"), CPU)
    return [step(step.random_batches()).item() for _ in range(2)]


def test_nothing_is_left_behind() -> None:
    before, losses = state_of_pytorch(), real_loss()
    trace(tiny_recipe(precision="amp-bf16", hardware={"gpu": "h200"}))
    assert state_of_pytorch() == before
    assert real_loss() == losses


@pytest.mark.parametrize("where", ["build", "forward", "backward", "optimizer"])
def test_nothing_is_left_behind_by_an_exception(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class StopError(Exception):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise StopError

    before, losses = state_of_pytorch(), real_loss()
    with monkeypatch.context() as patch:
        if where == "build":
            patch.setattr("trainfit.step.build_model", stop)
        elif where == "forward":
            patch.setattr(F, "silu", stop)
            patch.setattr(torch.nn.SiLU, "forward", stop)
        elif where == "backward":
            patch.setattr("trainfit.virtual.trace.storages.LiveStorages.own", stop)
        else:
            patch.setattr(torch.optim.AdamW, "step", stop)
        # A failure inside transformers' model is reported as its config's.
        with pytest.raises((StopError, InputError)):
            trace(tiny_recipe())
    assert state_of_pytorch() == before
    assert real_loss() == losses


def test_an_exception_within_the_backward_pass() -> None:
    before = state_of_pytorch()

    def arrive(_: Any) -> None:
        raise KeyError("hook")

    def run() -> None:
        with on_h200() as virtual:
            model = nn.Linear(4, 4, device=CPU)
            virtual.model_is_complete(model, [])
            model.weight.register_post_accumulate_grad_hook(arrive)
            virtual.begin("first", "forward")
            loss = model(torch.ones(2, 4, device=CPU)).sum()
            virtual.begin("first", "backward")
            loss.backward()

    with pytest.raises(KeyError, match="hook"):
        run()
    assert state_of_pytorch() == before
