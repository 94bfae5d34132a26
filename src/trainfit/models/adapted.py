"""PEFT models on real and fake parameters."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.spec.optional import optional
from trainfit.virtual.trace.exclusive import exclusive, replaced


def wrap(model: nn.Module, config: Any, **options: Any) -> nn.Module:
    """Wrap a model by PEFT; its own parameters are frozen.

    Raises:
        ValueError: PEFT refuses ``config``.
    """
    peft: Any = optional("peft", "peft", field="adapter.kind")
    with fake_parameters_convert(), warnings.catch_warnings():
        # PEFT uses a name that transformers 5.23 deprecates.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # See ``untied``.
        # ``untied`` says so in one line.
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        base: Any = model
        return peft.get_peft_model(base, config, **options)


def untied(model: nn.Module) -> tuple[str, ...]:
    """Return a line if an adapter trains a tied weight in one of the modules that share it."""
    wrapped: dict[str, nn.Module] = {}
    shared = Counter[int]()
    for name, module in model.named_modules():
        inner = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
        if isinstance(inner, nn.Module):
            wrapped[name.rpartition(".")[2]] = inner
        weight = module._parameters.get("weight")
        shared[id(weight)] += weight is not None
    apart = [name for name, inner in wrapped.items() if shared[id(inner._parameters.get("weight"))] > 1]
    if not apart:
        return ()
    return (
        f"the model ties its embeddings, and the adapter on {' and '.join(apart)} changes one side: "
        "merged, the model needs tie_word_embeddings: false",
    )


@contextmanager
def fake_parameters_convert() -> Iterator[None]:
    """Make ``module.to(...)`` replace fake parameters by converted ones.

    PEFT creates adapters in fp32 and converts them to the base's dtype. torch 2.11 to 2.13 converts fake
    parameters only by ``swap_tensors``, which fails because FakeTensorMode's memo holds weak references to
    them.
    """
    with exclusive(), replaced(nn.Module, "_apply", _converting(nn.Module._apply)):
        yield


def _converting(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    def convert(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        own = self._parameters
        if not any(isinstance(parameter, FakeTensor) for parameter in own.values()):
            return ordinary(self, fn, recurse)
        for name, parameter in own.items():
            if parameter is not None:
                with torch.no_grad():
                    own[name] = nn.Parameter(fn(parameter), requires_grad=parameter.requires_grad)
        return self

    return convert


def convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the module's parameters to ``dtype``."""
    with fake_parameters_convert():
        module.to(dtype)
