"""Files of the Hub other than weights: config.json, generation_config.json and the tokenizer's."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainfit.models.hf import hf_config_from
from trainfit.models.weights.folder import located
from trainfit.spec.errors import InputError
from trainfit.spec.files import writing
from trainfit.training import durable
from trainfit.training.corpus import TOKENIZER, opened
from trainfit.training.export.saved_run import SavedRun
from trainfit.training.folder import DATA
from trainfit.training.tokenizer import end_token, load_tokenizer, tokenizer_digest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
WITH_TOKENIZER = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Files that belong to a tokenizer.json of the Hub."""
LOADER = "PreTrainedTokenizerFast"
"""transformers' class that reads a tokenizer.json as it is. For some types AutoTokenizer takes another class,
such as Qwen2Tokenizer, which makes a tokenizer of its own from the vocabulary."""
SAMPLE_TOKENS = 20_000
"""Tokens of the training data with which AutoTokenizer's result is compared."""


def check_loads(config: dict[str, Any]) -> None:
    """Refuse a model type that AutoModelForCausalLM does not load."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    hf_config: Any = hf_config_from(config)
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        problem = "AutoModelForCausalLM loads no model of this type, which is part of a multimodal model"
        remedy = "its weights stay in the run's checkpoint"
        raise InputError(problem, remedy, field="model.config.model_type", value=hf_config.model_type)


def write_config(
    folder: Path, config: dict[str, Any], dtype: torch.dtype, special: dict[str, Any], *, is_untied: bool
) -> None:
    """Write config.json.

    Args:
        config: the mapping that the model was built from.
        dtype: of the weights in the folder.
        special: ids of special tokens.
        is_untied: the output layer has weights of its own.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    hf_config: Any = hf_config_from(config)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    hf_config.use_cache = config.get("use_cache", True)
    hf_config.architectures = [found.__name__]
    hf_config.dtype = dtype
    if is_untied:
        hf_config.tie_word_embeddings = False
    for key, value in special.items():
        setattr(hf_config, key, value)
    with writing(folder):
        hf_config.save_pretrained(folder)


def write_generation_config(folder: Path, special: dict[str, Any], base: str | None) -> None:
    """Write generation_config.json: the base's if it ends at the same token, else greedy.

    Args:
        base: the weights that the run began with; None: random ones.
    """
    from transformers import GenerationConfig

    end = special.get("eos_token_id")
    own = GenerationConfig(**special, pad_token_id=None if end is None else listed(end)[0])
    found = None if base is None else located(base, fetch=False)
    if found is not None and (found / GENERATION).is_file():
        of_base = GenerationConfig.from_pretrained(found)
        if end is None or listed(end)[0] in listed(of_base.eos_token_id):
            own = of_base
    with writing(folder):
        own.save_pretrained(folder)


def max_length(config: dict[str, Any]) -> int | None:
    """Return the tokens that the model was made for; None: its config does not say."""
    found = getattr(hf_config_from(config), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def special_tokens(run: SavedRun, config: dict[str, Any]) -> dict[str, Any]:
    """Return the ids with which text begins and ends: the config's if the tokenizer has them, else its own.

    A tokenizer that the run trained ends documents with one token, after which the next begins.
    """
    tokenizer = _tokenizer(run)
    if tokenizer is None:
        return {}
    hf_config: Any = hf_config_from(config)
    special = {number for number, one in tokenizer.get_added_tokens_decoder().items() if one.special}
    end = opened(run.folder / DATA, run.recipe.batch.seq).index.end
    end = end_token(tokenizer) if end is None else end
    found: dict[str, Any] = {"eos_token_id": end, "bos_token_id": None}
    if run.options.tokenizer is None:
        return {**found, "bos_token_id": end}
    for key in found:
        own = getattr(hf_config, key, None)
        if own is not None and set(listed(own)) <= special:
            found[key] = own
    return found


def write_tokenizer(
    folder: Path, run: SavedRun, special: dict[str, Any], max_length: int | None
) -> list[str]:
    """Write the run's tokenizer so that AutoTokenizer gives the tokens that it was trained on.

    Args:
        max_length: tokens that the model takes; None: no bound is known.

    Returns:
        The files' names; none where the run's data is gone.
    """
    source = run.folder / DATA / TOKENIZER
    tokenizer = _tokenizer(run)
    if tokenizer is None:
        return []
    with writing(folder):
        shutil.copyfile(source, folder / TOKENIZER)
        names = [TOKENIZER, *_beside_original(run, folder)]
    if TOKENIZER_CONFIG not in names:
        tokens = {
            key.removesuffix("_id"): listed(value)[0] for key, value in special.items() if value is not None
        }
        content = {key: tokenizer.id_to_token(number) for key, number in tokens.items()}
        content |= {"clean_up_tokenization_spaces": False, "tokenizer_class": LOADER}
        content |= {"model_max_length": max_length} if max_length is not None else {}
        durable.write_json(folder / TOKENIZER_CONFIG, content)
        names.append(TOKENIZER_CONFIG)
    return names


def tokenizer_note(folder: Path, run: SavedRun) -> str | None:
    """Return a note if AutoTokenizer does not give the tokens of the run's data; None: it does."""
    from transformers import AutoTokenizer

    tokenizer = _tokenizer(run)
    if tokenizer is None:
        return "no tokenizer: the run's data folder is gone"
    tokens = opened(run.folder / DATA, run.recipe.batch.seq).train.tokens[:SAMPLE_TOKENS]
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
    remedy = f"load it with transformers.{LOADER}.from_pretrained"
    try:
        # A tokenizer_config.json that came along may name code of a repository, which is never run.
        loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        ids = loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # Of the class that the configuration names.
        text = str(error).replace(str(folder), "of the folder") or type(error).__name__
        reason = text.strip().partition("\n")[0].partition(". ")[0]
        return f"AutoTokenizer does not load the tokenizer ({reason}): {remedy}"
    if ids == tokenizer.encode(text, add_special_tokens=False).ids:
        return None
    return (
        f"AutoTokenizer's {type(loaded).__name__} splits text differently from the run's tokenizer: {remedy}"
    )


def _beside_original(run: SavedRun, folder: Path) -> list[str]:
    """Copy what belongs to the run's tokenizer, and return the files' names.

    The run keeps the files of a folder or of a name on the Hub, and a chat template. Of a tokenizer.json it
    keeps that file; the other files of its folder are copied if it is unchanged.
    """
    kept = run.folder / DATA
    names = [name for name in WITH_TOKENIZER if (kept / name).is_file()]
    for name in names:
        shutil.copyfile(kept / name, folder / name)
    if TOKENIZER_CONFIG in names:
        return names
    return [*names, *_beside_file(run, folder, without=names)]


def _beside_file(run: SavedRun, folder: Path, *, without: list[str]) -> list[str]:
    given = run.options.tokenizer and Path(run.options.tokenizer)
    if not given or not given.is_file():
        return []
    made_of = opened(run.folder / DATA, run.recipe.batch.seq).index.identity
    if made_of.get("tokenizer") != tokenizer_digest(given):
        return []
    others = [name for name in WITH_TOKENIZER if name not in without]
    names = [name for name in others if (given.parent / name).is_file()]
    for name in names:
        shutil.copyfile(given.parent / name, folder / name)
    return names


def _tokenizer(run: SavedRun) -> "Tokenizer | None":
    path = run.folder / DATA / TOKENIZER
    return load_tokenizer(path)[0] if path.is_file() else None


def listed(value: Any) -> list[int]:
    """Return one id, or several, as a list."""
    return value if isinstance(value, list) else [value]
