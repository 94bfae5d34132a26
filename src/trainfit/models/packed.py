"""Several documents in one sequence: each attends to itself alone, and its positions begin anew.

The position ids [b, s] say where a document begins: where they do not rise by one. transformers derives the
mask from them; the native decoder computes it here. Shapes: b micro-batch, s sequence.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.models.layers import slow_layers
from trainfit.models.native.decoder import NativeDecoder
from trainfit.spec.errors import InputError
from trainfit.virtual.trace.exclusive import exclusive

REMEDY = "use data.pack: true or false"


def model_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the arguments of a model's forward but the labels."""
    return {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}


def keep_documents_apart(model: nn.Module) -> Callable[[], AbstractContextManager[object]] | None:
    """Let a model build masks of documents; return the context of its forward, None where it needs none.

    Raises:
        InputError: the model has layers to which a mask of documents cannot be given.
    """
    native = next((one for one in model.modules() if isinstance(one, NativeDecoder)), None)
    if native is not None:
        native.packs_documents = True
        return None
    hf: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    if not getattr(type(hf), "_supports_attention_backend", False):
        raise _refusal(f"{type(hf).__name__} has attention of its own, outside transformers' registry")
    if getattr(hf, "_is_stateful", False) or slow_layers(hf):
        raise _refusal("its state-space or linear-attention layers carry a state from document to document")
    return _with_masks


@contextmanager
def _with_masks() -> Iterator[None]:
    """Let transformers take every sequence for packed.

    Its own function tests the positions' values: that waits for the device in every forward, and the memory
    of a step would depend on the data. The function is process-wide, so traces in other threads wait.
    """
    import transformers.masking_utils as masking_utils

    was_asked = False

    def found(position_ids: Tensor) -> Tensor:
        nonlocal was_asked
        was_asked = True
        return documents_of(position_ids)

    with exclusive():
        original = masking_utils.find_packed_sequence_indices
        masking_utils.find_packed_sequence_indices = found
        try:
            yield
        finally:
            masking_utils.find_packed_sequence_indices = original
    if not was_asked:
        raise _refusal("transformers builds no mask of documents for this model")


def documents_of(position_ids: Tensor) -> Tensor:
    """Return the number of each token's document within its sequence, int64 [b, s]."""
    first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)


def _refusal(problem: str) -> InputError:
    return InputError(problem, REMEDY, field="data.pack", value="documents")
