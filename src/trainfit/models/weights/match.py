"""Match the tensors of a folder with a model's layout: by name, shape and dtype, before a value is read.

A folder may name a tensor otherwise than transformers saves it now. These are matched too: names of former
releases, names with or without the prefix of the inner model (``transformer.``, ``model.``), and those of a
text model within a multimodal one (``language_model.``), whose other parts are left out.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from trainfit.models.native.decoder import NativeDecoder
from trainfit.models.weights.folder import Header, WeightsFolder, own_config
from trainfit.models.weights.layout import Stored, layout, stored_at, tied
from trainfit.spec.errors import InputError

NAMES_SHOWN = 3
OTHER_CONFIG = "use the config.json that belongs to these weights"
FLOATING = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
"""safetensors' name of a floating dtype that is read -> the name in messages."""
RECOMPUTED = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\.attn\.(masked_)?bias$|\.attention\.bias$"
)
"""Tensors of old files that a model computes from its config."""
WITHIN = re.compile(r"^(?:model\.)?(?:language_model|text_model|llm)\.(?:model\.)?")
"""Prefix of a text model's tensors within a multimodal one."""
OF_QUANTISED = re.compile(
    r"(qweight|qzeros|g_idx|_scale|scale_inv|scales|absmax|quant_map|quant_state\.\S+|SCB|_blocks|qdata)$"
)
"""Names of tensors next to quantised weights."""


@dataclass(frozen=True)
class Matched:
    """The tensors of a folder that fill a model."""

    folder: WeightsFolder
    parts: dict[str, list[Stored]]
    """Parameter or persistent buffer -> the folder's tensors in it, by their names in the folder."""
    again: dict[str, str] = field(default_factory=dict)
    """Tensor of the folder that a tied parameter has again -> the tensor that is read."""
    left_out: tuple[str, ...] = ()
    """Tensors of a multimodal folder's other parts."""

    def headers(self) -> Iterator[tuple[Stored, Header]]:
        """Yield every tensor that is read."""
        for parts in self.parts.values():
            for stored in parts:
                yield stored, self.folder.tensors[stored.name]


def matched(model: nn.Module, folder: WeightsFolder) -> Matched:
    """Return which tensors of the folder fill a bare model, which may be on ``meta``.

    Raises:
        InputError: tensors are missing or unexpected, or have another shape or no floating dtype.
    """
    wanted = {stored.name: stored for stored in layout(model)}
    names = _Names(model, wanted)
    found: dict[str, str] = {name: name for name in folder.tensors if name in wanted}
    whole: dict[str, str] = {}
    again: dict[str, str] = {}
    left_out: list[str] = []
    is_within = any(WITHIN.match(name) for name in folder.tensors) and not any(map(WITHIN.match, wanted))
    unexpected: list[str] = []
    for name in folder.tensors:
        if name in wanted:
            continue
        renamed = names.of(WITHIN.sub("model.", name) if is_within and WITHIN.match(name) else name)
        renamed = names.of(name.removeprefix("language_model.")) if renamed is None else renamed
        if renamed in wanted and renamed not in found:
            found[renamed] = name
        elif renamed in names.tied:
            again[name] = names.tied[renamed]
        elif renamed is not None and renamed in names.parameters:
            whole[renamed] = name
        elif is_within and not WITHIN.match(name):
            left_out.append(name)
        elif not names.is_ignored(name):
            unexpected.append(name)
    parts = _parts(names.parameters, wanted, found, whole)
    for name, parameter in again.items():  # Some saves kept the other name of a tied parameter.
        if parameter not in parts:
            parts[parameter] = [stored_at(name, parameter, names.parameters[parameter])]
    missing = [name for name, stored in wanted.items() if stored.parameter not in parts and name not in found]
    _refuse_names(folder, missing, unexpected)
    first = {stored.parameter: stored.name for own in parts.values() for stored in own}
    again = {name: first[one] for name, one in again.items() if first.get(one, name) != name}
    complete = Matched(folder, parts, again, tuple(left_out))
    _check_forms(complete, names.parameters)
    return complete


