"""How an operation of ours becomes one of PyTorch's: ``torch.ops.trainfit.NAME``, known to fake tensors and to compilers.

Declared in PyTorch's dispatcher itself: 10 us a call where ``torch.library.custom_op`` takes 50 to 90 (its autograd is in
Python, and no operation here has a gradient formula), and an optimizer makes up to three calls a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from trainfit.spec.errors import InputError
from trainfit.spec.hardware import LEAST_FOR_TRITON


def declare(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    mutates: Collection[str] = (),
    dry_run: Callable[..., Any] | None = None,
    kernel: Callable[..., str] | None = None,
) -> None:
    """Make ``torch.ops.trainfit.NAME``; once a name.

    Args:
        run: computes it on any device; its annotations are the operation's types.
        fake: gives results of the same shapes, dtypes and strides without values.
        mutates: the arguments that ``run`` writes into. Autograd hears of it, so a backward that still needs what was
            there says so.
        dry_run: for an operation that allocates more than its results on a GPU: as ``run``, given fake tensors and
            ``capability`` (that of the GPU), it makes and drops what ``run`` does there, in the same order. The virtual
            GPU finds it as the operation's attribute of that name (virtual/trace/dry_run.py).
        kernel: for attention: given the same, the name of the kernel that a GPU takes (virtual/cuda/attention_kernel.py).
    """
    operation = f"trainfit::{name}"
    schema = torch.library.infer_schema(run, mutates_args=tuple(mutates))
    torch.library.define(operation, schema, tags=(torch.Tag.pt2_compliant_tag,))
    places = [place for place, argument in enumerate(signature(run).parameters) if argument in mutates]

    def run_and_tell(*arguments: Any) -> Any:
        result = run(*arguments)
        torch.autograd.graph.increment_version([arguments[place] for place in places])
        return result

    torch.library.impl(operation, "default", run_and_tell if places else run)
    torch.library.register_fake(operation, fake)
    if dry_run is not None:
        getattr(torch.ops.trainfit, name).default.dry_run = dry_run
    if kernel is not None:
        getattr(torch.ops.trainfit, name).default.kernel = kernel


def refuse_second_derivative() -> None:
    """To be called in a backward whose own gradients nothing computes: without it they would count as zero, silently.

    In a compiled graph nothing tells whether that is asked for; there it is PyTorch's to refuse, and 2.11 does not always.

    Raises:
        RuntimeError: the gradients are asked for with ``create_graph=True``.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "trainfit's kernels have no second derivative, which create_graph=True asks for; take PyTorch's own: "
            "attention: sdpa or eager, loss: standard, block_kernels: standard"
        )


@cache
def has_module(name: str) -> bool:
    """Whether the module is installed; it is not imported, its packages are."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # One of the packages that it would be in.
        return False


def require_triton(device_type: str, field: str, value: str, instead: str) -> None:
    """Nothing, where the kernels can run: on CUDA they are Triton's.

    Raises:
        InputError: CUDA without Triton, or an NVIDIA GPU that it does not support.
    """
    if device_type == "cuda" and not has_module("triton"):
        raise InputError(
            "Triton is not installed", f"install triton, or use {instead}", field=field, value=value
        )
    is_nvidia = device_type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    if is_nvidia and torch.cuda.get_device_capability() < LEAST_FOR_TRITON:
        raise InputError("Triton does not support a GPU this old", f"use {instead}", field=field, value=value)
