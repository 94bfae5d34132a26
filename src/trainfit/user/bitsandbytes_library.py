"""bitsandbytes in scripts on the virtual GPU: its operators, its optimizers, and managed memory.

See ``virtual/bitsandbytes_library.py``. Paged optimizer states are managed memory, which is counted as memory
of the host.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from trainfit.spec.errors import InputError
from trainfit.user.tracer import UserTracer
from trainfit.virtual.bitsandbytes_library import NAME, NativeLibrary, kernel_key, replaced_library
from trainfit.virtual.trace.scope import NO_SCOPE
from trainfit.virtual.trace.tensors import tensors_of

PAGED = (
    "paged optimizer states of bitsandbytes: managed memory, counted as memory of the host; on a GPU they "
    "stay on the device as long as there is room"
)


@contextmanager
def bitsandbytes_library(tracer: UserTracer) -> Iterator["BitsAndBytes"]:
    """Let bitsandbytes be imported and run on the virtual GPU; without effect if it is not imported."""
    logger = logging.getLogger(NAME)
    level = logger.level
    with ExitStack() as stack:
        # Its binaries for CUDA cannot be loaded without CUDA, and are not needed.
        stack.callback(logger.setLevel, level)
        logger.setLevel(logging.CRITICAL + 1)
        library = BitsAndBytes(tracer, stack)
        tracer.libraries[NAME] = library.run
        yield library


class BitsAndBytes:
    """Runs bitsandbytes' operators; from the first use on its native library is ``NativeLibrary``."""

    def __init__(self, tracer: UserTracer, stack: ExitStack):
        self._tracer, self._stack = tracer, stack
        self._is_ready = False
        self._managed: list[np.ndarray[Any, Any]] = []

    def before_optimizer(self, optimizer: Any) -> None:
        """Get ready for an optimizer of bitsandbytes: its paged states call the native library directly."""
        if any(base.__module__.partition(".")[0] == NAME for base in type(optimizer).__mro__):
            self.get_ready()

    def get_ready(self) -> None:
        """Replace the native library and bitsandbytes' cached facts of a GPU, until the trace ends."""
        if self._is_ready:
            return
        self._is_ready = True
        self._stack.enter_context(
            replaced_library(NativeLibrary(self._tracer.launched, self._managed_memory))
        )

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on device tensors."""
        self.get_ready()
        if "optimizer_update" in func._schema.name:
            self._update(func, args, kwargs)
            return None
        kernel = kernel_key(func)
        if kernel is None:
            raise InputError(
                f"bitsandbytes has no CUDA kernel of {func}", "use another of its functions", field="step",
                value=str(func),
            )  # fmt: skip
        with self._tracer.python_body():
            return func.redispatch(torch._C.DispatchKeySet(kernel), *args, **kwargs)

    def _update(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record an optimizer's kernel: it reads the gradient, reads and writes the weight and the states."""
        gradient, *others = tensors_of((args, kwargs))
        with torch._C.DisableTorchFunction(), self._tracer.inside():
            num_bytes = gradient.nbytes + 2 * sum(t.nbytes for t in others)
            dtype = str(gradient.dtype).removeprefix("torch.")
        self._tracer.launched(str(func), num_bytes, dtype)

    def _managed_memory(self, size: Any) -> int:
        """Return the address of memory of the host, which takes none before it is written."""
        num_bytes = getattr(size, "value", size)
        memory = np.zeros(num_bytes, dtype=np.uint8)
        self._managed.append(memory)
        with _disable_current_modes():
            self._tracer.own_host(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), NO_SCOPE)
        self._tracer.notes.add(PAGED)
        return int(memory.ctypes.data)
