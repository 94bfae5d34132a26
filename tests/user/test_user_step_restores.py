"""``trainfit.trace`` restores everything that it replaces."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader

import trainfit
from user_training import mlp, steps


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
