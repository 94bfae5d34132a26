"""Snapshots of the process-wide state that tracing could change, and their differences."""

import gc
import importlib
import logging
import os
import random
import signal
import sys
import threading
import warnings
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils import _foreach_utils

from trainfit.virtual.trace.process_state import MOST_FROZEN_BY_PYTHON

MODULES = """
    torch torch.nn torch.nn.functional torch.nn.modules.module torch.nn.parameter torch.nn.init
    torch.autograd torch.autograd.graph torch.amp.autocast_mode torch.random torch.serialization torch._C
    torch.utils.data.dataloader torch.utils.checkpoint torch.utils.deterministic torch.utils._triton
    torch.utils._device torch.utils.flop_counter torch.utils._foreach_utils torch.cuda torch.cuda.memory
    torch.cuda.random torch.cuda.nvtx torch.accelerator torch.distributed
    torch.distributed.distributed_c10d torch.multiprocessing torch.optim.optimizer
    torch._subclasses.fake_tensor torch._dynamo.eval_frame torch._dynamo.convert_frame torch._dynamo.utils
    torch._dynamo.device_interface torch._inductor.scheduler torch._inductor.fx_passes.pad_mm
    torch._inductor.fx_passes.fuse_attention torch._inductor.fx_passes.joint_graph
    torch._inductor.runtime.triton_heuristics torch._inductor.graph transformers.modeling_utils
    transformers.masking_utils transformers.utils.import_utils transformers.utils.generic
    transformers.pytorch_utils transformers.initialization accelerate.state accelerate.accelerator
    torch.multiprocessing.spawn peft.mapping copy random os time builtins
""".split()
CLASSES = """
    torch.Tensor torch.nn.Parameter torch.nn.Module torch.Generator torch.optim.Optimizer
    torch.utils.data.DataLoader torch._subclasses.fake_tensor.FakeTensor
    torch._subclasses.fake_tensor.FakeTensorMode torch.amp.autocast_mode.autocast
    torch._inductor.scheduler.Scheduler torch._inductor.graph.GraphLowering
    torch._dynamo.variables.tensor.TensorVariable transformers.modeling_utils.PreTrainedModel
    torch.nn.parallel.DistributedDataParallel accelerate.state.PartialState
""".split()
CUDNN = ("enabled", "benchmark", "deterministic")
SDP = ("flash", "mem_efficient", "math", "cudnn")
CONFIGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
REGISTRIES = (
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS",
    "transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS",
)
COUNTED = frozenset({"__warningregistry__", "__builtins__", "__cached__", "reduce_op"})
"""Not compared; the last one warns of its deprecation when it is looked at."""
OVERRIDDEN = (
    "linear dropout softmax.int log_softmax.int rms_norm scaled_dot_product_attention mse_loss einsum".split()
)


