"""Devices in user code under ``trainfit.trace``."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainfit
from trainfit.spec.errors import InputError
from user_training import MIB, N, inside, mlp, steps


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
        assert torch.device(0) == torch.device(device=0) == torch.device(type="cuda", index=0)
        assert torch.device("cpu") == torch.device(device="cpu")
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
        with torch.device(0):
            assert torch.ones(3).is_cuda
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
    """As between CPU and CUDA: an optimizer made before ``.cuda()`` still has the parameters; tied ones stay
    tied."""

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
    with pytest.raises(InputError, match=r"geqrf.* no fake kernel"):
        inside(lambda: torch.geqrf(torch.zeros(2 * N, N, device="cuda")) and None)


# -- metrics of training frameworks: deep copies, sums on the device, results on the host ------------------


class Metric(nn.Module):
    """A running mean as torchmetrics, and so Lightning's ``self.log``, keeps it: states are copies of default
    tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.defaults = {"value": torch.tensor(0.0), "count": torch.tensor(0)}
        self.device = torch.device("cpu")
        self.reset()

    def reset(self) -> None:
        self.states = {
            name: default.detach().clone().to(self.device)
            for name, default in copy.deepcopy(self.defaults).items()
        }

    def update(self, value: torch.Tensor, count: int) -> None:
        self.device = value.device
        self.states = {name: state.to(value.device) for name, state in self.states.items()}
        self.states["value"] = self.states["value"] + value.detach().clone() * count
        self.states["count"] += count


def test_metrics_are_copied_and_read() -> None:
    def check() -> None:
        metrics = {"loss": Metric(), "accuracy": Metric()}
        for _ in range(2):
            loss = nn.Linear(8, 1).cuda()(torch.randn(4, 8, device="cuda")).mean()
            for metric in metrics.values():
                metric.update(loss, 4)
        kept = copy.deepcopy(metrics)
        assert kept["loss"].states["value"].device.type == "cuda"
        assert kept["loss"].defaults["value"].device.type == "cpu"
        assert kept["loss"].states["count"].item() == 8
        results = {name: (m.states["value"] / m.states["count"]).cpu() for name, m in kept.items()}
        assert isinstance(results["loss"].item(), float)
        metrics["loss"].reset()
        assert metrics["loss"].states["count"].item() == 0

    inside(check)


def test_host_tensors_are_copied_with_their_values() -> None:
    outside = torch.arange(3)

    def check() -> None:
        value = torch.tensor([1.5, 2.5], requires_grad=True)
        value.grad = torch.ones(2)
        held: dict[str, Any] = {
            "value": value,
            "again": value,
            "outside": outside,
            "low": torch.zeros(2, dtype=torch.bfloat16),
        }
        held["view"] = torch.arange(6.0).view(2, 3)[:, 1]
        copied = copy.deepcopy(held)
        assert copied["value"] is copied["again"] is not value
        assert copied["value"].tolist() == [1.5, 2.5]
        assert copied["value"].requires_grad
        assert copied["value"].grad.tolist() == [1.0, 1.0]
        assert copied["view"].tolist() == [1.0, 4.0]
        copied["outside"][0] = 9
        assert outside.tolist() == [0, 1, 2]
        assert copied["low"].dtype == torch.bfloat16
        assert copy.copy(value).tolist() == [1.5, 2.5]
        assert pickle.loads(pickle.dumps(value.detach())).tolist() == [1.5, 2.5]

    inside(check)


def test_backward_inside_a_backward() -> None:
    """Reentrant checkpointing runs the engine inside the engine."""
    devices = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            devices.append(torch.empty(2, device=gradients[0].device).device.type)
            return 2 * gradients[0]

    def check() -> None:
        x = torch.ones(2, device="cuda", requires_grad=True)
        checkpoint(Twice.apply, x, use_reentrant=True).sum().backward()

    inside(check)
    assert devices == ["cuda"]


def test_products_may_have_a_wider_dtype_than_their_factors() -> None:
    """With ``out_dtype``, as TRL's loss adds up products of bf16 in fp32."""
    b, m, n, k = 3, 4, 5, 6

    def check() -> None:
        a = torch.ones(b, m, k, device="cuda", dtype=torch.bfloat16)
        w = torch.ones(b, k, n, device="cuda", dtype=torch.bfloat16)
        total = torch.zeros(b, m, n, device="cuda")
        wide = torch.float32
        for made in (torch.bmm(a, w, out_dtype=wide), torch.baddbmm(total, a, w, out_dtype=wide)):
            assert (made.shape, made.dtype, made.is_cuda) == ((b, m, n), wide, True)
        for made in (torch.mm(a[0], w[0], out_dtype=wide), torch.addmm(total[0], a[0], w[0], out_dtype=wide)):
            assert (made.shape, made.dtype) == ((m, n), wide)
        assert torch.addmm(total[0], a[0], w[0], out_dtype=wide, out=total[1]) is not None

    inside(check)
