"""Causal language models of text types that transformers has within multimodal models alone.

Their decoder gets an output layer, as in the multimodal model's class, which holds the towers too.
"""

import functools
import importlib
from typing import Any

from torch import Tensor, nn


@functools.cache
def text_class(kind: type[Any]) -> type[Any] | None:
    """Return a causal language model of a text config's class; None: it is of no such model."""
    from transformers.modeling_utils import PreTrainedModel

    if not _is_of_multimodal(kind):
        return None
    module = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    classes = [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, PreTrainedModel)
        and one.__module__ == module.__name__
        and one.config_class is kind
    ]
    for one in classes:
        if one.__name__.endswith("ForCausalLM"):
            return one
    bodies = [one for one in classes if one.__name__.endswith("Model") and "PreTrained" not in one.__name__]
    return _with_head(bodies[0], kind) if len(bodies) == 1 else None


def _is_of_multimodal(kind: type[Any]) -> bool:
    """Return whether a config class is that of the text part of a model of transformers that writes text."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    package = kind.__module__.rpartition(".")[0]
    return any(
        getattr(CONFIG_MAPPING[outer], "sub_configs", {}).get("text_config") is kind
        for outer in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if CONFIG_MAPPING[outer].__module__.startswith(package)
    )


def _with_head(body: type[Any], kind: type[Any]) -> type[Any]:
    """Return the class of a decoder with an output layer; of the decoder's module, whose blocks it has."""
    from transformers.generation import GenerationMixin

    name = f"{body.__name__.removesuffix('Model')}ForCausalLM"
    content = {"__module__": body.__module__, "config_class": kind, "body_class": body}
    content["_tied_weights_keys"] = {"lm_head.weight": "model.embed_tokens.weight"}
    return type(name, (TextWithHead, body.__mro__[1], GenerationMixin), content)  # PEFT asks for the last


class TextWithHead:
    """What all such classes have: the decoder ``model``, and the output layer ``lm_head``."""

    body_class: type[Any]
    config: Any
    loss_function: Any

    def __init__(self, config: Any):
        super().__init__(config)  # pyright: ignore[reportCallIssue] - transformers' PreTrainedModel
        self.model = self.body_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """Return the loss where ``labels`` [b, s] are given, and the logits [b, s, v]."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        hidden_bse = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits_bsv = self.lm_head(hidden_bse)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_bsv, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits_bsv)
