"""What measurements import before they fork must leave CUDA uninitialised: a fork could not use it."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import torch

def initialized():
    raise AssertionError("CUDA is initialized by an import")

torch.cuda._lazy_init = initialized
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
torch.cuda.device_count = lambda: len(os.environ["CUDA_VISIBLE_DEVICES"])
torch.cuda.is_available = lambda: torch.cuda.device_count() > 0
from trainfit.measurement.fork_server import ready_to_fork
ready_to_fork("cpu")
from torch.utils._triton import has_triton
print("torchao" in sys.modules, torch.cuda.is_available(), has_triton.cache_info().currsize)
print(*({"bitsandbytes", "torch._inductor.runtime.benchmarking"} & set(sys.modules)))
"""


def test_importing_torchao_leaves_cuda_uninitialised() -> None:
    pytest.importorskip("torchao")
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    # bitsandbytes and Inductor would remember that they saw no GPU.
    assert printed.stdout.split() == ["True", "True", "0"], printed.stderr
    assert "Failed to load" not in printed.stderr
