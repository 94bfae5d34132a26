"""Declare the custom operators ``torch.ops.trainfit.NAME`` in PyTorch's dispatcher.

A call takes 10 us on the host; through ``torch.library.custom_op``, whose autograd is in Python, 50 to 90.
Optimizers make up to three per weight.
"""

import os
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from trainfit.spec.errors import InputError
from trainfit.spec.hardware import LEAST_FOR_TRITON


def declare(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    triton: Callable[..., Any] | None = None,
    mutates: Collection[str] = (),
    dry_run: Callable[..., Any] | None = None,
    kernel: Callable[..., str] | None = None,
) -> None:
    """Define ``torch.ops.trainfit.NAME``; call it once per name.

    Args:
        run: Implementation for any device; its annotations are the operator's schema.
        fake: Returns results of the same shapes, dtypes and strides without values.
        triton: Implementation for the tensors that ``uses_triton`` selects.
        mutates: Names of the arguments that are written in place; their version counters are incremented.
        dry_run: For an operator that allocates scratch on a GPU. It takes fake tensors and ``capability``
            (that of the GPU) and allocates and frees what ``run`` does there, in the same order. The virtual
            GPU calls the attribute of that name (virtual/trace/dry_run.py).
        kernel: For attention, with the same arguments: the name of the kernel that a GPU runs
            (virtual/cuda/attention_kernel.py).
    """
    operator = f"trainfit::{name}"
    schema = torch.library.infer_schema(run, mutates_args=tuple(mutates))
    torch.library.define(operator, schema, tags=(torch.Tag.pt2_compliant_tag,))
    mutated = [position for position, argument in enumerate(signature(run).parameters) if argument in mutates]

    def dispatch(*arguments: Any) -> Any:
        chosen = triton if triton is not None and uses_triton(arguments[0]) else run
        result = chosen(*arguments)
        if mutated:
            torch.autograd.graph.increment_version([arguments[position] for position in mutated])
        return result

    torch.library.impl(operator, "default", dispatch)
    torch.library.register_fake(operator, fake)
    overload = getattr(torch.ops.trainfit, name).default
    overload.fake = fake  # For the virtual GPU (virtual/cuda/fake_impls.py).
    if dry_run is not None:
        overload.dry_run = dry_run
    if kernel is not None:
        overload.kernel = kernel


def triton_kernels(module: str) -> Any:
    """Import ``trainfit.MODULE`` of Triton kernels at a launch, because Triton need not be installed."""
    return import_module(f"trainfit.{module}")


def uses_triton(x: Tensor) -> bool:
    """Return whether an operator on this tensor runs its Triton kernel: on CUDA, except in fp64."""
    return x.is_cuda and x.dtype != torch.float64


@cache
def interprets_triton() -> bool:
    """Return whether Triton's kernels run in its interpreter, on tensors of any device.

    Triton reads ``TRITON_INTERPRET`` where a kernel is defined, so this inspects a kernel, not the variable.
    """
    if not os.environ.get("TRITON_INTERPRET") or not has_module("triton"):
        return False
    from triton.runtime.interpreter import InterpretedFunction

    kernel = triton_kernels("kernels.flash_attention.triton").attention_forward_kernel
    return isinstance(kernel, InterpretedFunction)


def refuse_second_derivative() -> None:
    """Refuse ``create_graph=True`` in a backward without a derivative, which autograd would take as zero.

    A compiled graph does not expose the flag. There the refusal is PyTorch's, and 2.11 misses some cases.

    Raises:
        RuntimeError: The backward runs with ``create_graph=True``.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "trainfit's kernels have no second derivative, which create_graph=True needs; use PyTorch's own: "
            "attention: sdpa or eager, loss: standard, block_kernels: standard"
        )


@cache
def has_module(name: str) -> bool:
    """Return whether a module is installed, without importing it (its parent packages are imported)."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # One of its parent packages is missing.
        return False


def require_triton(device_type: str, field: str, value: str, instead: str) -> None:
    """Check that Triton kernels can run on this type of device.

    Raises:
        InputError: CUDA without Triton, or an NVIDIA GPU that Triton does not support.
    """
    if device_type == "cuda" and not has_module("triton"):
        raise InputError(
            "Triton is not installed", f"install triton, or use {instead}", field=field, value=value
        )
    is_nvidia = device_type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    if is_nvidia and torch.cuda.get_device_capability() < LEAST_FOR_TRITON:
        raise InputError("Triton does not support a GPU this old", f"use {instead}", field=field, value=value)
