"""Options of a training run: how many steps of a recipe, on which data, and what is saved. Free of torch."""

import errno
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainfit.spec.errors import InputError
from trainfit.spec.value import Count, FromPercent, PositiveInt, Value

SYNTHETIC: Literal["stories"] = "stories"
MAX_SYNTHETIC = 2**24
TEXT_SUFFIXES = (".txt", ".md", ".text", ".jsonl")


class SyntheticData(Value):
    """Synthetic text from a small grammar (synthetic.py): no download, the same on every machine."""

    kind: Literal["stories"] = SYNTHETIC
    num_documents: PositiveInt = 4000
    seed: Count = 0


class TextData(Value):
    """A text file, a ``.jsonl`` file with a ``text`` field per line, or a folder of such files.

    ``separator`` ends a document. None: ``<|endoftext|>`` if the file has it; otherwise the file is cut at
    blank lines into documents of a few thousand characters.
    """

    kind: Literal["text"] = "text"
    path: str
    separator: str | None = None


class HubData(Value):
    """A Hugging Face dataset, streamed by the ``datasets`` library (extra ``datasets``)."""

    kind: Literal["hub"] = "hub"
    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    max_documents: PositiveInt | None = None


DataSpec = Annotated[SyntheticData | TextData | HubData, Field(discriminator="kind")]


class TrainOptions(Value):
    """Options of one training run. A resumed run may change only the fields in ``MAY_CHANGE``."""

    out: str  # Folder of the run, made if missing
    steps: PositiveInt = 100  # Optimizer steps of the whole run, counted from its first start
    resume: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: DataSpec = SyntheticData()
    eval_fraction: Annotated[float, Field(ge=0, le=0.5), FromPercent] = 0.05
    """Share of documents held out, chosen by a hash of their text; 0: no evaluation."""
    tokenizer: str | None = None
    """Path of a ``tokenizer.json``. None: a byte-level BPE is trained on the training documents."""
    eval_every: PositiveInt | None = None  # Steps between evaluations; None: only at the end
    eval_sequences: PositiveInt = 64  # Sequences per evaluation at most
    save_every: PositiveInt | None = None
    """Steps between checkpoints; None: at the end, and when a signal stops the run."""
    save_last: bool = True  # Save after the last step
    keep: PositiveInt = 2  # Number of newest checkpoints kept
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Count = 0
    deterministic: bool = True
    """On CUDA, use kernels that repeat bit by bit, as a bit-identical resume requires."""
    tensorboard: bool = True
    hang_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """On several ranks: the run ends, and names the rank that is behind, after so long without progress."""

    @model_validator(mode="after")
    def _warmup_ends(self) -> "TrainOptions":
        if self.schedule == "cosine" and self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leaves no step of {self.steps} to the cosine")
        return self

    @property
    def folder(self) -> Path:
        return Path(self.out)


MAY_CHANGE = (
    "out", "steps", "resume", "device", "eval_every", "eval_sequences", "save_every", "save_last", "keep",
    "tensorboard", "hang_timeout_s",
)  # fmt: skip
"""Fields without influence on the losses: a resumed run may change them."""


def is_there(path: Path) -> bool:
    """Return whether the path exists; a name that is too long for the file system does not."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def data_from(text: str) -> SyntheticData | TextData | HubData:
    """Parse ``--data``: ``SYNTHETIC``, alone or with a count of documents, ``hub:NAME`` or a path."""
    kind, colon, rest = text.partition(":")
    if "\0" in text:
        problem, remedy = "not a path", "name a text file or a folder"
    elif is_there(Path(text)) and not text.startswith("hub:"):
        return TextData(path=text)
    elif kind == SYNTHETIC:
        if not colon:
            return SyntheticData()
        if rest.isascii() and rest.isdigit() and 0 < int(rest[:20]) <= MAX_SYNTHETIC:
            return SyntheticData(num_documents=int(rest))
        problem, remedy = (
            "not a number of documents",
            f"write such as {kind}:5000, at most {kind}:{MAX_SYNTHETIC}",
        )
    elif kind == "hub" and colon:
        if rest:
            return HubData(name=rest)
        problem, remedy = "no dataset named", "write such as hub:roneneldan/TinyStories"
    else:
        problem, remedy = "no such file or folder", f"name a text file, a folder, '{SYNTHETIC}' or 'hub:NAME'"
    raise InputError(problem, remedy, field="data", value=text)
