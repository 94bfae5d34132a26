"""Tokens that end a completion: the tokenizer's end, those that the model's folder names, and the recipe's.

Chat models end a turn with another token than a document: Llama 3's generation_config.json names three, of
which its tokenizer is one. Generation of transformers and of vLLM ends at any of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trainfit.models.weights.folder import located
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import read_json
from trainfit.spec.recipe import RANDOM
from trainfit.training.tokenizer import encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENERATION, CONFIG = "generation_config.json", "config.json"
KEY = "eos_token_id"
FIELD = "objective.rollout.stop"


def of_folders(tokenizer: str | None, weights: str) -> tuple[int, ...]:
    """Return the ids that the folders of the tokenizer and of the weights name, ascending.

    Args:
        tokenizer: a ``tokenizer.json``, a folder or a name on the Hub; None: a new one is trained.
        weights: ``model.weights``.

    Raises:
        InputError: a file that is there and cannot be read, or names no ids.
    """
    names = ([] if tokenizer is None else [tokenizer]) + ([] if weights == RANDOM else [weights])
    folders = [folder for name in names if (folder := _folder(name)) is not None]
    return tuple(sorted({one for folder in folders for one in _named_in(folder)}))


def _folder(name: str) -> Path | None:
    """Return the folder of a file, a folder, or a repository in the Hub's cache; None: it is not there."""
    path = Path(name).expanduser()
    if path.exists():
        return path.parent if path.is_file() else path
    return located(name, fetch=False) if name.count("/") == 1 else None


def _named_in(folder: Path) -> set[int]:
    """Return the ids of generation_config.json, else of config.json, as transformers' ``generate`` takes."""
    for file in (folder / GENERATION, folder / CONFIG):
        if not file.is_file():
            continue
        content = read_json(file)
        named = content.get(KEY) if isinstance(content, dict) else None
        if named is None:
            continue
        ids = named if isinstance(named, list) else [named]
        if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
            raise InputError("no token ids", "write a number or a list of them", file=str(file), field=KEY)
        return set(ids)
    return set()


def of_recipe(words: Iterable[str | int], tokenizer: Tokenizer, vocabulary: int) -> tuple[int, ...]:
    """Return the ids of ``objective.rollout.stop``.

    Raises:
        InputError: an id that the model does not have, or a text of several tokens.
    """
    return tuple(_id_of(word, tokenizer, vocabulary) for word in words)


def _id_of(word: str | int, tokenizer: Tokenizer, vocabulary: int) -> int:
    if isinstance(word, int):
        if word >= vocabulary:
            problem, remedy = f"the model has {vocabulary:,} tokens", "use a smaller id, or a token's text"
            raise InputError(problem, remedy, field=FIELD, value=word)
        return word
    if (known := tokenizer.token_to_id(word)) is not None:  # Also names of special tokens.
        return known
    (found,) = encode(tokenizer, [word], None)
    if len(found.ids) != 1:
        problem = f"the tokenizer writes it as {len(found.ids)} tokens, {found.tokens}"
        raise InputError(problem, "use the text or the id of one token", field=FIELD, value=word)
    return found.ids[0]
