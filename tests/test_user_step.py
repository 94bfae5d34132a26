"""``trainfit.trace``: people's own code, written for "cuda", on the virtual GPU."""

import argparse
import copy
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import trainfit
from trainfit.predict.trace import trace as trace_recipe
from trainfit.predict.user_step import Traced
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Optimizer
from trainfit.virtual.allocator import CachingAllocator
from trainfit.virtual.attention import Query, attend, choose_backend
from trainfit.virtual.cuda_ops import cuda_ops
from trainfit.virtual.replay import replay
from virtual_runs import recipe_of, steady_sum, with_layers

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
N = 4096
SQUARE = 4 * N * N
"""Bytes of an N x N matrix in fp32: 64 MiB, so that no rounding of the allocator's shows."""


def mlp(width: int = 256) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3, width: int = 256) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(8, width, device="cuda")).square().mean().backward()
        optimizer.step()


def inside(check: Callable[[], None]) -> Traced:
    """Run ``check`` on the virtual GPU, and train a little so that there is something to trace."""

    def run() -> None:
        check()
        model = mlp().cuda()
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)

    return trainfit.trace(run)


# -- numbers in closed form ---------------------------------------------------------------------------------------


def train_one_matrix() -> None:
    model = nn.Linear(N, N, bias=False).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(N, N).to("cuda")
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def test_one_matrix_in_closed_form() -> None:
    traced = trainfit.trace(train_one_matrix)
    assert traced.num_steps == 3
    assert traced.params == traced.trainable_params == N * N
    assert traced.phases.after_init == 2 * SQUARE  # the weight and the input
    # The product and its square; the workspace of the forward's cuBLAS handle; the loss.
    workspace = 32 * MIB
    first = traced.phases.first.forward - (4 * SQUARE + workspace)
    assert 0 <= first <= MIB
    # The steady forward starts with the momentum, and with the workspace of the backward's handle.
    assert traced.phases.steady.forward == traced.phases.first.forward + SQUARE + workspace
    assert traced.breakdown.weights == traced.breakdown.optimizer == SQUARE
    assert traced.model_flops == traced.hardware_flops == 2 * 2 * N**3  # no gradient of the input is wanted
    assert traced.breakdown.total == traced.peak_allocated_bytes <= traced.peak_reserved_bytes
    assert traced.fits


def test_out_of_memory_is_told() -> None:
    def train() -> None:
        model = nn.Linear(N, N, bias=False).cuda()
        held = [model(torch.randn(N, N, device="cuda")) for _ in range(400)]
        torch.stack([y.sum() for y in held]).sum().backward()

    assert trainfit.trace(train).fits
    assert not trainfit.trace(train, gpu="rtx-4090").fits


def test_the_same_as_the_recipe() -> None:
    """A Hugging Face model trained by a loop written here, and by a recipe's step."""
    config = with_layers("gpt2", 2)
    batch = Batch(micro=4, seq=256)
    recipe = recipe_of(
        config, precision="amp-fp16", batch=batch, optimizer=Optimizer(implementation="foreach")
    )

    def train() -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**config, "use_cache": False}))
        model.to("cuda").train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            ids = torch.randint(0, 1000, (4, 256)).cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(input_ids=ids, labels=ids.clone()).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    traced = trainfit.trace(train)
    ledger = trace_recipe(recipe, whole=True)
    expected = replay(ledger, CachingAllocator())
    assert traced.model_flops == steady_sum(ledger, "model_flops")
    assert traced.hardware_flops == steady_sum(ledger, "causal_flops")
    assert traced.params == ledger.params
    # Weights come to the device in another order: blocks that are not split differ by a little.
    for name in ("forward", "backward", "optimizer"):
        for step in ("first", "steady"):
            ours = getattr(getattr(traced.phases, step), name)
            assert ours == pytest.approx(getattr(getattr(expected.phases, step), name), rel=5e-3)
    assert traced.breakdown.weights == expected.breakdown.weights
    assert traced.breakdown.optimizer == expected.breakdown.optimizer


def test_flops_as_pytorch_counts_them() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 4, stride=2, groups=1),
            nn.Flatten(), nn.Linear(8 * 15 * 15, 10),
        )  # fmt: skip

    def step(model: nn.Module, device: str) -> None:
        model(torch.randn(4, 3, 32, 32, device=device)).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step(build(), "cpu")
    traced = trainfit.trace(lambda: step(build().cuda(), "cuda"))
    assert traced.model_flops == counter.get_total_flops()
    assert any("convolutions" in text for text in traced.assumptions)


