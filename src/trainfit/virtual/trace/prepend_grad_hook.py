"""A hook that hears of a parameter's gradient before the hooks that are there already."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle


def prepend_grad_hook(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """``parameter.register_post_accumulate_grad_hook``, before a technique's own hook, which may use the gradient up.

    The engine walks the hooks in the order in which they were put in (``PyDict_Next`` in torch/csrc/autograd/
    python_hook.cpp); an OrderedDict's own order, which ``move_to_end`` changes, it does not see.
    """
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: Any = parameter._post_accumulate_grad_hooks
    put_in = list(hooks.items())
    hooks.clear()
    hooks.update([put_in[-1], *put_in[:-1]])
    return handle
