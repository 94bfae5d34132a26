"""What a stack of calls says about an allocation: its category, and the line of the user's code that made it.

Rules go by files and functions of PyTorch, transformers and common trainers. Backwards run in autograd's own
thread, whose stacks have no Python frames.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from trainfit.explanation.snapshot.read import Frame
from trainfit.ledger.snapshot import CATEGORY, FILE, PHASE
from trainfit.spec.result import CATEGORIES

Made = Literal["weights", "optimizer", "activations", "backward", "communication", "workspace", "other"]

LIBRARIES = re.compile(
    r"(^|-packages/)(torch|triton)/|/(contextlib|functools|threading)\.py$|^<frozen |^<string>"
)
"""Paths of files whose lines say little about who allocates."""
WEIGHT_MAKERS = frozenset(
    """
    __init__ _apply convert _load_from_state_dict load_state_dict from_pretrained reset_parameters to_empty
    _load_parameter_into_model _load_state_dict_into_meta_model set_module_tensor_to_device init_weights
    """.split()
)
COMMUNICATION_FILES = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
)  # fmt: skip
RECOMPUTES = ("recompute_fn", "unpack_hook", "backward")
"""Functions of torch/utils/checkpoint.py that run in the backward."""
BACKWARD_FILES = ("torch/autograd/__init__.py", "torch/autograd/graph.py", "torch/_tensor.py")
WORKSPACES = ("getWorkspaceData", "getCUDABlasLtWorkspace", "getChosenWorkspaceSize", "allocate_cublas")
NO_PYTHON = "autograd's thread (no Python frames)"
NOT_RECORDED = "before the history began"
LIBRARY_WORKSPACE = "library workspace"


def is_python(frame: Frame) -> bool:
    """Return whether a frame is Python's; C++ frames are recorded with ``stacks="all"``."""
    return frame.file.endswith(".py") or frame.file.startswith("<")


def made_by(stack: Iterable[Frame]) -> Made:
    """Return what kind of memory the calls of a stack make, the innermost first."""
    frames = list(stack)
    if any(frame.function.partition("(")[0].endswith(WORKSPACES) for frame in frames if not is_python(frame)):
        return "workspace"
    calls = [frame for frame in frames if is_python(frame)]
    if not calls:
        return "backward"
    found: list[tuple[Made, Callable[[Frame], bool]]] = [
        ("optimizer", _updates),
        ("communication", lambda frame: frame.file.endswith(COMMUNICATION_FILES)),
        (
            "backward",
            lambda frame: frame.file.endswith("torch/utils/checkpoint.py") and frame.function in RECOMPUTES,
        ),
        (
            "backward",
            lambda frame: frame.file.endswith(BACKWARD_FILES) and frame.function in ("backward", "grad"),
        ),
        ("activations", lambda frame: frame.function in ("forward", "_call_impl")),
        ("weights", lambda frame: frame.function in WEIGHT_MAKERS),
    ]
    for kind, rule in found:
        if any(map(rule, calls)):
            return kind
    return "other"


def _updates(frame: Frame) -> bool:
    is_optimizer = "/optim/" in frame.file or "optimizer" in frame.file.rpartition("/")[2]
    return is_optimizer and frame.function.startswith(("step", "_init_group", "_init_state", "init_state"))


class Known(NamedTuple):
    """What the frames of an exported ledger say of an allocation (``ledger/snapshot.py``)."""

    category: str
    phase: str
    """Without its step; empty: a library's workspace."""


def known_of(stack: Sequence[Frame]) -> Known | None:
    """Return what an exported ledger's frames say; None: a stack of calls."""
    if not stack or stack[-1].file != FILE or not stack[-1].function.startswith(CATEGORY):
        return None
    category = stack[-1].function.removeprefix(CATEGORY)
    phases = [one.function for one in stack if one.function.startswith(PHASE)]
    phase = phases[-1].removeprefix(PHASE).rpartition(".")[2] if phases else ""
    return Known(category, phase) if category in CATEGORIES else None


def place(stack: Sequence[Frame]) -> str:
    """Return the innermost line outside PyTorch: ``modeling_llama.py:178 forward``.

    Of an exported ledger, the module and the operation.
    """
    if known_of(stack) is not None:
        inner = [one.function for one in stack if not one.function.startswith((CATEGORY, PHASE))]
        return " ".join(filter(None, inner[1::-1])) if inner else LIBRARY_WORKSPACE
    calls = [frame for frame in stack if is_python(frame)]
    if not calls:
        return NO_PYTHON
    own = (frame for frame in calls if not LIBRARIES.search(frame.file))
    frame = next(own, calls[0])
    return f"{'/'.join(frame.file.split('/')[-2:])}:{frame.line} {frame.function}"