def _parts(
    parameters: dict[str, Tensor], wanted: dict[str, Stored], found: dict[str, str], whole: dict[str, str]
) -> dict[str, list[Stored]]:
    """Return the parameters all of whose tensors the folder has, or that it has whole."""
    parts: dict[str, list[Stored]] = {}
    lacking: set[str] = set()
    for name, stored in wanted.items():
        if name in found:
            parts.setdefault(stored.parameter, []).append(stored._replace(name=found[name]))
        else:
            lacking.add(stored.parameter)
    for parameter in lacking:
        parts.pop(parameter, None)
        if parameter in whole:
            parts[parameter] = [stored_at(whole[parameter], parameter, parameters[parameter])]
    return parts


class _Names:
    """Names that a folder may have for a model's tensors."""

    def __init__(self, model: Any, wanted: dict[str, Stored]):
        self.tied = tied(model)
        self.parameters = {name: one for name, one in model.state_dict().items() if name not in self.tied}
        self._known = {*wanted, *self.parameters, *self.tied}
        self._prefix = "model." if isinstance(model, NativeDecoder) else f"{model.base_model_prefix}."
        self._renamings = [] if isinstance(model, NativeDecoder) else _renamings(model)
        own = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [RECOMPUTED, *map(re.compile, own)]

    def of(self, name: str) -> str | None:
        """Return the name here of a folder's tensor: of the layout, or of a whole parameter."""
        renamed = name
        for rename in self._renamings:
            renamed = rename(renamed)
        for one in (name, renamed):
            for candidate in (one, f"{self._prefix}{one}", one.removeprefix(self._prefix)):
                if candidate in self._known:
                    return candidate
        return None

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor is one that models compute themselves, or that their code skips."""
        return any(pattern.search(name) for pattern in self._ignored)


def _renamings(model: Any) -> list[Callable[[str], str]]:
    """Return transformers' functions that rename a tensor of a former release."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    found = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    return [lambda name, one=one: one.rename_source_key(name)[0] for one in found]


def _refuse_names(folder: WeightsFolder, missing: list[str], unexpected: list[str]) -> None:
    """Refuse a folder that lacks tensors of the model, or has others."""
    if not missing and not unexpected:
        return
    found = [*([f"it lacks {_some(missing)}"] if missing else [])]
    found += [f"it has {_some(unexpected)}, which the model lacks"] if unexpected else []
    remedy, quantised = OTHER_CONFIG, [name for name in unexpected if OF_QUANTISED.search(name)]
    if any("lora_" in name for name in unexpected):
        remedy = "name a folder without an adapter's tensors: merge the adapter, or name its base model"
    elif quantised:
        remedy = f"name a folder with weights in bf16, fp16 or fp32: these are quantised{_method(folder)}"
    raise InputError("; ".join(found), remedy, field="model.weights", value=str(folder.path))


def _method(folder: WeightsFolder) -> str:
    given = own_config(folder.path).get("quantization_config")
    method = given.get("quant_method") if isinstance(given, dict) else None
    return f" ({method})" if isinstance(method, str) else ""


def _some(names: list[str]) -> str:
    noun = "tensor" if len(names) == 1 else "tensors"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} {noun} ({', '.join(names[:NAMES_SHOWN])}{more})"


def _check_forms(found: Matched, parameters: dict[str, Tensor]) -> None:
    for stored, header in found.headers():
        wrong = {"field": stored.name, "file": str(header.file)}
        if header.shape != stored.shape:
            problem = f"shape {list(header.shape)} where the config needs {list(stored.shape)}"
            raise InputError(problem, OTHER_CONFIG, **wrong)
        if parameters[stored.parameter].is_floating_point() and header.dtype not in FLOATING:
            problem = f"its values are {header.dtype}, quantised{_method(found.folder)}"
            remedy = "name a folder with weights in bf16, fp16 or fp32"
            raise InputError(problem, remedy, **wrong)


def dtypes(headers: Iterable[Header]) -> list[str]:
    """Return the floating dtypes that tensors are stored in, as messages name them."""
    return sorted({FLOATING[one.dtype] for one in headers if one.dtype in FLOATING})
