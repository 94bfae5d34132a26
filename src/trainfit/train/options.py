"""TrainOptions: everything about a run that is not the step itself: where, how long, on which data, what to save.

No torch here. The recipe says what a step is; these say how many, and on what.
"""

import errno
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainfit.spec.errors import InputError
from trainfit.spec.value import Count, PositiveInt, Value

MAX_STORIES = 2**24
TEXT_SUFFIXES = (".txt", ".md", ".text", ".jsonl")


class StoriesData(Value):
    """Short stories made by a small grammar (stories.py): no download, the same everywhere."""

    kind: Literal["stories"] = "stories"
    num_documents: PositiveInt = 4000
    seed: Count = 0


class TextData(Value):
    """A text file, a ``.jsonl`` file with a ``text`` field a line, or a folder of such files.

    ``separator``: the text that ends a document. None: ``<|endoftext|>`` where a file has it; otherwise files are cut
    at blank lines into documents of a few thousand characters.
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


DataSpec = Annotated[StoriesData | TextData | HubData, Field(discriminator="kind")]


class TrainOptions(Value):
    """One training run.

    A resumed run may change the fields in ``MAY_CHANGE``; any other difference is refused, because losses would no
    longer be those of an uninterrupted run.
    """

    out: str
    """The run's folder: made if missing, refused if it holds another run and ``resume`` is off."""
    steps: PositiveInt = 100
    """Optimizer steps of the whole run, counted from its first start."""
    resume: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: DataSpec = StoriesData()
    eval_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Share of documents kept for evaluation, chosen by a hash of their text; 0: no evaluation."""
    tokenizer: str | None = None
    """Path of a ``tokenizer.json``. None: a byte-level BPE is trained on the training documents."""
    eval_every: PositiveInt | None = None
    """Evaluate every so many steps; None: only at the end."""
    eval_sequences: PositiveInt = 64
    """At most so many sequences an evaluation."""
    save_every: PositiveInt | None = None
    """Save every so many steps; None: at the end, and when the run is told to stop."""
    save_last: bool = True
    """Save after the last step; off where only the numbers of a run are wanted."""
    keep: PositiveInt = 2
    """Checkpoints kept, newest first."""
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Count = 0
    deterministic: bool = True
    """On CUDA, only kernels that give the same bits every time: what a bit-identical resume needs."""
    tensorboard: bool = True

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
    "tensorboard",
)  # fmt: skip
"""Fields of TrainOptions that a resumed run may change."""


def is_there(path: Path) -> bool:
    """Whether a file or folder has this name; a name that no file system takes is not there."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def data_from(text: str) -> StoriesData | TextData | HubData:
    """What ``--data`` says: ``stories``, ``stories:5000``, ``hub:NAME`` or a path.

    Raises:
        InputError: no such file or folder, or not a count.
    """
    kind, colon, rest = text.partition(":")
    if "\0" in text:
        raise InputError("not a path", "name a text file or a folder", field="data", value=text)
    if kind == "stories" and not is_there(Path(text)):
        if colon and not (rest.isascii() and rest.isdigit() and 0 < int(rest[:20]) <= MAX_STORIES):
            remedy = f"write such as stories:5000, at most stories:{MAX_STORIES}"
            raise InputError("not a number of stories", remedy, field="data", value=text)
        return StoriesData(num_documents=int(rest)) if colon else StoriesData()
    if kind == "hub" and colon:
        if not rest:
            raise InputError(
                "no dataset named", "write such as hub:roneneldan/TinyStories", field="data", value=text
            )
        return HubData(name=rest)
    if not is_there(Path(text)):
        raise InputError(
            "no such file or folder",
            "name a text file, a folder, 'stories' or 'hub:NAME'",
            field="data",
            value=text,
        )
    return TextData(path=text)
