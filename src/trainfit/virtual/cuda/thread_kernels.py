"""Dispatcher kernels for the tracing thread alone; other threads get the original."""

from collections.abc import Callable
from typing import Any

import torch

from trainfit.virtual.trace.exclusive import is_tracing_thread

Kernel = Callable[..., Any]  # Takes the dispatch key set, then the operation's arguments


def override(library: "torch.library.Library", name: str, kernel: Callable[..., Any], key: str) -> None:
    """Register a kernel for ``aten::name`` and a dispatch key, until the library is destroyed."""
    _register(library, name, lambda keyset, *args, **kwargs: kernel(*args, **kwargs), key)


def skip(library: "torch.library.Library", name: str, key: str) -> None:
    """Let the tracing thread's calls of ``aten::name`` fall through to the next dispatch key."""
    _register(library, name, _fall_through(name, key), key)


def _register(library: "torch.library.Library", name: str, kernel: Kernel, key: str) -> None:
    original = _original(name, key)

    def chosen(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(keyset, torch._C.DispatchKeySet):
            # A thread that trained while the kernel was registered called it without the set.
            args, keyset = (keyset, *args), torch._C._dispatch_keys(keyset)
        return (kernel if is_tracing_thread() else original)(keyset, *args, **kwargs)

    library.impl(name, chosen, key, with_keyset=True, allow_override=True)


def _original(name: str, key: str) -> Kernel:
    """Return the dispatcher's kernel; an autocast key without one falls through."""
    if key.startswith("Autocast") and not torch._C._dispatch_has_kernel_for_dispatch_key(
        f"aten::{name}", key
    ):
        return _fall_through(name, key)
    return torch.library.get_kernel(f"aten::{name}", key).call_boxed


def _fall_through(name: str, key: str) -> Kernel:
    # The set includes the Python dispatcher's key, which PyTorch's compiler uses.
    lower_keys = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    return lambda keyset, *args, **kwargs: op.redispatch(keyset & lower_keys, *args, **kwargs)