# -- what the code says and where it lands ------------------------------------------------------------------------


def test_tensors_are_where_the_code_says() -> None:
    def check() -> None:
        host = torch.zeros(3)
        assert torch.cuda.is_available()
        assert host.device.type == "cpu"
        assert not host.is_cuda
        devices: list[Any] = ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0]
        for device in devices:
            assert host.to(device).is_cuda
            assert torch.ones(2, device=device).device == torch.device("cuda", 0)
        there = host.cuda(non_blocking=True)
        assert host.pin_memory().to("cuda", non_blocking=True).get_device() == 0
        assert host.to(there).is_cuda
        assert there.to(host).is_cpu
        assert host.to(there.device, torch.float16).dtype == torch.float16
        assert there.half().is_cuda
        assert (there + 1).is_cuda
        assert there.new_zeros(2).is_cuda
        assert not host.new_zeros(2).is_cuda
        assert host.new_ones(2, device="cuda").is_cuda
        assert torch.zeros_like(host, device="cuda").is_cuda
        assert torch.zeros_like(there, device="cpu").tolist() == [0, 0, 0]
        assert torch.tensor([1.0, 2.0], device="cuda").is_cuda
        assert torch.as_tensor(np.ones(2), device="cuda").is_cuda
        assert torch.as_tensor(there).is_cuda
        assert not torch.from_numpy(np.ones(2)).is_cuda
        assert there.to("cuda") is there

    inside(check)


def test_default_devices() -> None:
    def check() -> None:
        with torch.device("cuda"):
            assert torch.ones(3).is_cuda
            assert torch.tensor([1]).is_cuda
            assert nn.Linear(3, 3).weight.is_cuda
            assert torch.ones(3, device="cpu").is_cpu
            assert not torch.from_numpy(np.ones(2)).is_cuda
        assert torch.ones(3).is_cpu
        torch.set_default_device("cuda")
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert torch.arange(3).is_cuda

    inside(check)
    assert torch.get_default_device() == torch.device("cpu")


def test_values_come_back_where_they_are_known() -> None:
    def check() -> None:
        positions = torch.arange(4, device="cuda")
        assert positions.max().item() == 3
        assert positions[positions > 1].cpu().tolist() == [2, 3]
        assert positions.cpu().numpy().sum() == 6
        unknown = torch.rand(2, 2, device="cuda")
        assert unknown.detach().cpu().numpy().shape == (2, 2)
        assert f"{unknown.sum():.2f}" == "0.00"
        assert float(unknown.sum()) == 0.0
        with pytest.raises(TypeError, match=r"Tensor\.cpu"):
            unknown.numpy()
        buffer = torch.ones(4, dtype=torch.int64)
        buffer.copy_(positions)
        assert buffer.tolist() == [0, 1, 2, 3]

    inside(check)


def test_a_module_keeps_its_parameters_when_it_moves() -> None:
    """As between CPU and CUDA: an optimizer made before ``.cuda()`` still has the parameters; tied ones stay tied."""

    def check() -> None:
        model, table = mlp(), nn.Embedding(10, 256)
        head = nn.Linear(256, 10, bias=False)
        head.weight = table.weight
        before = list(model.parameters())
        both = nn.ModuleList([table, head, nn.BatchNorm1d(4), model]).to("cuda", torch.float16)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert before[0].is_cuda
        assert before[0].dtype == torch.float16
        assert both[0].weight is both[1].weight
        assert both[2].running_mean.is_cuda
        twin = copy.deepcopy(model)
        assert isinstance(twin[0].weight, nn.Parameter)
        assert twin[0].weight.is_cuda
        assert twin[0].weight is not model[0].weight
        model.load_state_dict({name: value.cpu() for name, value in twin.state_dict().items()})
        assert not model.cpu()[0].weight.is_cuda

    inside(check)


