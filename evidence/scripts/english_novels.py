"""Text of English novels and a tokenizer, which ``recipes/speed/loss-matched-0.5b.yaml`` trains on.

    git clone https://github.com/computationalstylistics/100_english_novels
    python -m evidence.scripts.english_novels 100_english_novels [--out build/english-novels] [--record FILE]

The novels are read at one commit of that repository; those published after 1930 are left out, as they are not
in the public domain everywhere. OUT gets ``train.txt``, ``eval.txt`` (every 20th novel) and
``tokenizer.json``, a byte-level BPE of 16,384 tokens trained on ``train.txt``. With ``--record``, FILE gets
the commit, the numbers of novels, characters and tokens, and the SHA-256 of each file. The text itself is not
committed.
"""

import argparse
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from trainfit.training.documents import END_OF_TEXT
from trainfit.training.tokenizer import TOKENIZER, encode, train_tokenizer

SOURCE = "https://github.com/computationalstylistics/100_english_novels"
COMMIT = "143e601875d70e195f2cc5ebd8b034609271194d"
LAST_YEAR = 1930
HELD_OUT_EVERY = 20
VOCABULARY = 16_384
NAME = re.compile(r"corpus/(\w+_(\d{4}))\.txt")
TEXTS = ("train.txt", "eval.txt")
SEPARATOR = f"\n{END_OF_TEXT}\n"


def novels(archive: bytes) -> dict[str, str]:
    """Return the text of each novel by its name, in the order of the names.

    Args:
        archive: a tar file of the repository's folder ``corpus``.
    """
    found = dict[str, str]()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in sorted(tar.getmembers(), key=lambda one: one.name):
            named, file = NAME.fullmatch(member.name), tar.extractfile(member)
            if named is None or file is None or int(named[2]) > LAST_YEAR:
                continue
            text = file.read().decode("utf-8-sig")
            found[named[1]] = text.replace("\r\n", "\n").strip()
    return found


def split(texts: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the names of the novels to train on, and of those that are held out."""
    names = list(texts)
    held_out = names[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return [name for name in names if name not in held_out], held_out


def build(texts: dict[str, str], out: Path, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Write the texts and the tokenizer into ``out``, and return what the record holds of them."""
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = split(texts)
    tokenizer = train_tokenizer((texts[name] for name in train), vocabulary)
    tokenizer.save(str(out / TOKENIZER))
    files = dict[str, dict[str, Any]]()
    for file, names in zip(TEXTS, (train, held_out), strict=True):
        (out / file).write_bytes(SEPARATOR.join(texts[name] for name in names).encode())
        # One novel at a time: an encoding keeps the offsets of all its tokens.
        tokens = sum(len(encode(tokenizer, [texts[name]], None)[0].ids) for name in names)
        files[file] = {
            "novels": len(names), "characters": sum(len(texts[name]) for name in names), "tokens": tokens,
        }  # fmt: skip
    files[TOKENIZER] = {"tokens": tokenizer.get_vocab_size()}
    for file, known in files.items():
        known["sha256"] = hashlib.sha256((out / file).read_bytes()).hexdigest()
    return {"source": SOURCE, "commit": COMMIT, "held_out": held_out, "files": files}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clone", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/english-novels"))
    parser.add_argument("--record", type=Path)
    options = parser.parse_args(arguments)
    command = ["git", "-C", str(options.clone), "archive", "--format=tar", COMMIT, "corpus"]
    made = subprocess.run(command, capture_output=True, check=False)
    if not made.stdout:
        sys.exit(f"{options.clone}: {made.stderr.decode().strip() or 'no novels'}")
    texts = novels(made.stdout)
    found = build(texts, options.out)
    if options.record is not None:
        options.record.parent.mkdir(parents=True, exist_ok=True)
        options.record.write_text(json.dumps(found, indent=2) + "\n")
    for file, known in found["files"].items():
        print(file, *(f"{value:,} {name}" for name, value in known.items() if name != "sha256"), sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
