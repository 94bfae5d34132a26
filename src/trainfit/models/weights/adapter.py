"""Read an adapter that PEFT saved, as the start of a recipe's adapter.

The native decoder's fused projections have one adapter where transformers' model has several. It takes those
that share the matrix A, as ``trainfit export`` writes them: B's rows are joined.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainfit.models.weights.folder import ADAPTER, ADAPTER_CONFIG, headers
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import read_config
from trainfit.spec.recipe import Recipe

PREFIX = "base_model.model."
"""PEFT's prefix of every module."""
NAMES_SHOWN = 3
KINDS = {"LORA": "lora", "PROMPT_TUNING": "prompt"}
"""PEFT's type of an adapter that can be trained on -> ``adapter.kind``."""
VIRTUAL = "prompt_embeddings"
MAGNITUDE = ".lora_magnitude_vector"
"""End of PEFT's name of DoRA's magnitudes, which are the weight of a module of that name."""
NOT_READ = (
    "alpha_pattern", "rank_pattern", "alora_invocation_tokens", "arrow_config", "kasa_config",
    "layer_replication", "monteclora_config", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
"""Keys of PEFT's config that change what an adapter computes, and that no recipe has."""
INITS_OF_AN_EQUAL_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base's weights as they are; the others change them."""
SHARED = ("lora_A", "lora_embedding_A")


def check_adapter(folder: Path, recipe: Recipe) -> None:
    """Refuse an adapter that is not the recipe's, by its adapter_config.json.

    Raises:
        InputError: it computes something else than the recipe's adapter, such as by another rank or alpha.
    """
    file = folder / ADAPTER_CONFIG
    config = read_config(file)
    kind = KINDS.get(str(config.get("peft_type")).rpartition(".")[2])
    own = recipe.adapter
    if kind is None:
        problem = f"training does not go on from an adapter of type {config.get('peft_type')}"
        remedy = f"name one of {', '.join(KINDS)}, or the base model's folder"
        raise InputError(problem, remedy, field="model.weights", value=str(folder))
    # p-tuning without its layers is saved as what it is, prompt tuning.
    is_prompt = own is not None and own.kind == "p-tuning" and own.encoder == "none"
    if own is None or (own.kind != kind and not (is_prompt and kind == "prompt")):
        problem = f"the folder holds an adapter ({kind}), and the recipe has {own.kind if own else 'none'}"
        raise InputError(problem, f"add --set adapter={kind}", field="model.weights", value=str(folder))
    if kind != "lora":
        return
    alpha = own.alpha or own.rank
    for field, mine, theirs in (
        ("adapter.rank", own.rank, config.get("r")),
        ("adapter.alpha", alpha, config.get("lora_alpha")),
        ("adapter.rslora", own.rslora, bool(config.get("use_rslora"))),
        ("adapter.dora", own.dora, bool(config.get("use_dora"))),
    ):
        if mine != theirs:
            problem = f"the adapter of {folder} has {str(theirs).lower()}"
            raise InputError(problem, f"write {field}: {str(theirs).lower()}", field=field, value=mine)
    _check_plain(config, file)


def _check_plain(config: dict[str, Any], file: Path) -> None:
    """Refuse a LoRA that computes something else than a recipe's, with tensors of equal names and shapes."""
    remedy = "merge the adapter into its base with PEFT, and name the merged model's folder"
    for key in NOT_READ:
        if config.get(key):
            problem = "no recipe's adapter has it"
            raise InputError(problem, remedy, field=key, value=config[key], file=str(file))
    init = config.get("init_lora_weights", True)
    if init not in INITS_OF_AN_EQUAL_BASE:
        problem = "this initialisation changed the base's weights, which the base's folder has unchanged"
        raise InputError(problem, remedy, field="init_lora_weights", value=init, file=str(file))


@torch.no_grad()
def read_adapter(folder: Path, recipe: Recipe, model: nn.Module) -> None:
    """Read the folder's adapter into a model with the recipe's adapter; each rank keeps its part.

    Raises:
        InputError: its tensors are not those of the recipe's adapter.
    """
    from safetensors.torch import load_file

    check_adapter(folder, recipe)
    file = folder / ADAPTER
    dict(headers(file))  # Refuses a damaged file.
    state = load_file(file)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    modules = _fused_modules(recipe)
    used: set[str] = set()
    missing: list[str] = []
    for name, parameter in trained.items():
        sources = _sources(name, modules)
        found = [state[source] for source in sources if source in state]
        used.update(sources)
        if len(found) < len(sources):
            missing += [source for source in sources if source not in state]
            continue
        value = found[0] if len(found) == 1 else _joined(sources, found, file)
        _copy(value, parameter, sources[0], file)
    unexpected = [name for name in state if name not in used]
    for names, problem in ((missing, "lacks"), (unexpected, "has, and the recipe's adapter has not,")):
        if names:
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            problem = f"it {problem} {', '.join(names[:NAMES_SHOWN])}{more}"
            raise InputError(problem, "write the adapter.targets that it was trained with", file=str(file))


def _fused_modules(recipe: Recipe) -> dict[str, list[str]]:
    """Return the modules of transformers' model that each of the native decoder's is; empty for ``hf``."""
    if recipe.model.implementation == "hf":
        return {}
    from trainfit.models.build import build_model
    from trainfit.models.weights.layout import layout

    found: dict[str, list[str]] = {}
    for stored in layout(build_model(recipe.model, dtype=torch.float32, device="meta")):
        if stored.parameter.endswith(".weight"):
            names = found.setdefault(stored.parameter.removesuffix(".weight"), [])
            names.append(stored.name.removesuffix(".weight"))
    return found


def _sources(name: str, modules: dict[str, list[str]]) -> list[str]:
    """Return PEFT's names of the tensors that a trained parameter is made of."""
    if "prompt_encoder." in name:
        return [VIRTUAL]
    saved = name.replace(".modules_to_save.default", "").replace(".default", "")
    saved = saved.removesuffix(".weight") if saved.endswith(f"{MAGNITUDE}.weight") else saved
    module = inner = saved.removeprefix(PREFIX)
    while module and module not in modules:
        module = module.rpartition(".")[0]
    if not module:
        return [saved]
    return [f"{PREFIX}{theirs}{inner.removeprefix(module)}" for theirs in modules[module]]


def _joined(sources: list[str], found: list[Tensor], file: Path) -> Tensor:
    """Return one tensor of a fused projection's adapter."""
    if not any(part in sources[0].split(".") for part in SHARED):
        return torch.cat(found)
    if not all(torch.equal(one, found[0]) for one in found[1:]):
        problem = "differs from that of the projections that the native decoder has fused with it"
        raise InputError(problem, "use model.implementation: hf", field=sources[0], file=str(file))
    return found[0]


def _copy(value: Tensor, parameter: Any, name: str, file: Path) -> None:
    if value.shape != parameter.shape:
        problem = f"shape {list(value.shape)} where the recipe's adapter has {list(parameter.shape)}"
        raise InputError(problem, "use the recipe that it was trained with", field=name, file=str(file))
    if isinstance(parameter, DTensor):  # Without a source rank each rank cuts its own copy.
        value = value.to(parameter.device, parameter.dtype)
        parts = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(parts.to_local())
    else:
        parameter.copy_(value)
