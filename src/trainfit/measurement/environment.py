"""Environment of a measurement: device, driver, versions, code. Torch is used only inside the trial."""

import os
import platform
import re
import sys
from pathlib import Path

from trainfit.spec.host_memory import host_bytes
from trainfit.spec.provenance import commit, installed_version
from trainfit.spec.result import Environment

RECORDED_VARIABLES = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "NCCL_NVLS_ENABLE",
)  # fmt: skip


def host_environment(device: str) -> Environment:
    """Return the environment known without using ``device``: versions, platform, host memory."""
    return Environment(
        device=device,
        device_bytes=host_bytes(),
        cpu=cpu_name(),
        torch=installed_version("torch") or "absent",
        transformers=installed_version("transformers"),
        python=platform.python_version(),
        platform=f"{platform.system()}-{platform.machine()}-{'-'.join(platform.libc_ver())}",
        variables={name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
        commit=commit(),
    )


def cpu_name() -> str:
    """Return the processor's own name, and how many of its threads this process may use."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    name = found.group(1).strip() if found else platform.processor() or platform.machine()
    threads = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return f"{name} ({threads} threads)"


def runs_on_cuda(device: str) -> bool:
    """Return whether a step on this device (``auto``, ``cpu``, ``cuda``) runs on CUDA."""
    import torch

    return device != "cpu" and torch.cuda.is_available()
