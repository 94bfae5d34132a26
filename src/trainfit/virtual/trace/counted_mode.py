"""Dispatch modes of this package, whose cost on the host the tracer counts."""

from typing import Any, ClassVar

from torch.utils._python_dispatch import TorchDispatchMode


class CountedMode(TorchDispatchMode):
    """A mode that every call inside passes through, in Python."""

    num_entered: ClassVar[int] = 0
    """Of all threads."""

    def __enter__(self) -> Any:
        CountedMode.num_entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        CountedMode.num_entered -= 1
