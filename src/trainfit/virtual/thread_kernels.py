"""Kernels in PyTorch's dispatcher that run on the tracing thread alone; other threads get the kernel that was there before."""

from collections.abc import Callable
from typing import Any

import torch

from trainfit.virtual.exclusive import is_tracing_thread


def override(library: "torch.library.Library", name: str, kernel: Callable[..., Any], key: str) -> None:
    """Register a kernel for ``aten::name`` and a dispatch key, until the library is destroyed."""
    original = torch.library.get_kernel(f"aten::{name}", key)

    def chosen(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if is_tracing_thread():
            return kernel(*args, **kwargs)
        return original.call_boxed(keyset, *args, **kwargs)

    library.impl(name, chosen, key, with_keyset=True, allow_override=True)


def skip(library: "torch.library.Library", name: str, key: str) -> None:
    """Let the tracing thread's calls of ``aten::name`` fall through to the next dispatch key."""
    original = torch.library.get_kernel(f"aten::{name}", key)
    # It also has the Python dispatcher's key, which is in use while PyTorch compiles.
    lower_keys = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")

    def chosen(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if is_tracing_thread():
            return op.redispatch(keyset & lower_keys, *args, **kwargs)
        return original.call_boxed(keyset, *args, **kwargs)

    library.impl(name, chosen, key, with_keyset=True, allow_override=True)