def snapshot() -> dict[str, Any]:
    """By name, values that compare equal as long as nothing changed. What is not imported is left out."""
    return {**_torch(), **_compiler(), **_process(), **_attributes(), **_operators()}


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the changed values of ``before``, and attributes added to modules that were imported before."""
    found = {
        name: (value, after.get(name, "gone"))
        for name, value in before.items()
        if after.get(name, "gone") != value
    }
    owners = {name.partition("|")[0] for name in before if "|" in name}
    added = {
        name: ("absent", value)
        for name, value in after.items()
        if name not in before and "|" in name and name.partition("|")[0] in owners
    }
    return found | added


def _torch() -> dict[str, Any]:
    stack = range(torch._C._len_torch_function_stack())
    modules: Any = torch.nn.modules.module
    optimizers: Any = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it.
    hooks = [
        getattr(modules, name) for name in vars(modules) if name.startswith("_global_") and "hooks" in name
    ]
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "device context": getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        "torch random": torch.get_rng_state().numpy().tobytes(),
        "torch seed": torch.initial_seed(),
        "python random": random.getstate(),
        "numpy random": _numpy_random(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "multithreaded backward": torch._C._is_multithreading_enabled(),
        "autocast": [torch.is_autocast_enabled(one) for one in ("cpu", "cuda")],
        "autocast dtypes": [torch.get_autocast_dtype(one) for one in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "flush denormal": torch.tensor([1e-40]).mul(1.0).item(),
        "backends": {
            "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
            "reduced": (
                torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            ),
            "cudnn": [getattr(torch.backends.cudnn, one) for one in CUDNN],
            "sdp": [getattr(torch.backends.cuda, f"{one}_sdp_enabled")() for one in SDP],
            "sdp order": torch._C._get_sdp_priority_order(),
            "mkldnn": torch.backends.mkldnn.enabled,
        },
        "function modes": [id(torch._C._get_function_stack_at(index)) for index in stack],
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "dispatch keys": str(
            (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
        ),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "module hooks": [list(hook) for hook in hooks if hasattr(hook, "__len__")],
        "optimizer pre hooks": [*optimizers._global_optimizer_pre_hooks],
        "optimizer post hooks": [*optimizers._global_optimizer_post_hooks],
        "foreach types": [[*one._foreach_supported_types] for one in (_foreach_utils, optimizers)],
        "swap on conversion": (
            torch.__future__.get_overwrite_module_params_on_conversion(),
            torch.__future__.get_swap_module_params_on_conversion(),
        ),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }  # fmt: skip


def _numpy_random() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return kind, keys.tobytes(), *rest  # pyright: ignore[reportAttributeAccessIssue]


def _compiler() -> dict[str, Any]:
    imported: dict[str, Any] = {name: sys.modules[name] for name in CONFIGS if name in sys.modules}
    return {name: config.get_config_copy() for name, config in imported.items()}


def _process() -> dict[str, Any]:
    loggers = {None: logging.root} | {
        name: log for name, log in logging.root.manager.loggerDict.items() if isinstance(log, logging.Logger)
    }
    imported: dict[str, Any] = {
        f"logger {name}|": (log.level, log.disabled, log.propagate, [*map(id, (*log.handlers, *log.filters))])
        for name, log in loggers.items()
    }
    return {
        **imported,
        "logging disabled": logging.root.manager.disable,
        "warnings": (list(warnings.filters), id(warnings.showwarning), id(warnings.formatwarning)),
        "environment": dict(os.environ),
        "gc": (gc.isenabled(), gc.get_freeze_count() > MOST_FROZEN_BY_PYTHON, gc.get_threshold(),
            gc.get_debug(), list(map(id, gc.callbacks))),
        "import hooks": (list(map(id, sys.meta_path)), list(map(id, sys.path_hooks)), list(sys.path)),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "folder": os.getcwd(),
        "umask": _umask(),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "trace": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "hooks": (id(sys.excepthook), id(threading.excepthook), id(sys.unraisablehook), id(sys.displayhook)),
        "streams": (id(sys.stdin), id(sys.stdout), id(sys.stderr)),
        "threads alive": sorted(thread.name for thread in threading.enumerate()),
    }  # fmt: skip


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def _attributes() -> dict[str, Any]:
    owners = [(name, sys.modules[name]) for name in MODULES if name in sys.modules]
    owners += [(name, owner) for name in CLASSES if (owner := _find(name)) is not None]
    found: dict[str, Any] = {}
    for name, owner in owners:
        for key, value in list(vars(owner).items()):
            # A lazily imported module adds submodules and the names that they hold to its package; that is no
            # change.
            if key not in COUNTED and not isinstance(value, ModuleType) and _matters(value):
                found[f"{name}|{key}"] = id(value)
    for registry in REGISTRIES:
        if (held := _find(registry)) is not None:
            found[f"{registry}|"] = {key: id(value) for key, value in held.items()}
    return found


def _matters(value: Any) -> bool:
    return callable(value) or isinstance(value, property | staticmethod | classmethod | FunctionType)


def _operators() -> dict[str, Any]:
    """Whose kernels the dispatcher has: dumps name the file that registered each."""
    return {f"kernels of {name}": torch._C._dispatch_dump(f"aten::{name}") for name in OVERRIDDEN}