def test_a_model_on_the_host_takes_no_memory() -> None:
    import resource

    def train() -> None:
        model = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(4)))  # 4 GiB in fp32
        model.to("cuda", torch.bfloat16)
        model(torch.randn(1, 16384, device="cuda", dtype=torch.bfloat16)).sum().backward()

    inside(lambda: None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    traced = trainfit.trace(train)
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert traced.breakdown.weights == 4 * 2 * 16384**2
    assert grown_bytes < 0.1 * 4 * 4 * 16384**2


def test_sides_do_not_mix() -> None:
    def train() -> None:
        mlp().cuda()(torch.randn(8, 256)).sum().backward()

    with pytest.raises(RuntimeError, match="same device"):
        trainfit.trace(train)


def test_memory_statistics_answer() -> None:
    def check() -> None:
        assert torch.cuda.memory_allocated() == 0
        first = torch.zeros(MIB, device="cuda")
        second = torch.zeros(MIB, device="cuda")
        del first
        assert torch.cuda.memory_allocated() == 4 * MIB
        assert torch.cuda.max_memory_allocated() == 8 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 4 * MIB
        assert torch.cuda.memory_reserved() == 20 * MIB  # requests of 1 to 10 MiB come from segments of 20
        del second
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        free, total = torch.cuda.mem_get_info()
        assert free == total == torch.cuda.get_device_properties(0).total_memory
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.ones(2, device="cuda").record_stream(torch.cuda.current_stream())
        end.record()
        assert start.elapsed_time(end) > 0

    inside(check)


def test_an_emptied_cache_counts() -> None:
    def train(empty: bool) -> None:
        model = mlp().cuda()
        held = torch.zeros(256 * MIB, device="cuda")
        del held
        if empty:
            torch.cuda.empty_cache()
        other = [torch.zeros(64 * MIB + 1, device="cuda") for _ in range(4)]
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        del other

    kept, emptied = (trainfit.trace(lambda empty=empty: train(empty)) for empty in (False, True))
    assert kept.peak_allocated_bytes == emptied.peak_allocated_bytes
    # 1 GiB kept holds three of the four; given back, the peak is the larger of both needs.
    assert kept.peak_reserved_bytes > emptied.peak_reserved_bytes + 150 * MIB


def test_autocast_and_checkpointing() -> None:
    def train(reentrant: bool | None) -> None:
        model = mlp().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            x = torch.randn(8, 256, device="cuda", requires_grad=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                assert torch.is_autocast_enabled("cuda")
                y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
                with torch.autocast(device_type="cuda", enabled=False):
                    assert (x @ x.t()).dtype == torch.float32
            assert y.dtype == torch.bfloat16
            optimizer.zero_grad()
            y.float().square().mean().backward()
            optimizer.step()

    plain, new, old = (trainfit.trace(lambda r=r: train(r)) for r in (None, False, True))
    forward = 2 * 8 * 256 * 256
    assert plain.model_flops == plain.hardware_flops == new.model_flops == old.model_flops
    assert old.hardware_flops == old.model_flops + 2 * forward
    # The new kind stops recomputing once it has what it needs: the last product is not needed.
    assert new.hardware_flops == new.model_flops + forward


# -- steps --------------------------------------------------------------------------------------------------------


def test_an_endless_loop_is_ended() -> None:
    seen: list[int] = []

    def train() -> None:
        model = mlp().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in itertools.count():
            seen.append(step)
            steps(model, optimizer, 1)

    assert trainfit.trace(train, steps=2).num_steps == 2
    assert seen == [0, 1, 2]  # the third ends as its forward begins


def test_one_step_is_first_and_steady() -> None:
    traced = inside(lambda: None)
    assert traced.num_steps == 1
    assert traced.phases.steady == traced.phases.first
    assert traced.step_s
    assert any("one optimizer step" in text for text in traced.assumptions)


def test_accumulation_two_optimizers_closures_and_none() -> None:
    forward_backward = 2 * 8 * 256 * 256 * (2 + 3)  # two products; their gradients, but none of the input

    def accumulate() -> None:
        model = mlp().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in range(12):
            model(torch.randn(8, 256, device="cuda")).square().mean().backward()
            if batch % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    def alternate() -> None:
        models = [mlp().cuda(), mlp().cuda()]
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                steps(model, optimizer, 1)

    def closure() -> None:
        model = mlp().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = model(torch.randn(8, 256, device="cuda")).square().mean()
            value.backward()
            return value

        for _ in range(3):
            optimizer.step(loss)

    def by_hand() -> None:
        model = mlp().cuda()
        for _ in range(3):
            model(torch.randn(8, 256, device="cuda")).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    def in_backward() -> None:
        model = mlp().cuda()
        optimizers: dict[Tensor, torch.optim.Optimizer] = {
            p: torch.optim.Adam([p]) for p in model.parameters()
        }

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            model(torch.randn(8, 256, device="cuda")).square().mean().backward()

    for train, times in ((accumulate, 4), (alternate, 2), (closure, 1), (by_hand, 1), (in_backward, 1)):
        traced = trainfit.trace(train, steps=3)
        assert (train.__name__, traced.model_flops) == (train.__name__, times * forward_backward)
        assert traced.num_steps == 3


def test_defaults_are_cudas() -> None:
    """AdamW without arguments works on lists on CUDA; clipping too."""

    def train() -> None:
        model = mlp(N).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(8, N, device="cuda")).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    traced = trainfit.trace(train)
    temporaries = [h.num_bytes for h in traced.holders if h.category == "temporary"]
    assert traced.peak_phase.endswith("optimizer")
    assert max(temporaries) >= 2 * SQUARE  # the square roots of both matrices' second moments at once


def test_a_data_loader_with_workers_and_pinned_memory() -> None:
    def train() -> None:
        data = TensorDataset(torch.randn(64, 256), torch.randint(0, 256, (64,)))
        loader = DataLoader(
            data, batch_size=8, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True
        )
        model = mlp().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for x, y in loader:
            assert x.is_cpu
            loss = nn.functional.cross_entropy(
                model(x.to("cuda", non_blocking=True)), y.cuda(non_blocking=True)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert trainfit.trace(train).num_steps == 3


def test_what_is_traced_otherwise_is_said() -> None:
    def train() -> None:
        model = mlp().cuda()
        y = model(torch.randn(8, 256, device="cuda"))
        y[y > 0].sum().backward()
        torch.save(model.state_dict(), "never-written.pt")

    said = " ".join(trainfit.trace(train).assumptions)
    assert "select everything" in said
    assert "torch.save" in said


# -- torch.compile ------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """exp(cos(sin(w))), summed: eager code keeps sin and exp for the backward; the compiler recomputes them from w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(N, N))

    def forward(self) -> Tensor:
        return self.w.sin().cos().exp().sum()


def train_chain(wrap: Callable[[nn.Module], Callable[[], Tensor]]) -> Traced:
    def train() -> None:
        chain = Chain().cuda()
        call = wrap(chain)
        optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
        for _ in range(2):
            call().backward()
            optimizer.step()
            optimizer.zero_grad()

    return trainfit.trace(train)


def in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


def its_forward(module: nn.Module) -> nn.Module:
    module.forward = torch.compile(module.forward)
    return module


@pytest.mark.parametrize("wrap", [lambda module: torch.compile(module), in_place, its_forward])
def test_compiled_code_keeps_what_the_compiler_keeps(wrap: Callable[[nn.Module], nn.Module]) -> None:
    eager, compiled = train_chain(lambda module: module), train_chain(wrap)
    assert eager.phases.first.forward - SQUARE == pytest.approx(3 * SQUARE, abs=MIB)  # sin, cos and exp
    assert compiled.phases.first.forward - SQUARE < 8 * MIB  # the sum's partial results
    assert compiled.phases.steady.backward - SQUARE < SQUARE + 8 * MIB  # the gradient, in one kernel
    assert any("Inductor" in text for text in compiled.assumptions)


class Branches(nn.Module):
    """Asks where it is, and says "cuda" in several ways."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.linear, self.broken = nn.Linear(256, 256), broken

    def forward(self, x: Tensor) -> Tensor:
        assert x.is_cuda
        assert x.device.type == "cuda"
        assert torch.cuda.is_available()
        if self.broken:
            torch._dynamo.graph_break()
        here = torch.arange(256, device="cuda") + torch.arange(256, device=x.device)
        moved = torch.ones(256).to("cuda") + torch.ones(256).cuda()
        x = self.linear(x) * here + moved
        assert x.is_cuda
        return x


@pytest.mark.parametrize("broken", [False, True])
def test_compiled_code_is_on_cuda(broken: bool) -> None:
    def train() -> None:
        model = Branches(broken).cuda()
        compiled: Any = torch.compile(model, fullgraph=not broken)
        assert compiled._orig_mod is model
        assert list(compiled.state_dict()) == ["_orig_mod.linear.weight", "_orig_mod.linear.bias"]
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
        for _ in range(2):
            y = compiled(torch.randn(8, 256, device="cuda"))
            assert y.is_cuda
            y.sum().backward()
            optimizer.step()

    traced = trainfit.trace(train)
    # The product and its weight's gradient: the input needs none.
    assert traced.model_flops == 2 * 2 * 8 * 256 * 256


def test_compiled_code_keeps_autocast() -> None:
    """As in the rotary embeddings of transformers: off for a part, then on again."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            first = self.first(x)
            with torch.autocast(device_type=x.device.type, enabled=False):
                middle = first.float().sin()
            return first, middle, self.second(middle)

    def train() -> None:
        model = Model().cuda()
        compiled = torch.compile(model)
        outer = torch.autocast("cuda", dtype=torch.bfloat16)
        assert outer.device == "cuda"

        @torch.compile
        def within(x: Tensor) -> Tensor:
            with outer:
                return compiled(x)

        for call in (within, compiled):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                outputs = call(torch.randn(8, 256, device="cuda"))
                assert torch.is_autocast_enabled("cuda")
            assert [t.dtype for t in outputs] == [torch.bfloat16, torch.float32, torch.bfloat16]
            assert not torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.float16
            outputs[2].float().sum().backward()

    trainfit.trace(train)


def test_what_is_not_compiled_is_said() -> None:
    def double(x: Tensor) -> Tensor:
        return 2 * x

    def said_of(**how: Any) -> str:
        def train() -> None:
            model = torch.compile(mlp().cuda(), **how)
            model(torch.randn(8, 256, device="cuda")).sum().backward()

        return " ".join(trainfit.trace(train).assumptions)

    def earlier() -> None:
        assert torch.equal(before(torch.ones(8, device="cuda")).cpu(), torch.full((8,), 2.0))

    before = torch.compile(double)

    def outside() -> None:
        torch.compile(double)(torch.ones(8, device="cuda"))

    assert "other than inductor" in said_of(backend="aot_eager")
    assert "Inductor's defaults" in said_of(mode="reduce-overhead")
    assert "compile" not in said_of(disable=True)
    assert "before the trace" in " ".join(inside(earlier).assumptions)
    assert "called outside a forward" in " ".join(inside(outside).assumptions)


def test_what_the_compiler_refuses_is_refused() -> None:
    def train() -> None:
        model = torch.compile(Branches(broken=True).cuda(), fullgraph=True)
        model(torch.randn(8, 256, device="cuda"))

    with pytest.raises(InputError, match="without torch.compile"):
        trainfit.trace(train)


# -- as CUDA does it ----------------------------------------------------------------------------------------------


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
    """Cross-entropy of bf16 logits: log_softmax in bf16, as T5 showed on an H200; a CPU casts the logits first."""

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


@pytest.mark.parametrize("scale", [None, 0.3, -0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_math_attention_is_pytorchs(scale: float | None, causal: bool) -> None:
    q, k, v = (torch.randn(2, heads, 16, 8, dtype=torch.float64) for heads in (4, 2, 2))
    mask = None if causal else torch.rand(2, 1, 16, 16) > 0.3
    ours = attend(Query(q, k, v, mask, 0.0, causal, True), "math", scale)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = nn.functional.scaled_dot_product_attention(
            q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=True
        )
    torch.testing.assert_close(ours, theirs)


def test_the_layout_changes_on_the_way_to_the_device() -> None:
    """From the host, contiguous, to channels_last: by way of a contiguous copy (copy_kernel_cuda)."""

    def peak(memory_format: torch.memory_format) -> int:
        found = []

        def run() -> None:
            torch.empty(64, 64, 64, 64).to("cuda", memory_format=memory_format)
            found.append(torch.cuda.max_memory_allocated())

        inside(run)
        return found[0]

    assert peak(torch.channels_last) == 2 * peak(torch.contiguous_format) == 2 * 4 * 64**4


def test_what_runs_for_real_is_small_and_said() -> None:
    """PyTorch has no fake kernel of geqrf."""
    traced = inside(lambda: torch.geqrf(torch.zeros(8, 8, device="cuda")) and None)
    assert any("geqrf" in text and "zeros" in text for text in traced.assumptions)
    with pytest.raises(InputError, match=r"geqrf.* only by running it"):
        inside(lambda: torch.geqrf(torch.zeros(2 * N, N, device="cuda")) and None)


def test_an_example_against_an_h200() -> None:
    """examples/hf_trainer.py, measured there with torch 2.11 (results/examples/h200.jsonl)."""
    spec = importlib.util.spec_from_file_location("hf_trainer", ROOT / "examples" / "hf_trainer.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rows = [json.loads(line) for line in (ROOT / "results" / "examples" / "h200.jsonl").open()]
    measured = next(row["measured"] for row in rows if row["command"] == "examples/hf_trainer.py --steps 7")
    args = argparse.Namespace(
        model="gpt2", tiny=False, checkpointing=False, seq=1024, batch_size=8, accumulate=1, bf16=True, steps=7,
        compile=False,
    )  # fmt: skip
    traced = trainfit.trace(lambda: example.train(args))
    assert traced.peak_allocated_bytes == pytest.approx(measured["peak_allocated_bytes"], rel=0.002)
    assert traced.peak_reserved_bytes == pytest.approx(measured["peak_reserved_bytes"], rel=0.02)


# -- nothing stays behind -----------------------------------------------------------------------------------------


def snapshot() -> dict[str, Any]:
    from torch._dynamo import convert_frame
    from torch._dynamo import utils as dynamo_utils
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._subclasses import fake_tensor
    from torch.amp.autocast_mode import autocast
    from torch.optim.optimizer import _foreach_supported_types

    return {
        "cuda": dict(vars(torch.cuda)),
        "accelerator": dict(vars(torch.accelerator)),
        "torch": {
            name: getattr(torch, name) for name in ("Generator", "save", "compile", "is_autocast_enabled")
        },
        "parameter": vars(nn.Parameter)["__new__"],
        "apply": nn.Module._apply,
        "fake": {
            name: vars(FakeTensor).get(name) for name in ("device", "is_cuda", "tolist", "record_stream")
        },
        "module": nn.Module.compile,
        "fallback": fake_tensor.run_fallback_kernel,
        "dynamo": (convert_frame._compile, TensorVariable.specialize, dynamo_utils.run_node),
        "autocast_dtype": (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")),
        "autocast": autocast.__init__,
        "loader": DataLoader._get_iterator,
        "types": list(_foreach_supported_types),
        "dtype": torch.get_default_dtype(),
        "random": torch.get_rng_state().tolist(),
    }


@pytest.fixture
def unchanged() -> Iterator[None]:
    before = snapshot()
    yield
    after = snapshot()
    assert {name for name in before if before[name] != after[name]} == set()
    assert type(nn.Linear(2, 2).weight) is nn.Parameter


@pytest.mark.usefixtures("unchanged")
def test_nothing_stays_behind() -> None:
    def train() -> None:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(5)
        inside_model: Any = torch.compile(mlp().cuda())
        steps(inside_model, torch.optim.SGD(inside_model.parameters(), lr=0.1), 1)

    trainfit.trace(train)


@pytest.mark.usefixtures("unchanged")
def test_nothing_stays_behind_a_failure() -> None:
    def train() -> None:
        mlp().cuda()(torch.randn(8, 256, device="cuda"))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trainfit.trace(train)


# -- refusals and text --------------------------------------------------------------------------------------------


def test_refusals() -> None:
    model = mlp()

    def moves_what_was_there() -> None:
        model.cuda()

    def stays_on_the_host() -> None:
        mlp()(torch.randn(8, 256)).sum().backward()

    def needs_data() -> None:
        y = mlp().cuda()(torch.randn(8, 256, device="cuda"))
        torch.unique(y).sum().backward()

    for step, words in (
        (moves_what_was_there, "build the model inside"),
        (stays_on_the_host, "no module with parameters"),
        (needs_data, "size only the data can tell"),
    ):
        with pytest.raises(InputError, match=words):
            trainfit.trace(step)
    for gpu, words in (("h20o", "h200"), ("mi300x", "compute capability")):
        with pytest.raises(InputError, match=words):
            trainfit.trace(train_one_matrix, gpu=gpu)
    with pytest.raises(InputError, match="steps"):
        trainfit.trace(train_one_matrix, steps=0)
    assert type(next(model.parameters())) is nn.Parameter


def test_it_prints() -> None:
    traced = trainfit.trace(train_one_matrix)
    text = str(traced)
    assert text.startswith(
        "train_one_matrix: 16.78M parameters, 16.78M trained; 3 steps traced\nFITS on h200:"
    )
    assert "optimizer" in text
    assert Traced.model_validate_json(traced.model_dump_json()) == traced
