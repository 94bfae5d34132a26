"""What measurements import before they fork must leave CUDA uninitialised: a fork could not use it."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch

def initialized():
    raise AssertionError("CUDA is initialized by an import")

torch.cuda._lazy_init = initialized
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
from trainfit.measurement.fork_server import ready_to_fork
ready_to_fork("cpu")
import sys
print("torchao.prototype.mx_formats.kernels" in sys.modules)
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
try:
    flatten_tensor_state_dict({})
except Exception as error:
    print(type(error).__name__)
"""


def test_torchao_is_not_imported_by_transformers_and_is_when_it_is_used() -> None:
    pytest.importorskip("torchao")
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert printed.stdout.split() == ["False", "AssertionError"], printed.stderr
