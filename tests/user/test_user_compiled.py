"""``trainfit.trace`` of user code with ``torch.compile``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

import trainfit
from trainfit.catalog.load import gpu
from trainfit.spec.errors import InputError
from trainfit.spec.result import Estimate
from trainfit.user import user_gpu
from trainfit.virtual.compile.cuda_device import as_cuda
from trainfit.virtual.trace.process_state import no_function_modes
from user_training import MIB, SQUARE, N, inside, mlp


class Chain(nn.Module):
    """exp(cos(sin(w))), summed: eager code keeps sin and exp for the backward; the compiler recomputes them
    from w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(N, N))

    def forward(self) -> Tensor:
        return self.w.sin().cos().exp().sum()


def train_chain(wrap: Callable[[nn.Module], Callable[[], Tensor]]) -> Estimate:
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


def test_compiled_code_keeps_what_the_compiler_keeps() -> None:
    eager = train_chain(lambda module: module)
    assert eager.phases.first.forward - SQUARE == pytest.approx(3 * SQUARE, abs=MIB)  # sin, cos and exp
    for wrap in (lambda module: torch.compile(module), in_place, its_forward):
        compiled = train_chain(wrap)
        assert compiled.phases.first.forward - SQUARE < 8 * MIB  # the sum's partial results
        assert compiled.phases.steady.backward - SQUARE < SQUARE + 8 * MIB  # the gradient, in one kernel
        assert any("Inductor" in text for text in compiled.assumptions)


class Branches(nn.Module):
    """Checks its device and names "cuda" in several ways."""

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


def test_autocast_within_compiled_code() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return self.linear(x)

    def train() -> None:
        output = torch.compile(Model().cuda())(torch.randn(8, 256, device="cuda"))
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()

    trainfit.trace(train)


def test_code_that_is_not_compiled_is_reported() -> None:
    def double(x: Tensor) -> Tensor:
        return 2 * x

    def notes_of(**how: Any) -> str:
        def train() -> None:
            model = torch.compile(mlp().cuda(), **how)
            model(torch.randn(8, 256, device="cuda")).sum().backward()

        return " ".join(trainfit.trace(train).assumptions)

    def earlier() -> None:
        assert torch.equal(before(torch.ones(8, device="cuda")).cpu(), torch.full((8,), 2.0))

    before = torch.compile(double)

    def outside() -> None:
        torch.compile(double)(torch.ones(8, device="cuda"))

    assert "other than inductor" in notes_of(backend="aot_eager")
    assert "Inductor's defaults" in notes_of(mode="reduce-overhead")
    assert "compile" not in notes_of(disable=True)
    assert "before the trace" in " ".join(inside(earlier).assumptions)
    assert "called outside a forward" in " ".join(inside(outside).assumptions)


def test_code_that_dynamo_does_not_support_is_refused() -> None:
    def train() -> None:
        model = torch.compile(Branches(broken=True).cuda(), fullgraph=True)
        model(torch.randn(8, 256, device="cuda"))

    with pytest.raises(InputError, match="without torch.compile"):
        trainfit.trace(train)


def test_operations_on_fake_cuda_tensors_find_a_device_guard() -> None:
    """Python's operators enter one, which a CPU build does not have; Inductor's decompositions use them."""
    with user_gpu(gpu("h200"), prefers_cudnn=False, max_steps=1) as virtual, virtual.tracer.inside():
        traits = virtual.tracer.gpu
        assert traits is not None
        with as_cuda(traits), no_function_modes(), _disable_current_modes(), FakeTensorMode():
            assert (~torch.empty(2, dtype=torch.bool, device="cuda")).device.type == "cuda"
